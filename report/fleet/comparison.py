"""Compares the captures of a sum with each other, and the captures of two sums.

How the share of a kernel, or of another entry of `iaprof top`, is spread over groups such as hosts; groups in which a
kernel stalls much more or less for a reason than in the others; and what changed between two sets of captures, and
whether captures of one set differ among themselves as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import Profile
from iaprof.formats.ranges import groups as groups_of
from iaprof.report.fleet.groups import Group
from iaprof.report.fleet.partial import Partial, profile_of
from iaprof.report.views.difference import Change, Difference, difference, joined
from iaprof.report.views.ranking import Key, number_rows

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]

FEWEST_GROUPS = 4  # below, there is no usual value
_LEAST_SHARE = 0.005  # of a group's samples, by which an outlier differs from the median
_FACTOR = 2.0  # times the median, or the median times it
_DEVIATIONS = 3.5  # of the median absolute deviation, scaled as below: the usual bound for outliers
_TO_SIGMA = 1.4826  # makes the median absolute deviation of a normal distribution its standard deviation

FEWEST = 3  # captures in each set: with fewer, no chance can be told
_DEALS = 2_000  # of all captures into two sets at random
_AT_ONCE = 100  # deals, which bounds the memory


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

    def quantile(self, share: float) -> _Floats:
        """Returns a quantile over all groups, as `numpy.quantile`: float64[entries]."""
        place = share * (self.groups - 1)
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
    p50, p90, p99 = (shares.quantile(share).tolist() for share in (0.5, 0.9, 0.99))
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


@dataclass(frozen=True)
class Outlier:
    """A kernel's stalls for a reason, as shares of each group's samples."""

    kernel: str
    file: str
    reason: str
    low: float  # 10th percentile over the groups
    median: float
    high: float  # 90th percentile
    groups: tuple[tuple[str, ...], ...]  # the outliers, the farthest first
    shares: tuple[float, ...]  # of these groups

    @property
    def distance(self) -> float:
        """How far the farthest group is from the median, as a share of its samples."""
        return abs(self.shares[0] - self.median)


def outliers(total: Partial) -> list[Outlier]:
    """Finds outliers, the farthest first.

    Args:
        total: the sum, with rows by group and kernel.
    """
    names = [("", "") if kernel is None else (kernel.symbol, kernel.file) for kernel in total.kernels]
    distinct: dict[tuple[str, str], int] = {}
    number = np.array([distinct.setdefault(name, len(distinct)) for name in names], np.int64)
    groups, kernels, reasons = len(total.groups), len(distinct), len(total.reasons)
    if groups < FEWEST_GROUPS or not kernels:
        return []
    rows = total.rows
    row, reason = np.nonzero(rows.counts)
    of_group = np.bincount(rows.capture, rows.counts.sum(axis=1), groups).astype(np.int64)
    column = number[rows.kernel[row]] * reasons + reason
    shares = Shares.of(column, rows.capture[row], rows.counts[row, reason], kernels * reasons, of_group)
    low, median, high = (shares.quantile(share) for share in (0.1, 0.5, 0.9))
    keys = list(distinct)
    found = []
    for at, of_column, its_shares in _outliers(shares, median):
        kernel, its_reason = divmod(at, reasons)
        farthest = np.lexsort((of_column, -np.abs(its_shares - median[at])))
        found.append(
            Outlier(
                *keys[kernel],
                total.reasons[its_reason],
                float(low[at]),
                float(median[at]),
                float(high[at]),
                tuple(total.groups[group] for group in of_column[farthest].tolist()),
                tuple(its_shares[farthest].tolist()),
            )
        )
    return sorted(found, key=lambda each: (-each.distance, each.kernel, each.reason))


def _outliers(
    shares: Shares, median: NDArray[np.float64]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
    """Yields each column that has outliers, their groups, and their shares."""
    # Where less than half of the groups have any, median and deviation are 0, and only these can be outliers.
    are_few = 2 * shares.count < shares.groups
    far = are_few[shares.entry] & (shares.share >= _LEAST_SHARE)
    places = np.flatnonzero(far)
    for column, cells in groups_of(shares.entry[far]):
        at = places[cells]
        yield column, shares.group[at], shares.share[at]
    for column in np.flatnonzero(~are_few & (shares.count > 0)).tolist():
        first = int(shares.first[column])
        its = slice(first, first + int(shares.count[column]))
        of_groups = np.zeros(shares.groups)
        of_groups[shares.group[its]] = shares.share[its]
        outliers = np.flatnonzero(_are_outliers(of_groups, median[column]))
        if len(outliers):
            yield column, outliers, of_groups[outliers]


def _are_outliers(shares: NDArray[np.float64], median: float) -> NDArray[np.bool_]:
    distance = np.abs(shares - median)
    deviation = _TO_SIGMA * np.median(distance)
    differs = (shares >= _FACTOR * median) | (shares * _FACTOR <= median)
    return np.asarray(differs & (distance >= _LEAST_SHARE) & (distance >= _DEVIATIONS * deviation))


def movers(before: Partial, after: Partial, by: str, limit: int, relative: bool) -> tuple[Difference, dict[Key, float]]:
    """Compares two sums whose groups are single captures.

    Args:
        before: the first set.
        after: the second set.
        by: one of difference.ENTRIES.
        limit: the number of entries; 0: all.
        relative: compare shares, not samples.

    Returns:
        The difference; and by key of its entries the probability that one of them changes as much by chance: how often
        one did when all captures were dealt into two sets at random. Without FEWEST captures in each set, it is empty.
    """
    sums = (before, after)
    profiles = [profile_of(each, by_group=True) for each in sums]
    both = joined(*profiles)
    found = difference(both, by, limit, relative)
    numbers = len(before.groups), len(after.groups)
    if min(numbers) < FEWEST:
        return found, {}
    of_sums = (_shares(profile, each.groups, by, found.entries) for profile, each in zip(profiles, sums, strict=True))
    shares = np.concatenate(list(of_sums), axis=1)
    return found, dict(zip((each.key for each in found.entries), _chances(shares, numbers[0]), strict=True))


def _shares(profile: Profile, groups: Sequence[Group], by: str, entries: Sequence[Change]) -> NDArray[np.float64]:
    """Returns the share of each entry in each capture (an interval of the profile): float64[entries, captures].

    The captures are in the order of their groups: that in which workers answered differs from run to run.
    """
    captures = len(groups)
    rows = number_rows(profile, by)
    place = {entry.key: number for number, entry in enumerate(entries)}
    numbers, at = np.unique(rows.number, return_inverse=True)
    entry = np.array([place.get(rows.key(number), len(entries)) for number in numbers.tolist()], np.int64)[at]
    samples = profile.counts.sum(axis=1).astype(np.float64)
    cells = np.bincount(entry * captures + profile.interval, samples, (len(entries) + 1) * captures)
    table = cells.reshape(len(entries) + 1, captures)[:, sorted(range(captures), key=groups.__getitem__)]
    whole = table.sum(axis=0)
    return np.asarray(np.divide(table[:-1], whole, out=np.zeros_like(table[:-1]), where=whole > 0), np.float64)


def _chances(shares: NDArray[np.float64], first: int) -> list[float]:
    """Returns, for each entry, how often the largest change of all entries is at least as large by chance."""
    count = shares.shape[1]
    spread = shares.std(axis=1, keepdims=True)
    scaled = np.divide(shares - shares.mean(axis=1, keepdims=True), spread, out=np.zeros_like(shares), where=spread > 0)
    weights = np.where(np.arange(count) < first, -1.0 / first, 1.0 / (count - first))
    seen = np.abs(scaled @ weights)
    chance = np.random.default_rng(1)  # the same captures give the same figures
    reached = np.zeros(len(shares))
    for _ in range(0, _DEALS, _AT_ONCE):
        dealt = np.stack([chance.permutation(weights) for _ in range(_AT_ONCE)], axis=1)
        largest = np.abs(scaled @ dealt).max(axis=0)
        reached += (largest[None, :] >= seen[:, None] * (1 - 1e-9)).sum(axis=1)
    return list(((reached + 1) / (_DEALS + 1)).tolist())
