"""How the share of a kernel, or of another entry of `iaprof top`, is spread over groups such as hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import Profile
from iaprof.report.fleet.groups import Group
from iaprof.report.fleet.partial import Partial, profile_of
from iaprof.report.views.ranking import Key, number_rows

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Shares:
    """A table of shares by entry and group, most of which are 0: only the others are kept.

    Cells are in the order of entries, and those of an entry in the order of shares.
    """

    entries: int
    groups: int
    entry: _Ints  # [cells], ascending
    group: _Ints  # [cells]; of equal shares, the later groups first
    share: _Floats  # [cells], ascending within an entry
    first: _Ints  # [entries], each one's first cell
    count: _Ints  # [entries], its cells

    @classmethod
    def of(cls, entry: _Ints, group: _Ints, samples: NDArray[np.integer], entries: int, of_group: _Ints) -> Shares:
        """Adds up samples by entry and group, and divides the sums by those of the groups.

        Args:
            entry: int64[n], of each row, below `entries`.
            group: int64[n], of each row.
            samples: integers[n].
            entries: how many there are.
            of_group: int64[groups], the samples of each group, which are not 0 where it has rows with samples.
        """
        cells, number = np.unique(entry * len(of_group) + group, return_inverse=True)
        sums = np.bincount(number.reshape(-1), samples, len(cells))
        some = sums > 0
        entry, group = np.divmod(cells[some], max(len(of_group), 1))
        share = sums[some] / of_group[group]
        order = np.lexsort((-group, share, entry))
        count = np.bincount(entry, minlength=entries)
        return cls(entries, len(of_group), entry[order], group[order], share[order], np.cumsum(count) - count, count)

    def quantile(self, part: float) -> _Floats:
        """Returns a quantile over all groups, as `numpy.quantile`: float64[entries]."""
        place = part * (self.groups - 1)
        below = int(np.floor(place))
        low, high = self._ranked(below), self._ranked(min(below + 1, self.groups - 1))
        weight, step = place - below, high - low
        return high - step * (1 - weight) if weight >= 0.5 else low + step * weight

    def largest(self) -> tuple[_Floats, _Ints]:
        """Returns the largest share of each entry, float64[entries], and the first group that has it; 0 without one."""
        last = self.first + self.count - 1
        has_any = self.count > 0
        share, group = np.zeros(self.entries), np.zeros(self.entries, np.int64)
        share[has_any], group[has_any] = self.share[last[has_any]], self.group[last[has_any]]
        return share, group

    def _ranked(self, rank: int) -> _Floats:
        """Returns the share of each entry that has this rank among all groups, the smallest being 0."""
        at = rank - (self.groups - self.count)
        found = np.zeros(self.entries)
        found[at >= 0] = self.share[(self.first + at)[at >= 0]]
        return found


@dataclass(frozen=True)
class Spread:
    """An entry: its samples in all groups, and its shares of the samples of each group that has any."""

    key: Key
    samples: int
    share: float  # of all samples
    p50: float
    p90: float
    p99: float
    most: float
    group: Group  # with the largest share


def spreads(total: Partial, by: str) -> list[Spread]:
    """Returns all entries, those with most samples first.

    Args:
        total: the sum, with rows by group.
        by: one of ranking.KEYS.
    """
    profile = profile_of(total, by_group=True)
    entry, keys = _numbered(profile, by)
    samples = profile.counts.sum(axis=1).astype(np.int64)
    of_entry = np.bincount(entry, samples, len(keys)).astype(np.int64)
    of_group = np.bincount(profile.interval, samples, len(total.groups))
    with_samples = np.flatnonzero(of_group)
    place = np.cumsum(of_group > 0) - 1
    some = samples > 0
    shares = Shares.of(entry[some], place[profile.interval[some]], samples[some], len(keys), of_group[with_samples])
    if not len(with_samples):
        return []
    p50, p90, p99 = (shares.quantile(part).tolist() for part in (0.5, 0.9, 0.99))
    most, group = shares.largest()
    whole = max(int(of_entry.sum()), 1)
    return [
        Spread(
            keys[one],
            int(of_entry[one]),
            float(of_entry[one] / whole),
            p50[one],
            p90[one],
            p99[one],
            float(most[one]),
            total.groups[int(with_samples[group[one]])],
        )
        for one in np.argsort(-of_entry, kind="stable").tolist()
    ]


def _numbered(profile: Profile, by: str) -> tuple[NDArray[np.int64], list[Key]]:
    """Returns the entry of each row: int64[n], index into the keys."""
    rows = number_rows(profile, by)
    key_of: Callable[[int], Key] = rows.key
    numbers, first = np.unique(rows.number, return_inverse=True)
    distinct: dict[Key, int] = {}
    of_number = [distinct.setdefault(key_of(number), len(distinct)) for number in numbers.tolist()]
    return np.array(of_number, np.int64)[first.reshape(-1)], list(distinct)
