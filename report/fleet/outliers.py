"""Groups, such as hosts, in which a kernel stalls much more or less for a reason than in the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.report.fleet.partial import Partial

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
    cell = rows.capture * kernels + number[rows.kernel]
    sums = [np.bincount(cell, rows.counts[:, at], groups * kernels) for at in range(reasons)]
    counts = np.stack(sums, axis=1).reshape(groups, kernels * reasons)
    of_group = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, of_group, out=np.zeros_like(counts), where=of_group > 0)
    low, median, high = np.quantile(shares, (0.1, 0.5, 0.9), axis=0)
    is_outlier = _are_outliers(shares, median)
    found = []
    keys = list(distinct)
    for column in np.flatnonzero(is_outlier.any(axis=0)).tolist():
        kernel, reason = divmod(column, reasons)
        of_column = np.flatnonzero(is_outlier[:, column])
        farthest = of_column[np.argsort(-np.abs(shares[of_column, column] - median[column]), kind="stable")].tolist()
        spread = float(low[column]), float(median[column]), float(high[column])
        found.append(
            Outlier(
                *keys[kernel],
                total.reasons[reason],
                *spread,
                tuple(total.groups[group] for group in farthest),
                tuple(float(shares[group, column]) for group in farthest),
            )
        )
    return sorted(found, key=lambda each: (-each.distance, each.kernel, each.reason))


def _are_outliers(shares: NDArray[np.float64], median: NDArray[np.float64]) -> NDArray[np.bool_]:
    distance = np.abs(shares - median)
    deviation = _TO_SIGMA * np.median(distance, axis=0)
    differs = (shares >= _FACTOR * median) | (shares * _FACTOR <= median)
    return np.asarray(differs & (distance >= _LEAST_SHARE) & (distance >= _DEVIATIONS * deviation))
