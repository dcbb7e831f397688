"""Reports of several captures, for the verbs that take them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError
from iaprof.basics.quantities import counted, in_utc, percent
from iaprof.cli.analysis import show_progress, symbol_options
from iaprof.cli.options.fleet_options import FleetOptions
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.terminal.facts import matched_text, say_problems
from iaprof.cli.terminal.summary import say
from iaprof.cli.unmatched import filters_of, nothing_matches

if TYPE_CHECKING:
    from iaprof.formats.export import About
    from iaprof.report.fleet.partial import Partial
    from iaprof.report.fleet.totals import Broken

MOST_PROBLEMS = 10  # printed
_BAR = 30  # characters of the progress bar


@dataclass(frozen=True)
class FleetReport:
    """The sum of several captures."""

    total: Partial
    interval_ns: int
    unkept: str = ""  # a sentence about profiles that could not be kept


def ask_fleet(
    captures: Sequence[str],
    choice: SelectionOptions,
    fleet: FleetOptions,
    kept: frozenset[str],
    interval_s: float = 0.0,
    percent_limit: float = 0.0,
    *,
    lines: bool = False,
    interpreter: bool = False,
    may_be_empty: bool = False,
) -> FleetReport:
    """Adds up captures.

    Args:
        captures: paths, patterns, folders and URLs.
        choice: the selection of stalls, and where to look for symbols.
        fleet: the options for several captures.
        kept: the columns of fleet.rows.KEYS that tell rows apart.
        interval_s: length of an interval; 0: a single one.
        percent_limit: stacks with a smaller share are folded into their callers; 0: none.
        lines: CPU frames have file and line.
        interpreter: keep CPython's own frames between Python functions.
        may_be_empty: whether filters may select no stalls.

    Raises:
        UsageError: there are no such captures.
        IaprofError: filters select no stalls; with --strict, a capture cannot be read; or the cache or the cluster
            fails.
    """
    from iaprof.report.fleet.cache import NONE, Cache, usual_place
    from iaprof.report.fleet.engines import open_engine
    from iaprof.report.fleet.fleet import ask
    from iaprof.report.fleet.groups import Grouping
    from iaprof.report.fleet.mapping import MapOptions
    from iaprof.report.fleet.sources import DEFAULT_TIMEOUT_S, find_sources
    from iaprof.report.fleet.tasks import Question
    from iaprof.report.profile import ReportOptions

    timeout_s = fleet.timeout_s or DEFAULT_TIMEOUT_S
    sources = find_sources(captures, timeout_s)
    wanted = ReportOptions(choice.selection, interval_s, choice.frame_options(lines, interpreter))
    options = MapOptions(wanted, symbol_options(choice))
    # What files of the user's say may change, without a trace in the key of a profile.
    has_files = choice.symfs is not None or choice.symbol_dirs or choice.kallsyms is not None
    cache = Cache(NONE if has_files else fleet.cache or usual_place(), options, timeout_s)
    question = Question(kept | ({"time"} if interval_s else set()), Grouping(fleet.group_by))
    with (
        closing(open_engine(fleet.cluster, timeout_s)) as engine,
        show_progress(lambda done: _bar(done, len(sources))) as progress,
    ):
        total = ask(sources, question, options, cache, engine, progress, percent_limit, timeout_s)
    broken = total.totals.broken
    if broken and (fleet.strict or len(broken) == total.totals.captures):
        more = f"; and {len(broken) - 1:,} more" if len(broken) > 1 else ""
        raise IaprofError(f"{broken[0].problem}{more}")
    if not total.facts.stalls and filters_of(choice.selection) and not may_be_empty:
        raise nothing_matches("stall", choice.selection)
    unkept = f"{counted(cache.failed, 'profile')} not kept: {cache.failure}" if cache.failed else ""
    return FleetReport(total, int(interval_s * 1e9), unkept)


def say_fleet(verb: str, report: FleetReport) -> None:
    """Prints what could not be read as warnings, and a line of totals."""
    totals, facts = report.total.totals, report.total.facts
    for sentence in _left_out(totals.broken):
        say(f"iaprof: warning: {sentence}")
    if report.unkept:
        say(clean(f"iaprof: warning: {report.unkept}"))
    say_problems(facts)
    if text := folded_text(report):
        say(f"iaprof: {text}")
    lost = [
        f"{'an unknown number of' if each.count is None else f'{each.count:,}'} {each.source} ({each.what})"
        for each in totals.lost()
    ]
    left_out = f" ({len(totals.broken):,} left out)" if totals.broken else ""
    say(
        clean(
            f"[ iaprof {verb}: {counted(totals.captures, 'capture')}{left_out}, {facts.records:,} stall records, "
            f"{facts.samples_text()}; {matched_text(facts) if facts.stalls else ''}"
            f"lost while recording: {', '.join(lost) or 'nothing'} ]"
        )
    )


def folded_text(report: FleetReport) -> str:
    """Says what --percent-limit folded; "" if that is nothing."""
    from iaprof.report.fleet.rare import RARE_KERNELS, RARE_STACKS

    folded, samples = report.total.totals.folded, report.total.facts.stalls
    texts = (
        (folded.stacks, f"are of rarer stacks, which end in {RARE_STACKS}"),
        (folded.kernels, f"of {RARE_KERNELS}"),
        (folded.instructions, "at rarer instructions of their kernel"),
    )
    found = [f"{count:,} ({percent(count / samples)}) {text}" for count, text in texts if count]
    return f"--percent-limit folded samples: {', '.join(found)}" if found else ""


def about_fleet(report: FleetReport) -> About:
    """Describes the captures, for titles and headings."""
    from iaprof.formats.export import About
    from iaprof.report.fleet.groups import UNKNOWN

    totals, facts = report.total.totals, report.total.facts
    broken = len(totals.broken)
    hosts = [host for host in totals.host_times().hosts if host != UNKNOWN]
    begun, ended = totals.begun_ns / 1e9, totals.ended_ns / 1e9
    recording = [
        ("captures", f"{totals.captures - broken:,}" + (f", and {broken:,} that cannot be read" if broken else "")),
        ("hosts", f"{len(hosts):,}"),
        ("recorded", f"{totals.recorded_ns / 1e9:,.0f} s"),
        *([("from", in_utc(_iso(begun))), ("to", in_utc(_iso(ended)))] if begun else []),
    ]
    lost = [
        ("", f"{'?' if each.count is None else f'{each.count:,}'} {clean(each.source)}: {clean(each.what)}")
        for each in totals.lost()
    ]
    text = folded_text(report)
    return About(
        host=counted(len(hosts), "host") if len(hosts) != 1 else clean(hosts[0]),
        command=counted(totals.captures - broken, "capture"),
        begun=begun,
        seconds=max(ended - begun, 0.0),
        facts=[("Captures", recording), *([("Lost", lost)] if lost else [])],
        warnings=[*_left_out(totals.broken), *([text] if text else [])],
        headline=[facts.samples_text(), f"{matched_text(facts).rstrip('; ')}"],
    )


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + "Z"


def _bar(done: int, captures: int) -> str:
    full = _BAR * done // max(captures, 1)
    return f"[{'#' * full}{'.' * (_BAR - full)}] {done:,} of {captures:,} captures"


def _left_out(broken: Sequence[Broken]) -> list[str]:
    """Returns a sentence for each of the first captures that cannot be read, and one for all further ones."""
    more = len(broken) - MOST_PROBLEMS
    rest = [f"left out: {more:,} more captures"] if more > 0 else []
    return [*(clean(f"left out: {each.problem}") for each in broken[:MOST_PROBLEMS]), *rest]
