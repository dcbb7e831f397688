"""Ranges of numbers, written out a whole column of ranges at a time."""

from __future__ import annotations

from collections.abc import Iterator

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
