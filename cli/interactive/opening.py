"""Opens the interactive view of a capture, or of two."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.cli.analysis import open_report
from iaprof.cli.options.captures import existing
from iaprof.cli.options.fleet_options import FleetOptions, is_several
from iaprof.cli.options.selection import SELECTING, SelectionOptions
from iaprof.cli.terminal.facts import say_facts
from iaprof.cli.timelines.reports import (
    check_options,
    hold_time_lines,
    holds_time_lines,
    refuse_for_stalls,
    stage_options,
)

if TYPE_CHECKING:
    from iaprof.cli.interactive.contents import Contents, Listing
    from iaprof.formats.profile import Profile
    from iaprof.report.facts import Report

Interactive = Annotated[
    bool, typer.Option("--interactive", "-i", help="Browse in the terminal: tree, search, filters.")
]
_TAKEN = SELECTING | {"captures", "before", "after", "interactive", "quiet", "memory_limit", "large"}
_GROUPING_OF = {name: name for name in ("kernel", "line", "instruction", "reason", "process", "launcher", "stack")} | {
    "function": "kernel",
    "operator": "stack",
}
_OF_SEVERAL = {"group_by", "cluster", "cache", "strict", "timeout"}
_OF_SLICES = frozenset(("captures", "interactive", "inverted", "freq", "quiet", "memory_limit", "large"))
_KEPT = frozenset(("launch", "kernel", "code", "offset", "device"))  # columns of fleet.rows.KEYS
_INTERVALS = 200  # of a recording, at most
_STEPS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 600, 1800, 3600)
_MOST_RECORDS_BY_TIME = 4_000_000  # stall records; each can become a row of an interval


def check_interactive(context: typer.Context, captures: Sequence[str], *takes: str) -> None:
    """Checks whether the view can be opened.

    Args:
        context: of the verb.
        captures: what the user named.
        takes: the verb's parameters that the view takes, besides those that all views take.

    Raises:
        UsageError: this is not a terminal, an option is not for the view, or it cannot show these captures.
        IaprofError: textual is not installed.
    """
    compares = "before" in context.params
    several = is_several(captures) and not compares
    taken = _TAKEN.union(takes)
    if several:  # profiles keep no code, beside which source lines would be shown
        taken = (taken - {"source_dirs", "freq"}) | _OF_SEVERAL
    for name in given(context, taken):
        raise UsageError(f"{name} has no effect on the interactive view: leave out one of them")
    if compares and any(is_several([each]) for each in captures):
        raise UsageError("--interactive compares two captures: 'iaprof merge' makes one of several")
    check_terminal("--interactive")
    if several:
        if hold_time_lines(captures):
            raise UsageError("the interactive view shows time lines of one capture: name one")
        return
    for capture in map(Path, captures):
        if holds_time_lines(existing(capture)):
            if context.info_name != "report":
                raise UsageError(f"{capture} holds time lines: look at it with 'iaprof report -i' or 'iaprof timeline'")
            check_options(context, capture, _OF_SLICES)
        else:
            refuse_for_stalls(context, capture, ("freq",))


def given(context: typer.Context, taken: Collection[str]) -> list[str]:
    """The options on the command line that are not among some parameters of the verb."""
    found = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in taken and source is not None and source.name == "COMMANDLINE":
            found.append(max(parameter.opts, key=len))
    return found


def check_terminal(option: str) -> None:
    """Checks whether there is what a view needs.

    Raises:
        UsageError: input, output or errors are not terminal.
        IaprofError: textual is not installed.
    """
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UsageError(f"{option} needs a terminal for its input, output and errors")
    if find_spec("textual") is None:
        raise IaprofError("the interactive view needs textual: install it with pip install 'iaprof[interactive]'")


def grouping_of(by: str) -> str:
    """The tree that shows best what a value of --by means.

    Raises:
        UsageError: there is none.
    """
    found = _GROUPING_OF.get(by)
    if found is None:
        raise UsageError(f"the interactive view has no tree of --by {by}: choose from {', '.join(_GROUPING_OF)}")
    return found


def view(
    verb: str,
    captures: Sequence[str],
    choice: SelectionOptions,
    fleet: FleetOptions,
    grouping: str,
    is_inverted: bool = False,
    source_dirs: Sequence[Path] = (),
    freq: str | None = None,
    quiet: bool = False,
) -> None:
    """Shows a capture, the sum of several, or time lines, until the user quits, then prints the report's summary.

    Args:
        verb: the verb's name.
        captures: what the user named.
        choice: the selection of stalls, and where to look for symbols.
        fleet: the options for several captures.
        grouping: of the first tree: one of browsing.levels.GROUPINGS.
        is_inverted: from the leaves to the root.
        source_dirs: folders with source files, for annotated kernels.
        freq: frequencies of time lines.
        quiet: print no summary.

    Raises:
        IaprofError: nothing can be read, or the filters match nothing.
        UsageError: a capture lacks something that the options name.
    """
    if is_several(captures):
        _view_several(verb, captures, choice, fleet, grouping, is_inverted, quiet)
    elif holds_time_lines(Path(captures[0])):
        _view_slices(Path(captures[0]), is_inverted, freq, quiet)
    else:
        _view_capture(verb, Path(captures[0]), choice, grouping, is_inverted, source_dirs, quiet)


def _view_several(
    verb: str,
    captures: Sequence[str],
    choice: SelectionOptions,
    fleet: FleetOptions,
    grouping: str,
    is_inverted: bool,
    quiet: bool,
) -> None:
    from iaprof.cli.fleet import about_fleet, ask_fleet, say_fleet
    from iaprof.cli.interactive.contents import Contents
    from iaprof.report.fleet.partial import profile_of

    report = ask_fleet(captures, choice, fleet, _KEPT)
    profile = profile_of(report.total)
    _show(Contents(about_fleet(report).title, profile, grouping, is_inverted, listing=_listing_without_code()))
    if not quiet:
        say_fleet(verb, report)


def _view_slices(capture: Path, is_inverted: bool, freq: str | None, quiet: bool) -> None:
    from iaprof.cli.interactive.contents import SLICES, Contents
    from iaprof.cli.timelines.messages import say_messages
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.timelines.outputs.formats import finished
    from iaprof.timelines.views.stacks import browsable

    trace = finished(CaptureReader(capture), stage_options(freq))
    _show(Contents(str(capture), browsable(trace), is_inverted=is_inverted, measure=SLICES))
    if not quiet:
        say_messages(trace)


def _view_capture(
    verb: str,
    capture: Path,
    choice: SelectionOptions,
    grouping: str,
    is_inverted: bool,
    source_dirs: Sequence[Path],
    quiet: bool,
) -> None:
    from iaprof.cli.interactive.contents import Contents
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.about import about

    interval_s = interval_of(capture)
    with open_report(capture, choice, interval_s, texts=True) as report:
        title = " · ".join(filter(None, (str(capture), about(CaptureReader(capture)).title)))
        listing = _listing(report, source_dirs)
        _show(Contents(title, report.profile, grouping, is_inverted, interval_s=interval_s, listing=listing))
    if not quiet:
        say_facts(verb, report.facts, report.header)


def view_difference(
    before: Path, after: Path, choice: SelectionOptions, grouping: str, is_relative: bool, quiet: bool = False
) -> None:
    """Shows what changed between two captures until the user quits, then prints a summary of each.

    Args:
        before: a capture.
        after: another one, whose kernels are annotated.
        choice: the selection of stalls, and where to look for symbols.
        grouping: of the first tree: one of browsing.levels.GROUPINGS.
        is_relative: compare shares, not samples.
        quiet: print no summary.

    Raises:
        CaptureError: a file is not a capture, or is damaged.
        UsageError: a capture lacks something that the options name.
    """
    from iaprof.cli.interactive.contents import Contents
    from iaprof.report.views.difference import joined

    with open_report(before, choice) as old:
        pass
    with open_report(after, choice, texts=True) as new:
        both = joined(old.profile, new.profile)
        title, listing = f"{before} before, {after} after", _listing(new, (), len(old.profile.kernels))
        _show(Contents(title, both, grouping, sides=2, is_relative=is_relative, listing=listing))
    if not quiet:
        for path, report in ((before, old), (after, new)):
            say_facts(f"diff {path.name}", report.facts, report.header)


def _show(contents: Contents) -> None:
    from iaprof.cli.interactive.view import View

    View(contents).run()


def _listing_without_code() -> Listing:
    """Lists kernels of several captures by their instructions with samples, as profiles keep no code."""
    from iaprof.cli.terminal.listing_lines import lines
    from iaprof.report.gpu.source_files import NO_SOURCES
    from iaprof.report.views.annotation import listings

    def listing(profile: Profile, kernel: str, width: int) -> list[str]:
        return list(lines(listings(profile, [kernel], lambda index: None), NO_SOURCES, width, True))

    return listing


def _listing(report: Report, source_dirs: Sequence[Path], kernels_before: int | None = None) -> Listing:
    """Lists kernels of a report; with `kernels_before`, of a difference, in which so many kernels are before them."""
    from iaprof.cli.terminal.listing_lines import lines
    from iaprof.report.gpu.source_files import SourceFiles
    from iaprof.report.views.annotation import listings

    sources, first = SourceFiles(source_dirs), kernels_before or 0
    counts = {first + kernel: count for kernel, count in report.profile.launch_counts.items()}

    def listing(profile: Profile, kernel: str, width: int) -> list[str]:
        own = profile if kernels_before is None else replace(profile.only(profile.interval == 1), launch_counts=counts)
        return list(lines(listings(own, [kernel], lambda index: report.binary(index - first)), sources, width, True))

    return listing


def interval_of(capture: Path) -> float:
    """The length of intervals, for at most _INTERVALS; 0 if the capture is too large for a profile by time."""
    from iaprof.formats.capture.reader import CaptureReader
    from iaprof.report.parts import whole_ns

    reader = CaptureReader(capture)
    seconds = whole_ns(reader) / 1e9
    if reader.stall_records > _MOST_RECORDS_BY_TIME or not seconds:
        return 0.0
    return next((step for step in _STEPS_S if seconds <= step * _INTERVALS), 0.0)
