"""Reports of several captures, for the verbs that take them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import check_output
from iaprof.basics.quantities import counted, in_utc
from iaprof.cli.analysis import show_progress, symbol_options
from iaprof.cli.options.fleet_options import FleetOptions
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.terminal.facts import matched_text, say_problems
from iaprof.cli.terminal.summary import say
from iaprof.formats.profile import clean
from iaprof.formats.urls import is_url

if TYPE_CHECKING:
    from iaprof.formats.export import About
    from iaprof.report.fleet.partial import Partial
    from iaprof.report.fleet.summary import Summary

MOST_PROBLEMS = 10  # printed
_BAR = 30  # characters of the progress bar


@dataclass(frozen=True)
class FleetReport:
    """The sum of several captures."""

    total: Partial
    interval_ns: int


def ask_fleet(
    captures: Sequence[str],
    choice: SelectionOptions,
    fleet: FleetOptions,
    kept: frozenset[str],
    interval_s: float = 0.0,
    *,
    lines: bool = False,
    interpreter: bool = False,
) -> FleetReport:
    """Adds up captures.

    Args:
        captures: paths, patterns, folders and URLs.
        choice: the selection of stalls, and where to look for symbols.
        fleet: the options for several captures.
        kept: the columns of fleet.rows.KEYS that tell rows apart.
        interval_s: length of an interval; 0: a single one.
        lines: CPU frames have file and line.
        interpreter: keep CPython's own frames between Python functions.

    Raises:
        UsageError: there are no such captures.
        IaprofError: with --strict, a capture cannot be read; or the cache or the cluster fails.
    """
    from iaprof.report.fleet.cache import NONE, Cache, usual_place
    from iaprof.report.fleet.engines import open_engine
    from iaprof.report.fleet.fleet import ask
    from iaprof.report.fleet.groups import Grouping
    from iaprof.report.fleet.mapping import MapOptions
    from iaprof.report.fleet.sources import find_sources
    from iaprof.report.fleet.tasks import Question
    from iaprof.report.profile import ReportOptions
    from iaprof.symbols.names.cpu_frames import FrameOptions

    sources = find_sources(captures)
    frames = FrameOptions(choice.inlines, lines, interpreter)
    options = MapOptions(ReportOptions(choice.selection, interval_s, frames), symbol_options(choice))
    # What files of the user's say may change, without a trace in the key of a profile.
    has_files = choice.symfs is not None or choice.symbol_dirs or choice.kallsyms is not None
    cache = Cache(NONE if has_files else fleet.cache or usual_place(), options)
    question = Question(kept | ({"time"} if interval_s else set()), Grouping(fleet.group_by))
    with (
        closing(open_engine(fleet.cluster)) as engine,
        show_progress(lambda done: _bar(done, len(sources))) as progress,
    ):
        total = ask(sources, question, options, cache, engine, progress)
    problems = [each for each in total.captures if not each.is_sound]
    if problems and (fleet.strict or len(problems) == len(total.captures)):
        more = f"; and {len(problems) - 1:,} more" if len(problems) > 1 else ""
        raise IaprofError(f"{problems[0].problem}{more}")
    return FleetReport(total, int(interval_s * 1e9))


def refuse_inputs(words: Sequence[str], output: Path) -> None:
    """Checks that an output is none of the captures.

    Raises:
        UsageError: the words name nothing.
        IaprofError: it is one of them.
    """
    from iaprof.report.fleet.sources import find_sources

    local = [word for word in words if not is_url(word)]
    if output.exists():  # otherwise there is no need to look for captures twice
        for source in find_sources(local):
            check_output(output, True, Path(source.name))


def say_fleet(verb: str, report: FleetReport) -> None:
    """Prints what could not be read as warnings, and a line of totals."""
    from iaprof.report.fleet.summary import losses_of

    captures = report.total.captures
    for sentence in _left_out(captures):
        say(f"iaprof: warning: {sentence}")
    facts = report.total.facts
    say_problems(facts)
    lost = [
        f"{'an unknown number of' if each.count is None else f'{each.count:,}'} {each.source} ({each.what})"
        for each in losses_of(captures)
    ]
    broken = sum(not each.is_sound for each in captures)
    left_out = f" ({broken:,} left out)" if broken else ""
    say(
        clean(
            f"[ iaprof {verb}: {counted(len(captures), 'capture')}{left_out}, {facts.records:,} stall records, "
            f"{facts.stalls:,} samples; {matched_text(facts) if facts.stalls else ''}"
            f"lost while recording: {', '.join(lost) or 'nothing'} ]"
        )
    )


def about_fleet(report: FleetReport) -> About:
    """Describes the captures, for titles and headings."""
    from iaprof.formats.export import About
    from iaprof.report.fleet.summary import losses_of

    captures = [each for each in report.total.captures if each.is_sound]
    broken = len(report.total.captures) - len(captures)
    facts = report.total.facts
    hosts = dict.fromkeys(each.host for each in captures if each.host)
    begun = min((each.begun_ns for each in captures if each.begun_ns), default=0) / 1e9
    ended = max((each.begun_ns / 1e9 + each.seconds for each in captures if each.begun_ns), default=0.0)
    recording = [
        ("captures", f"{len(captures):,}" + (f", and {broken:,} that cannot be read" if broken else "")),
        ("hosts", f"{len(hosts):,}"),
        ("recorded", f"{sum(each.seconds for each in captures):,.0f} s"),
        *([("from", in_utc(_iso(begun))), ("to", in_utc(_iso(ended)))] if begun else []),
    ]
    lost = [
        ("", f"{'?' if each.count is None else f'{each.count:,}'} {clean(each.source)}: {clean(each.what)}")
        for each in losses_of(captures)
    ]
    return About(
        host=counted(len(hosts), "host") if len(hosts) != 1 else clean(next(iter(hosts))),
        command=counted(len(captures), "capture"),
        begun=begun,
        seconds=max(ended - begun, 0.0),
        facts=[("Captures", recording), *([("Lost", lost)] if lost else [])],
        warnings=_left_out(report.total.captures),
        headline=[f"{facts.stalls:,} samples", f"{matched_text(facts).rstrip('; ')}"],
    )


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + "Z"


def _bar(done: int, captures: int) -> str:
    full = _BAR * done // max(captures, 1)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {done:,} of {captures:,} captures"


def _left_out(captures: Sequence[Summary]) -> list[str]:
    """Returns a sentence for each of the first captures that cannot be read, and one for all further ones."""
    problems = [each.problem for each in captures if not each.is_sound]
    more = len(problems) - MOST_PROBLEMS
    rest = [f"left out: {more:,} more captures"] if more > 0 else []
    return [*(clean(f"left out: {each}") for each in problems[:MOST_PROBLEMS]), *rest]
