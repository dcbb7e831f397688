"""Reports of several captures, for the verbs that take them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import check_output
from iaprof.basics.quantities import counted, in_utc
from iaprof.cli.analysis import symbol_options
from iaprof.cli.options.fleet_options import FleetOptions
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.terminal.facts import matched_text
from iaprof.cli.terminal.summary import say
from iaprof.formats.profile import clean
from iaprof.formats.urls import is_url

if TYPE_CHECKING:
    from iaprof.formats.export import About
    from iaprof.report.fleet.partial import Partial

MOST_PROBLEMS = 10  # printed
_PROGRESS_AFTER_S = 1.0


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
    with closing(open_engine(fleet.cluster)) as engine, _progress(len(sources)) as progress:
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
    from iaprof.report.fleet.summary import facts_of, losses_of

    captures = report.total.captures
    problems = [each for each in captures if not each.is_sound]
    for each in problems[:MOST_PROBLEMS]:
        say(clean(f"iaprof: warning: left out: {each.problem}"))
    if len(problems) > MOST_PROBLEMS:
        say(f"iaprof: warning: left out: {len(problems) - MOST_PROBLEMS:,} more captures")
    facts = facts_of(captures)
    for problem, modules in list(facts.problems.items())[:MOST_PROBLEMS]:
        more = f" (and {len(modules) - 1:,} more)" if len(modules) > 1 else ""
        say(clean(f"iaprof: warning: {modules[0]}{more}: {problem}"))
    lost = [
        f"{'an unknown number of' if each.count is None else f'{each.count:,}'} {each.source} ({each.what})"
        for each in losses_of(captures)
    ]
    left_out = f" ({len(problems):,} left out)" if problems else ""
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
    from iaprof.report.fleet.summary import facts_of, losses_of

    captures = [each for each in report.total.captures if each.is_sound]
    problems = [each for each in report.total.captures if not each.is_sound]
    facts = facts_of(captures)
    hosts = dict.fromkeys(each.host for each in captures if each.host)
    begun = min((each.begun_ns for each in captures if each.begun_ns), default=0) / 1e9
    ended = max((each.begun_ns / 1e9 + each.seconds for each in captures if each.begun_ns), default=0.0)
    recording = [
        ("captures", f"{len(captures):,}" + (f", and {len(problems):,} that cannot be read" if problems else "")),
        ("hosts", f"{len(hosts):,}"),
        ("recorded", f"{sum(each.seconds for each in captures):,.0f} s"),
        *([("from", in_utc(_iso(begun))), ("to", in_utc(_iso(ended)))] if begun else []),
    ]
    lost = [
        ("", f"{'?' if each.count is None else f'{each.count:,}'} {clean(each.source)}: {clean(each.what)}")
        for each in losses_of(captures)
    ]
    warnings = [clean(f"left out: {each.problem}") for each in problems[:MOST_PROBLEMS]]
    if len(problems) > MOST_PROBLEMS:
        warnings.append(f"left out: {len(problems) - MOST_PROBLEMS:,} more captures")
    return About(
        host=counted(len(hosts), "host") if len(hosts) != 1 else clean(next(iter(hosts))),
        command=counted(len(captures), "capture"),
        begun=begun,
        seconds=max(ended - begun, 0.0),
        facts=[("Captures", recording), *([("Lost", lost)] if lost else [])],
        warnings=warnings,
        headline=[f"{facts.stalls:,} samples", f"{matched_text(facts).rstrip('; ')}"],
    )


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + "Z"


@contextmanager
def _progress(captures: int) -> Iterator[Callable[[int], None]]:
    """Yields a callback, which draws on a terminal how many captures are done, once that takes a second."""
    begun, drawn = time.monotonic(), False
    terminal = sys.stderr is not None and sys.stderr.isatty()

    def progress(done: int) -> None:
        nonlocal drawn
        if terminal and time.monotonic() - begun > _PROGRESS_AFTER_S:
            width = 30
            full = width * done // max(captures, 1)
            sys.stderr.write(f"\r\x1b[K[{'#' * full}{'.' * (width - full)}] {done:,} of {captures:,} captures")
            sys.stderr.flush()
            drawn = True

    try:
        yield progress
    finally:
        if drawn:
            sys.stderr.write("\r\x1b[K")
