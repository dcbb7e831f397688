"""The argument CAPTURE, which all verbs treat alike: without it, they read what 'iaprof record' writes by default."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import check_output, mode_of_report
from iaprof.formats.stores import is_url, without_credentials

DEFAULT = Path("iaprof.parquet")
Capture: TypeAlias = Annotated[Path, typer.Argument(metavar="CAPTURE", help="A capture that 'iaprof record' wrote.")]
FirstCapture: TypeAlias = Annotated[
    str | None,
    typer.Argument(metavar="CAPTURE", help=f"A file that 'iaprof record' wrote.  [default: {DEFAULT}]"),
]
"""A capture before another argument, which can be given without it: see capture_and."""


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
