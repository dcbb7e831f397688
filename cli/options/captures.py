"""The argument CAPTURE, one or several, and the options for several."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, TypeAlias

import typer

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.files import check_output, mode_of_report
from iaprof.cli.options.declared import For, Of
from iaprof.cli.options.values import words_of
from iaprof.formats.stores import is_url, without_credentials

DEFAULT = Path("iaprof.parquet")
Capture: TypeAlias = Annotated[Path, typer.Argument(metavar="CAPTURE", help="A capture that 'iaprof record' wrote.")]
FirstCapture: TypeAlias = Annotated[
    str | None,
    typer.Argument(metavar="CAPTURE", help=f"A file that 'iaprof record' wrote.  [default: {DEFAULT}]"),
]
"""A capture before another argument, which can be given without it: see capture_and."""
_PANEL = "Several captures"
_PATTERN = "*?["
ONE = [str(DEFAULT)]
"""The captures of a verb that gets none."""
Captures: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="CAPTURE", help="Captures that 'iaprof record' wrote, or folders, patterns and URLs of captures."
    ),
]
"""The argument of verbs that report several captures together."""


def existing(path: Path, absent: Callable[[Path], str] | None = None) -> Path:
    """Returns the path of a capture, or of another file.

    Args:
        path: the path.
        absent: says of another file than a capture what to do if it is not there.

    Raises:
        IaprofError: there is no such file.
    """
    try:
        path.stat()
    except FileNotFoundError:
        raise IaprofError((absent or _absent)(path)) from None
    except OSError:
        pass  # opening it says why
    return path


def capture_and(first: str | None, second: str | None) -> tuple[Path, str | None]:
    """Tells the two arguments of a verb apart, the first of which, CAPTURE, can be left out.

    A single argument is a capture if there is such a file, or if it is named like one.

    Raises:
        IaprofError: there is no such capture.
    """
    if first is not None and second is None and not first.endswith(DEFAULT.suffix) and not os.path.isfile(first):
        first, second = None, first
    return existing(DEFAULT if first is None else Path(first)), second


def check_report(words: Sequence[str], output: Path, force: bool) -> int:
    """Checks that a report of captures may be written, and over none of them.

    Args:
        words: paths, patterns, folders and URLs of the captures.
        output: the report.
        force: whether an existing file may be replaced.

    Returns:
        The mode of the report. Nobody may read it who may not read all captures; and of those in a store it is not
        known who may.

    Raises:
        UsageError: the words name nothing.
        IaprofError: it may not be written.
    """
    from iaprof.report.fleet.sources import find_sources

    check_output(output, force)
    names = [source.name for source in find_sources([word for word in words if not is_url(word)])]
    for name in names if output.exists() else ():
        check_output(output, True, Path(name))
    mode = mode_of_report(*names)
    return mode & 0o600 if any(map(is_url, words)) else mode


def _absent(path: Path) -> str:
    spool = path.with_name(f"{path.name}.spool")
    if spool.is_file():
        return (
            f"{path} does not exist, but {spool} does: wait until the recording has ended, or, if its recorder died, "
            f"run 'sudo iaprof recover {spool}'"
        )
    if path == DEFAULT:
        return f"{path} does not exist: run 'iaprof record' first, or name a capture"
    return f"{without_credentials(str(path))} does not exist: name a file that 'iaprof record' wrote"


def is_several(words: Sequence[str]) -> bool:
    """Whether words name more than one local file, or may: then captures are reported together."""
    if len(words) != 1 or is_url(words[0]):
        return True
    path = Path(words[0])
    return path.is_dir() or (any(mark in words[0] for mark in _PATTERN) and not path.exists())


@dataclass(frozen=True)
class FleetOptions:
    """The options for several captures.

    Raises:
        UsageError: a value is invalid.
    """

    FOR: ClassVar[For] = For(Of.SEVERAL | Of.TREE)
    group_by: Annotated[
        list[str] | None,
        typer.Option(
            "--group-by",
            metavar="WHAT,...",
            help="Group by host, day, hour, capture, command, gpu, container, pod, device, hash or label:NAME.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="ADDRESS",
            help="Use N processes of this machine: local:N, or a Dask cluster: tls://HOST:PORT or tcp://HOST:PORT.  "
            "[default: a process for each core]",
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None
    cache: Annotated[
        str | None,
        typer.Option(
            "--cache",
            metavar="DIR|URL",
            help="Cache the captures' profiles here; none: do not cache them.  [default: ~/.cache/iaprof/profiles]",
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Fail if a capture cannot be read.",
            rich_help_panel=_PANEL,
        ),
    ] = False
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            help="Skip a capture that takes longer than this to read.  [default: 600]",
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Checks the values."""
        if self.groups:
            from iaprof.report.fleet.groups import Grouping

            Grouping.parse(self.groups)
        if self.timeout is not None and not 1 <= self.timeout < 1e9:
            raise UsageError("--timeout must be a number of seconds, 1 or more")

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """What captures are grouped by."""
        return tuple(words_of(self.group_by, "--group-by"))
