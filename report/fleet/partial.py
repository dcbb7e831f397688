"""A sum of profiles: what a fleet's workers return, and what sums of sums are.

Adding up is associative, and gives the same whatever the order: numbers of captures, groups, launches and the like are
those of the order in which they come, but rows are compared by what the numbers mean.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import distinct_rows
from iaprof.formats.profile import Kernel, Profile
from iaprof.formats.ranges import RowsOfKeys
from iaprof.report.facts import Facts
from iaprof.report.fleet.groups import Group, Grouping
from iaprof.report.fleet.samples import Rows, Samples
from iaprof.report.fleet.segment import Segment
from iaprof.report.fleet.totals import Summary, Totals

_ROWS_UNTIL_SUM = 2_000_000  # that a sum keeps before it adds up equal ones; 19 columns of 8 bytes each


@dataclass(frozen=True, eq=False)
class Partial(Samples):
    """Samples of several captures. The column `capture` of the rows is the number of a group."""

    groups: Sequence[Group]
    totals: Totals

    @cached_property
    def facts(self) -> Facts:
        """The sum of the captures' facts."""
        return self.totals.all_facts()


def nothing(captures: Sequence[Summary]) -> Partial:
    """The sum of captures without samples."""
    return Partial(Rows.none(0), (), (), (), (), (), groups=(), totals=Totals.of(captures, Grouping.host_of))


def partial_of(segment: Segment, wanted: Mapping[int, Summary], grouping: Grouping, kept: Collection[str]) -> Partial:
    """Adds up the captures of a segment that are wanted.

    Args:
        segment: the segment.
        wanted: by the capture's number in the segment: its summary, with the name that it was asked for by.
        grouping: what captures and rows are grouped by.
        kept: the columns of KEYS that tell rows apart; others are added up.
    """
    captures = list(wanted.values())
    number = np.full(len(segment.captures), -1, np.int64)
    for place, (capture, summary) in enumerate(wanted.items()):
        number[capture] = place if summary.is_sound else -1
    rows = segment.rows.renumbered({"capture": number})
    samples = Samples(rows.only(rows.capture >= 0), **segment.tables())
    groups, group = grouping.groups_of(samples, captures)
    totals = Totals.of(captures, Grouping.host_of)
    totals.groups = grouping.counted(groups, group, samples.rows.capture, captures)
    rows = replace(samples.rows, capture=group)
    return Partial(rows, **segment.tables(), groups=groups, totals=totals).dropped(kept)


class Sum:
    """Adds up partial sums as they come."""

    def __init__(self) -> None:
        """Starts with nothing."""
        self._totals = Totals()
        self._numbers: dict[str, dict[Hashable, int]] = {
            name: {} for name in ("groups", "launches", "kernels", "codes", "devices", "reasons")
        }
        self._rows: list[Rows] = []
        self._added = 0

    def add(self, other: Partial) -> None:
        """Adds a partial sum."""
        self._totals.add(other.totals)
        columns = {
            "capture": self._number("groups", other.groups),
            "launch": self._number("launches", other.launches),
            "kernel": self._number("kernels", other.kernels),
            "code": self._number("codes", other.codes),
            "device": self._number("devices", other.devices),
        }
        places = self._number("reasons", other.reasons).tolist()
        self._rows.append(other.rows.renumbered(columns).with_counts(places, len(self._numbers["reasons"])))
        self._added += len(other.rows)
        if self._added > _ROWS_UNTIL_SUM:
            self._add_up()

    def _number(self, name: str, values: Iterable[Hashable]) -> NDArray[np.int64]:
        known = self._numbers[name]
        return np.array([known.setdefault(value, len(known)) for value in values], np.int64)

    def _add_up(self) -> None:
        width = len(self._numbers["reasons"])
        rows = [each.with_counts(range(each.counts.shape[1]), width) for each in self._rows] or [Rows.none(width)]
        self._rows = [Rows.concatenated(rows).summed()]
        self._added = 0

    def result(self) -> Partial:
        """Returns the sum of all that was added."""
        self._add_up()
        tables: dict[str, Any] = {name: list(known) for name, known in self._numbers.items()}
        return Partial(self._rows[0], **tables, totals=self._totals)


def profile_of(total: Partial, interval_ns: int = 0, *, by_group: bool = False) -> Profile:
    """Makes a profile, which writers and tables take, of a sum.

    Args:
        total: the sum.
        interval_ns: length of the intervals; 0: all in one.
        by_group: each group is an interval. Otherwise launches have their group's name as host.
    """
    rows = total.rows
    launches, launch = list(total.launches), rows.launch
    begun = int(rows.time.min()) if len(rows) else 0
    # Only intervals with samples: between captures of two days, or of unknown time, there may be millions without.
    numbers, interval = np.unique((rows.time - begun) // max(interval_ns, 1) * bool(interval_ns), return_inverse=True)
    intervals = [(begun + number * interval_ns) / 1e9 for number in numbers.tolist()] or [0.0]
    if by_group:
        interval = rows.capture
        intervals = [begun / 1e9] * max(len(total.groups), 1)
    elif any(total.groups):
        pairs, launch = np.unique(np.stack([rows.capture, rows.launch], axis=1), axis=0, return_inverse=True)
        hosts = [", ".join(group) for group in total.groups]
        known = [(total.launches[number], hosts[group]) for group, number in pairs.tolist()]
        launches = [launched and replace(launched, host=host) for launched, host in known]
    columns: dict[str, Any] = {
        "interval": interval.reshape(-1),
        "launch": launch.reshape(-1),
        "kernel": rows.kernel,
        "code": rows.code,
        "offset": rows.offset.astype(np.uint64),
        "counts": rows.counts.astype(np.uint64),
        "device": rows.device,
        "energy": rows.energy,
        "divided": rows.divided.astype(np.uint64),
        "place": distinct_rows(rows.capture, rows.kernel, rows.fork)[1],
    }
    order = np.lexsort([columns[name] for name in ("offset", "kernel", "launch", "interval")])
    facts = total.facts
    energy = None if facts.energy is None else columns["energy"][order]
    kernels = [None if each is None else Kernel(0, each.symbol, each.file) for each in total.kernels]
    return Profile(
        launches,
        kernels,
        total.codes,
        **{name: column[order] for name, column in columns.items() if name != "energy"},
        reasons=total.reasons,
        intervals=intervals,
        devices=total.devices,
        launch_counts=_launch_counts(total),
        matched=facts.matched.shares(),
        whole=facts.whole,
        python=facts.python,
        energy=energy,
    )


def group_profiles(total: Partial, most: int) -> Iterator[tuple[Group, Profile]]:
    """Yields a profile of each group, those with most samples first. Launches are not counted by group.

    Args:
        total: the sum.
        most: how many groups it yields.
    """
    samples = np.bincount(total.rows.capture, total.rows.counts.sum(axis=1), len(total.groups))
    rows_of_groups = RowsOfKeys(total.rows.capture)
    for number in np.argsort(-samples, kind="stable")[:most].tolist():
        rows = total.rows.only(rows_of_groups.of(number)).without(["capture"])
        of_group = replace(total, totals=Totals(), groups=[()], rows=rows).without_unused()
        yield total.groups[number], profile_of(of_group)


def _launch_counts(total: Partial) -> dict[int, int]:
    launched = total.totals.launched
    known = ((number, each) for number, each in enumerate(total.kernels) if each is not None)
    return {number: launched[each] for number, each in known if each in launched}
