"""`iaprof top` of several captures: a table, one for each group, or what differs between groups."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.basics.quantities import counted, percent
from iaprof.cli.fleet import FleetReport, ask_fleet, say_fleet
from iaprof.cli.options.fleet_options import FleetOptions
from iaprof.cli.options.selection import SelectionOptions
from iaprof.cli.terminal.stdout import utf8_stdout
from iaprof.cli.terminal.table import Column, Table
from iaprof.cli.verbs.top import print_table, ranking_dict
from iaprof.formats.profile import UNKNOWN_KERNEL, clean

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
    "process": {"launch"},
    "launcher": {"launch"},
    "stack": {"launch"},
    "operator": {"launch"},
}
"""By kind of entry: the columns of fleet.rows.KEYS that it needs."""


def top_fleet(
    captures: Sequence[str],
    choice: SelectionOptions,
    fleet: FleetOptions,
    by: str,
    limit: int,
    outliers: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prints what stalls most in several captures, for each group if there are any; or the outliers of these."""
    if outliers and not fleet.group_by:
        raise UsageError("--outliers compares groups: give --group-by, too")
    if outliers and by != "kernel":
        raise UsageError("--outliers is of kernels: leave out --by")
    if by not in KEPT:
        raise UsageError(f"--by {by} is for one capture: choose from {', '.join(KEPT)}")
    report = ask_fleet(captures, choice, fleet, frozenset(KEPT[by]))
    with utf8_stdout():
        if outliers:
            _show_outliers(report, fleet.group_by, limit, as_json)
        elif fleet.group_by:
            _show_groups(report, fleet.group_by, by, limit, as_json)
        else:
            _show(report, by, limit, as_json)
    if not quiet:
        say_fleet("top", report)


def _show(report: FleetReport, by: str, limit: int, as_json: bool) -> None:
    from iaprof.report.fleet.partial import profile_of
    from iaprof.report.views.ranking import Ranker

    ranking = Ranker(profile_of(report.total), by).table(limit)
    if as_json:
        print(json.dumps({**_as_dict(ranking), **_captures(report.total)}, indent=2))
    else:
        print_table(ranking, has_processes=False)


def _show_groups(report: FleetReport, group_by: Sequence[str], by: str, limit: int, as_json: bool) -> None:
    from iaprof.report.fleet.partial import group_profiles
    from iaprof.report.views.ranking import Ranker

    groups = group_profiles(report.total)
    captures = _captures_of_groups(report.total, group_by)
    whole = sum(int(profile.counts.sum()) for _, profile in groups)
    shown = []
    for number, (group, profile) in enumerate(groups):
        ranking = Ranker(profile, by).table(limit)
        named = dict(zip(group_by, group, strict=True))
        samples = ranking.total.samples
        if as_json:
            share = samples / whole if whole else 0.0
            counted_of = {} if captures is None else {"captures": captures[group]}
            shown.append({"group": named, **counted_of, "share": share, **_as_dict(ranking)})
            continue
        heading = ", ".join(f"{name} {clean(value)}" for name, value in named.items())
        of = "" if captures is None else f"{counted(captures[group], 'capture')}, "
        share_text = percent(samples / whole if whole else 0)
        print(f"{chr(10) if number else ''}{heading}: {of}{samples:,} samples, {share_text}")
        print_table(ranking, has_processes=False)
    if as_json:
        print(json.dumps({"by": by, "group_by": list(group_by), "groups": shown, **_captures(report.total)}, indent=2))


def _captures_of_groups(total: Partial, group_by: Sequence[str]) -> Counter[tuple[str, ...]] | None:
    """Counts the captures of each group; None if a capture's samples may be in several groups."""
    from iaprof.report.fleet.groups import Grouping

    grouping = Grouping(tuple(group_by))
    return None if grouping.columns else Counter(grouping.of(each) for each in total.captures if each.is_sound)


def _show_outliers(report: FleetReport, group_by: Sequence[str], limit: int, as_json: bool) -> None:
    from iaprof.report.fleet.outliers import FEWEST_GROUPS, outliers

    if len(report.total.groups) < FEWEST_GROUPS:
        raise IaprofError(f"outliers need {FEWEST_GROUPS} groups or more, and there are {len(report.total.groups)}")
    found = outliers(report.total)
    shown = found[: limit or None]
    if as_json:
        entries = [
            {**asdict(each), "groups": [dict(zip(group_by, group, strict=True)) for group in each.groups]}
            for each in shown
        ]
        more = len(found) - len(shown)
        print(
            json.dumps(
                {"group_by": list(group_by), "outliers": entries, "more": more, **_captures(report.total)}, indent=2
            )
        )
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
    problems = [{"file": each.file, "problem": each.problem} for each in total.captures if not each.is_sound]
    return {"captures": len(total.captures), "left_out": problems}
