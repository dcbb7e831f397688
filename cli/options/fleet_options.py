"""The options for several captures, of the verbs that report them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from iaprof.basics.errors import UsageError
from iaprof.cli.options.added import add_options
from iaprof.cli.options.captures import DEFAULT
from iaprof.cli.options.quantities import words_of
from iaprof.formats.stores import is_url

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


def is_several(words: Sequence[str]) -> bool:
    """Whether words name more than one local file, or may: then captures are reported together."""
    if len(words) != 1 or is_url(words[0]):
        return True
    path = Path(words[0])
    return path.is_dir() or (any(mark in words[0] for mark in _PATTERN) and not path.exists())


@dataclass(frozen=True)
class FleetOptions:
    """The values of the options."""

    group_by: tuple[str, ...] = ()
    cluster: str | None = None
    cache: str | None = None  # None: the user's own folder
    strict: bool = False
    timeout_s: float | None = None  # None: sources.DEFAULT_TIMEOUT_S

    def refuse_for_one(self, verb: str) -> None:
        """Checks that none is given where one capture is reported.

        Raises:
            UsageError: one is.
        """
        given = {
            "--group-by": self.group_by, "--cluster": self.cluster, "--cache": self.cache, "--strict": self.strict,
            "--timeout": self.timeout_s,
        }  # fmt: skip
        for name, value in given.items():
            if value:
                raise UsageError(f"{name} is for several captures: 'iaprof {verb}' got one file")


def with_fleet(verb: Callable[..., None]) -> Callable[..., None]:
    """Replaces a verb's parameter `fleet` by the options."""
    return add_options(verb, _fleet, lambda fleet, own: verb(**own, fleet=fleet), left_out="fleet")


def _fleet(
    group_by: Annotated[
        list[str] | None,
        typer.Option(
            "--group-by",
            metavar="WHAT,...",
            help="Group by host, day, hour, capture, command, gpu, container, pod, device, hash or label:NAME.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
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
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            "--cache",
            metavar="DIR|URL",
            help="Cache the captures' profiles here; none: do not cache them.  [default: ~/.cache/iaprof/profiles]",
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Fail if a capture cannot be read.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            help="Skip a capture that takes longer than this to read.  [default: 600]",
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None,
) -> FleetOptions:
    words = words_of(group_by, "--group-by")
    if words:
        from iaprof.report.fleet.groups import Grouping

        Grouping.parse(words)
    if timeout is not None and not 1 <= timeout < 1e9:
        raise UsageError("--timeout must be a number of seconds, 1 or more")
    return FleetOptions(tuple(words), cluster, cache, strict, timeout)
