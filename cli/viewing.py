"""What `iaprof report` shows on a terminal: a table to look through."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from iaprof.cli.analysis import open_report
from iaprof.cli.options.fleet_options import FleetOptions, is_several
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.terminal.answers import Answers
from iaprof.cli.terminal.facts import say_facts
from iaprof.cli.terminal.pager import paged
from iaprof.cli.terminal.stdout import is_terminal
from iaprof.cli.timelines.reports import is_given

if TYPE_CHECKING:
    from iaprof.timelines.options import Options

_BY = "kernel"
_ALL = 0  # rows


def is_viewed(context: typer.Context, has_output: bool, shaping: Collection[str]) -> bool:
    """Whether a report is to be looked at, and not written in a format.

    Args:
        context: of the verb.
        has_output: whether an option names a format, a file or a browser.
        shaping: names of the verb's parameters that shape stacks, which only formats have.
    """
    return is_terminal() and not has_output and not any(is_given(context, name) for name in shaping)


def view(captures: Sequence[str], choice: SelectionOptions, fleet: FleetOptions, quiet: bool) -> None:
    """Shows stalls on the terminal: a table of all kernels."""
    if is_several(captures):
        from iaprof.cli.fleet import ask_fleet, say_fleet
        from iaprof.cli.fleet_tables import KEPT, show_fleet

        several = ask_fleet(captures, choice, fleet, frozenset(KEPT[_BY]))
        with paged():
            show_fleet(several, fleet.group_by, _BY, _ALL, Answers())
        if not quiet:
            say_fleet("report", several)
        return
    from iaprof.cli.terminal.ranking_tables import show

    with open_report(Path(captures[0]), choice) as report:
        with paged():
            show(report.profile, _BY, _ALL, Answers(), per_interval=False)
        if not quiet:
            say_facts("report", report.facts, report.header)


def view_time_lines(path: Path, options: Options, quiet: bool) -> None:
    """Shows time lines on the terminal: the tables of `iaprof timeline`."""
    from iaprof.cli.timelines.messages import say_messages
    from iaprof.cli.timelines.tables import show
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.timelines.outputs.formats import finished

    trace = finished(CaptureReader(path), options)
    with paged():
        show(trace, _ALL)
    if not quiet:
        say_messages(trace)
