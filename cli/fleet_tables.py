"""`iaprof top` of several captures: a table, one for each group, or what differs between groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.quantities import counted, percent
from iaprof.cli.fleet import FleetReport, ask_fleet, say_fleet
from iaprof.cli.options.fleet_options import FleetOptions
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.terminal.answers import Answers
from iaprof.cli.terminal.entry_names import entry_titles, key_fields
from iaprof.cli.terminal.ranking_tables import print_table, ranking_dict
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.table import Column, Table, terminal_width
from iaprof.formats.profile import UNKNOWN_KERNEL

if TYPE_CHECKING:
    from iaprof.report.fleet.partial import Partial
    from iaprof.report.views.ranking import Ranking

KEPT = {
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


def top_fleet(
    captures: Sequence[str],
    choice: SelectionOptions,
    fleet: FleetOptions,
    by: str,
    limit: int,
    answers: Answers,
    *,
    outliers: bool,
    percentiles: bool,
    quiet: bool,
) -> None:
    """Prints what stalls most in several captures, for each group if there are any; or how these differ."""
    option = "outliers" if outliers else "percentiles"
    if outliers and percentiles:
        raise UsageError("--outliers and --percentiles are two tables: leave one of them out")
    if (outliers or percentiles) and not fleet.group_by:
        raise UsageError(f"--{option} compares groups: give --group-by, too")
    if outliers and by != "kernel":
        raise UsageError("--outliers compares kernels: leave out --by")
    if percentiles and by in ("energy", "reason"):
        raise UsageError(f"--percentiles cannot show --by {by}: choose another one")
    if by not in KEPT:
        raise UsageError(f"--by {by} is for one capture: choose from {', '.join(KEPT)}")
    report = ask_fleet(captures, choice, fleet, frozenset(KEPT[by]))
    with utf8_stdout():
        if outliers:
            _show_outliers(report, fleet.group_by, limit, answers)
        elif percentiles:
            _show_percentiles(report, fleet.group_by, by, limit, answers)
        else:
            show_fleet(report, fleet.group_by, by, limit, answers)
    if not quiet:
        say_fleet("top", report)


def show_fleet(report: FleetReport, group_by: Sequence[str], by: str, limit: int, answers: Answers) -> None:
    """Prints a table of what stalls most in several captures, or one for each group."""
    if group_by:
        _show_groups(report, group_by, by, limit, answers)
    else:
        _show(report, by, limit, answers)


def _show(report: FleetReport, by: str, limit: int, answers: Answers) -> None:
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
