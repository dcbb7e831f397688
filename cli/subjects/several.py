"""Sums of several captures: tables, one for each group, what differs between groups, reports, differences and trees."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.quantities import counted, in_utc, percent
from iaprof.cli.options.captures import FleetOptions, check_report
from iaprof.cli.options.declared import Of
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.options.shown import Comparison, Intervals, StackShape
from iaprof.cli.options.values import checked_choice
from iaprof.cli.subjects.subject import Recorded, browse, grouping_of
from iaprof.cli.subjects.unmatched import filters_of, nothing_matches
from iaprof.cli.terminal.answers import OF_STACKS, Answers
from iaprof.cli.terminal.destination import Destination
from iaprof.cli.terminal.difference_tables import BY as OF_DIFFERENCES, show as show_difference
from iaprof.cli.terminal.entry_names import entry_titles, key_fields
from iaprof.cli.terminal.facts import matched_text, say_problems
from iaprof.cli.terminal.pager import paged
from iaprof.cli.terminal.progress import show_progress
from iaprof.cli.terminal.ranking_tables import print_table, ranking_dict
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.summary import say
from iaprof.cli.terminal.table import Column, Table, terminal_width
from iaprof.formats.profile import DEFAULT_COMPONENTS, UNKNOWN_KERNEL
from iaprof.formats.stores import shown as shown_url
from iaprof.formats.writers.registry import WRITERS, Format

if TYPE_CHECKING:
    from iaprof.cli.interactive.contents import Listing
    from iaprof.formats.export import About
    from iaprof.formats.profile import Profile
    from iaprof.report.fleet.partial import Partial
    from iaprof.report.fleet.totals import Broken
    from iaprof.report.views.ranking import Ranking

MOST_PROBLEMS = 10  # printed
_BAR = 30  # characters of the progress bar
_KERNEL = "kernel"
_ALL_ROWS = 0
_OF_TIMES = ("chrome", "perfetto", "flamescope")  # formats
_OF_TREES = frozenset(("launch", "kernel", "code", "offset", "device"))  # columns of fleet.rows.KEYS
_COLUMNS = {
    "launch": {"host", "process", "operator", "cpu"},
    "kernel": {"file", "function"},
    "code": {"function", "line", "instruction"},
    "offset": {"offset"},
}
"""By column of fleet.rows.KEYS: the components of a stack that need it."""
_KEPT = {
    "kernel": {"kernel"},
    "energy": {"kernel"},
    "function": {"kernel", "code"},
    "line": {"kernel", "code"},
    "instruction": {"kernel", "code", "offset"},
    "reason": set[str](),
    "process": {"launch", "kernel"},
    "launcher": {"launch", "kernel"},
    "stack": {"launch", "kernel"},
    "operator": {"launch", "kernel"},
}
"""By kind of entry: the columns of fleet.rows.KEYS that it needs; samples are divided among the stacks of a kernel."""

_MOST_GROUPS = 16_384
"""Tables of groups, unless the user asks for all: one capture can have a container for each kernel."""


@dataclass(frozen=True)
class Several(Recorded):
    """The sum of several captures.

    Attributes:
        captures: paths, patterns, folders and URLs.
        choice: the selection of stalls, and where to look for symbols.
        fleet: the options for several captures.
    """

    of: ClassVar = Of.SEVERAL
    captures: Sequence[str]
    choice: SelectionOptions
    fleet: FleetOptions

    def _refusal(self, option: str, of: Of) -> str:
        return f"{option} is for one capture: leave it out"

    def output_mode(self, output: Path, force: bool) -> int:
        """See Recorded."""
        return check_report(self.captures, output, force)

    def table(self, by: str, limit: int, intervals: Intervals, answers: Answers, quiet: bool) -> None:
        """See Subject."""
        differs = "outliers" if intervals.outliers else "percentiles" if intervals.percentiles else ""
        groups = self.fleet.groups
        if differs and not groups:
            raise UsageError(f"--{differs} compares groups: give --group-by, too")
        if intervals.outliers and by != _KERNEL:
            raise UsageError("--outliers compares kernels: leave out --by")
        if intervals.percentiles and by in ("energy", "reason"):
            raise UsageError(f"--percentiles cannot show --by {by}: choose another one")
        if by not in _KEPT:
            raise UsageError(f"--by {by} is for one capture: choose from {', '.join(_KEPT)}")
        report = ask_fleet(self.captures, self.choice, self.fleet, frozenset(_KEPT[by]))
        with utf8_stdout():
            if intervals.outliers:
                _show_outliers(report, groups, limit, answers)
            elif intervals.percentiles:
                _show_percentiles(report, groups, by, limit, answers)
            else:
                _show(report, groups, by, limit, answers)
        if not quiet:
            say_fleet(self.verb, report)

    def view(self, quiet: bool) -> None:
        """See Recorded."""
        report = ask_fleet(self.captures, self.choice, self.fleet, frozenset(_KEPT[_KERNEL]))
        with paged():
            _show(report, self.fleet.groups, _KERNEL, _ALL_ROWS, Answers())
        if not quiet:
            say_fleet(self.verb, report)

    def export(self, format_: Format, shape: StackShape, destination: Destination, quiet: bool) -> None:
        """See Recorded."""
        from iaprof.formats.export import Export
        from iaprof.report.fleet.partial import profile_of

        if format_.name in _OF_TIMES:
            raise UsageError(
                f"{format_.name} is for one capture: it shows times, which several captures do not have in common"
            )
        writer = WRITERS[format_.name]
        components = self._components(shape)
        needed = {column for column, of in _COLUMNS.items() if not writer.has_stacks or of & set(components)}
        interval_s = (shape.interval or 0.0) if "interval" in components else 0.0
        kept = frozenset(needed | {"kernel", "device"})
        frames = {"lines": shape.lines, "interpreter": shape.has_interpreter(writer)}
        with destination.opened(writer.binary) as out:
            report = ask_fleet(self.captures, self.choice, self.fleet, kept, interval_s, shape.percent_limit, **frames)
            profile, hosts = profile_of(report.total, report.interval_ns), report.total.totals.host_times()
            export = Export(profile, about_fleet(report), interval_s, hosts=hosts)
            writer.write(export, replace(shape.stack_options(), components=components), out)
        if not quiet:
            say_fleet(self.verb, report)

    def _components(self, shape: StackShape) -> tuple[str, ...]:
        """Returns the components of stacks, without pids, and with the group at the root."""
        chosen = shape.components
        if "pid" in chosen and chosen != DEFAULT_COMPONENTS:
            raise UsageError("--frames pid is for one capture: in several, a pid stands for many processes")
        without = tuple(each for each in chosen if each != "pid")
        if not self.fleet.groups or "host" in without:
            return without
        return (*without, "host") if shape.inverted else ("host", *without)

    def tree(self, by: str, shape: StackShape, quiet: bool) -> None:
        """See Recorded."""
        from iaprof.cli.interactive.contents import Contents
        from iaprof.report.fleet.partial import profile_of

        grouping = grouping_of(by)
        report = ask_fleet(self.captures, self.choice, self.fleet, _OF_TREES)
        title, profile = about_fleet(report).title, profile_of(report.total)
        browse(Contents(title, profile, grouping, shape.inverted, listing=_listing_without_code()))
        if not quiet:
            say_fleet(self.verb, report)

    def difference(
        self, after: Self, by: str, limit: int | None, comparison: Comparison, answers: Answers, quiet: bool
    ) -> None:
        """Tells chance from change, too, by how the captures of a side differ among themselves; see Recorded."""
        from iaprof.report.fleet.comparison import movers

        checked_choice(by, OF_DIFFERENCES, "--by")
        if answers.format in OF_STACKS.values():
            raise UsageError(f"{answers.format} is for two captures: choose another format")
        if self.fleet.groups:
            raise UsageError("--group-by is for top and report: diff compares two sets")
        by_capture = replace(self.fleet, group_by=["capture"])
        kept = frozenset(_KEPT[by])
        old = ask_fleet(self.captures, self.choice, by_capture, kept, may_be_empty=True)
        one_matches = old.total.facts.stalls > 0
        new = ask_fleet(after.captures, self.choice, by_capture, kept, may_be_empty=one_matches)
        found, chances = movers(old.total, new.total, by, answers.rows(limit), comparison.is_relative)
        sides = [(shown_url(side.captures[0]), report) for side, report in ((self, old), (after, new))]
        facts = [(name, report.total.facts) for name, report in sides]
        show_difference(found, answers, comparison.is_relative, facts, chances)
        if not quiet:
            for name, report in sides:
                say_fleet(f"{self.verb} {name}", report)

    def tree_of_difference(self, after: Self, by: str, comparison: Comparison, quiet: bool) -> None:
        """See Recorded."""
        raise UsageError("--interactive compares two captures: 'iaprof merge' makes one of several")


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

    timeout_s = fleet.timeout or DEFAULT_TIMEOUT_S
    sources = find_sources(captures, timeout_s)
    wanted = ReportOptions(choice.selection, interval_s, choice.frame_options(lines, interpreter))
    options = MapOptions(wanted, choice.symbol_options())
    # What files of the user's say may change, without a trace in the key of a profile.
    has_files = choice.symfs is not None or choice.symbol_dirs or choice.kallsyms is not None
    cache = Cache(NONE if has_files else fleet.cache or usual_place(), options, timeout_s)
    question = Question(kept | ({"time"} if interval_s else set()), Grouping(fleet.groups))
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


def _show(report: FleetReport, group_by: Sequence[str], by: str, limit: int, answers: Answers) -> None:
    """Prints a table of what stalls most in several captures, or one for each group."""
    if group_by:
        _show_groups(report, group_by, by, limit, answers)
    else:
        _show_all(report, by, limit, answers)


def _show_all(report: FleetReport, by: str, limit: int, answers: Answers) -> None:
    from iaprof.report.fleet.partial import profile_of
    from iaprof.report.views.ranking import Ranker

    ranking = Ranker(profile_of(report.total), by).table(limit)
    if answers.is_text:
        print_table(ranking, has_processes=False)
    else:
        answers.write({**_as_dict(ranking), **_captures(report.total)})


def _show_groups(report: FleetReport, group_by: Sequence[str], by: str, limit: int, answers: Answers) -> None:
    from iaprof.formats.capture.limits import is_large_allowed
    from iaprof.report.fleet.partial import group_profiles
    from iaprof.report.views.ranking import Ranker

    groups = len(report.total.groups)
    most = groups if is_large_allowed() else _MOST_GROUPS
    whole = int(report.total.rows.counts.sum())
    shown = []
    for number, (group, profile) in enumerate(group_profiles(report.total, most)):
        ranking = Ranker(profile, by).table(limit)
        named = dict(zip(group_by, group, strict=True))
        samples = ranking.total.samples
        captures = report.total.totals.groups[group]
        share = samples / whole if whole else 0.0
        if not answers.is_text:
            shown.append({"group": named, "captures": captures, "share": share, **_as_dict(ranking)})
            continue
        heading = ", ".join(f"{name} {clean(value)}" for name, value in named.items())
        of = f"{counted(captures, 'capture')}, {samples:,} samples, {percent(share)}"
        print(f"{chr(10) if number else ''}{heading}: {of}")
        print_table(ranking, has_processes=False)
    more = max(groups - most, 0)
    if not answers.is_text:
        answers.write({"by": by, "group_by": list(group_by), "groups": shown, "more": more, **_captures(report.total)})
    elif more:
        print(f"\nand {more:,} more groups with fewer samples: --large shows all")


def _show_percentiles(report: FleetReport, group_by: Sequence[str], by: str, limit: int, answers: Answers) -> None:
    from iaprof.report.fleet.comparison import spreads

    found = spreads(report.total, by)
    shown, more = found[: limit or None], max(len(found) - (limit or len(found)), 0)
    if not answers.is_text:
        entries = [
            {
                **key_fields(by, each.key),
                **{name: getattr(each, name) for name in ("samples", "share", "p50", "p90", "p99", "most")},
                "farthest": dict(zip(group_by, each.group, strict=True)),
            }
            for each in shown
        ]
        about = {"by": by, "group_by": list(group_by), "number_of_groups": len(report.total.groups)}
        answers.write({**about, "entries": entries, "more": more, **_captures(report.total)})
        return
    heads = ("SAMPLES", "SHARE", "P50", "P90", "P99", "MOST")
    table = Table(*(Column(head, right=True) for head in heads), Column("IN"), Column(by.upper(), flexible=True))
    titles = entry_titles(by, [each.key for each in shown], terminal_width() is not None)
    for each, title in zip(shown, titles, strict=True):
        shares = (f"{100 * share:.1f} %" for share in (each.share, each.p50, each.p90, each.p99, each.most))
        table.add(f"{each.samples:,}", *shares, ", ".join(map(clean, each.group)), title)
    table.print()
    if more:
        print(f"and {more:,} more")


def _show_outliers(report: FleetReport, group_by: Sequence[str], limit: int, answers: Answers) -> None:
    from iaprof.report.fleet.comparison import FEWEST_GROUPS, outliers

    if len(report.total.groups) < FEWEST_GROUPS:
        raise IaprofError(f"outliers need {FEWEST_GROUPS} groups or more, and there are {len(report.total.groups)}")
    found = outliers(report.total)
    shown = found[: limit or None]
    if not answers.is_text:
        entries = [
            {**asdict(each), "groups": [dict(zip(group_by, group, strict=True)) for group in each.groups]}
            for each in shown
        ]
        more = len(found) - len(shown)
        answers.write({"group_by": list(group_by), "outliers": entries, "more": more, **_captures(report.total)})
        return
    table = Table(
        Column("MEDIAN", right=True), Column("10 - 90 %", right=True), Column("REASON"), Column("OUTLIERS", right=True),
        Column("FARTHEST"), Column("KERNEL", flexible=True),
    )  # fmt: skip
    for each in shown:
        times = f"{each.shares[0] / each.median:.1f}x" if each.median else percent(each.shares[0])
        farthest = f"{', '.join(map(clean, each.groups[0]))} {times}"
        spread = f"{100 * each.low:.1f} - {100 * each.high:.1f}"
        count = f"{len(each.groups)} of {len(report.total.groups)}"
        table.add(percent(each.median), spread, each.reason, count, farthest, clean(each.kernel) or UNKNOWN_KERNEL)
    if not found:
        print(f"no kernel stalls for a reason much more or less in some of the {len(report.total.groups):,} groups")
        return
    table.print()
    if len(found) > len(shown):
        print(f"and {len(found) - len(shown):,} more")


def _as_dict(ranking: Ranking) -> dict[str, Any]:
    """Returns a table as JSON has it, without numbers of processes: in several captures, these are unknown."""
    found = ranking_dict(ranking)
    for each in (*found["entries"], found["more"], found["total"]):
        del each["processes"]
    return found


def _captures(total: Partial) -> dict[str, Any]:
    problems = [{"file": each.file, "problem": each.problem} for each in total.totals.broken]
    return {"captures": total.totals.captures, "left_out": problems}


def _listing_without_code() -> Listing:
    """Lists kernels of several captures by their instructions with samples, as profiles keep no code."""
    from iaprof.cli.terminal.listing_lines import lines
    from iaprof.report.gpu.source_files import NO_SOURCES
    from iaprof.report.views.annotation import listings

    def listing(profile: Profile, kernel: str, width: int) -> list[str]:
        return list(lines(listings(profile, [kernel], lambda index: None), NO_SOURCES, width, True))

    return listing
