"""Rows with the same values in some columns, in order, and statistics of them: whole columns at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import groups


class Groups:
    """Rows with equal keys, in the order of the keys."""

    def __init__(self, *keys: NDArray[Any]) -> None:
        """Groups rows.

        Args:
            *keys: arrays of integers, of one length; the first is the most important.
        """
        self.numbers, first = groups(*keys)  # the group of each row
        self.order: NDArray[np.int64] = np.argsort(self.numbers, kind="stable")  # rows of a group are adjacent
        self.counts: NDArray[np.int64] = np.bincount(self.numbers, minlength=len(first))
        self.firsts: NDArray[np.int64] = np.cumsum(self.counts) - self.counts  # places in `order`

    def __len__(self) -> int:
        return len(self.firsts)

    def key(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the first row's value of each group."""
        return values[self.order[self.firsts]]

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns sums."""
        return self._reduced(np.add, values)

    def min(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the least values."""
        return self._reduced(np.minimum, values)

    def max(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the largest values."""
        return self._reduced(np.maximum, values)

    def mean(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Returns means."""
        return np.asarray(self.sum(values.astype(float)) / self.counts, float)

    def median(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Returns medians: of an even number, the mean of the two in the middle."""
        ordered = values[np.lexsort((values, self.numbers))]
        low, high = self.firsts + (self.counts - 1) // 2, self.firsts + self.counts // 2
        return np.asarray((ordered[low] + ordered[high].astype(float)) / 2, float)

    def stdev(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Returns standard deviations of samples; 0 for a single one."""
        away = values - self.mean(values)[self.numbers]
        return np.asarray(np.sqrt(self.sum(away * away) / np.maximum(self.counts - 1, 1)), float)

    def _reduced(self, function: np.ufunc, values: NDArray[Any]) -> NDArray[Any]:
        if not len(self):
            return values[:0]
        return np.asarray(function.reduceat(values[self.order], self.firsts))


def rows_of(column: NDArray[np.int64], wanted: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yields for each value the rows that have it, in ascending order, without a pass over all rows for each."""
    order = np.argsort(column, kind="stable")
    ordered = column[order]
    low, high = (np.searchsorted(ordered, wanted, side) for side in ("left", "right"))
    for first, last in zip(low.tolist(), high.tolist(), strict=True):
        yield order[first:last]


def before(values: NDArray[np.int64], groups: NDArray[Any]) -> NDArray[np.int64]:
    """Returns for each row the largest value in the rows of its group before it; the least integer for its first.

    Args:
        values: in order, those of a group adjacent.
        groups: ascending numbers.
    """
    # Ranks instead of values: a group's ranks are above those of the groups before it, so that one pass does for all.
    least = np.iinfo(np.int64).min
    if not len(values):
        return values
    ranks = np.empty(len(values), np.int64)
    ranks[np.lexsort((values, groups))] = np.arange(len(values))
    highest = np.maximum.accumulate(ranks)
    by_rank = np.empty(len(values), np.int64)
    by_rank[ranks] = values
    largest = np.full(len(values), least, np.int64)
    largest[1:] = by_rank[highest[:-1]]
    largest[np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))] = least
    return largest
