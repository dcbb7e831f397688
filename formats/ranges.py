"""Ranges of numbers, written out a whole column of ranges at a time, and the positions of equal numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray


def ranges(starts: NDArray[np.int64] | int, counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """The numbers of many ranges, one range after the other: int64[sum of counts].

    Args:
        starts: int64[n], the first number of each range; or one for all of them, 0 for places within each range.
        counts: integers[n], how many numbers each range has; 0 for none.
    """
    counts = counts.astype(np.int64, copy=False)
    ends = np.cumsum(counts)
    numbers: NDArray[np.int64] = np.repeat(starts - (ends - counts), counts)
    numbers += np.arange(len(numbers))
    return numbers


def batches(sizes: NDArray[np.int64], most: int) -> Iterator[slice]:
    """Yields slices of rows whose sizes, int64[n], add up to at most `most`; a larger row gets a slice of its own."""
    until = np.cumsum(sizes)
    first = 0
    while first < len(until):
        before = int(until[first - 1]) if first else 0
        end = max(int(np.searchsorted(until, before + most, side="right")), first + 1)
        yield slice(first, end)
        first = end


class RowsOfKeys:
    """The positions of each number in a column; a column may have millions of distinct numbers."""

    def __init__(self, keys: NDArray[Any]) -> None:
        """Sorts the keys, integers[n]."""
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order].astype(np.int64)

    def of(self, key: int) -> NDArray[np.int64]:
        """Returns the positions of a number, ascending: int64[k]."""
        first, end = np.searchsorted(self._sorted, [key, key + 1])
        return self._order[first:end]


def groups(keys: NDArray[Any]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yields each distinct key and its positions; sorts once, instead of comparing all keys with each distinct one."""
    order = np.argsort(keys, kind="stable")
    distinct, firsts = np.unique(keys[order], return_index=True)
    for key, first, end in zip(distinct.tolist(), firsts.tolist(), [*firsts[1:].tolist(), len(keys)], strict=False):
        yield key, order[first:end]
