"""Groups, such as hosts, in which a kernel stalls much more or less for a reason than in the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.ranges import groups as groups_of
from iaprof.report.fleet.partial import Partial
from iaprof.report.fleet.percentiles import Shares

FEWEST_GROUPS = 4  # below, there is no usual value
_LEAST_SHARE = 0.005  # of a group's samples, by which an outlier differs from the median
_FACTOR = 2.0  # times the median, or the median times it
_DEVIATIONS = 3.5  # of the median absolute deviation, scaled as below: the usual bound for outliers
_TO_SIGMA = 1.4826  # makes the median absolute deviation of a normal distribution its standard deviation


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
    low, median, high = (shares.quantile(part) for part in (0.1, 0.5, 0.9))
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
