"""Ranges of addresses that lie over each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.ranges import ranges

_MAX_PAIRS = 1 << 23  # an honest process has few kernels that overlap


def overlaps(
    groups: NDArray[np.uint64], starts: NDArray[np.uint64], ends: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Each pair of ranges of one group that overlap, once: two columns of indices; None where they are too many.

    Args:
        groups: uint64[n].
        starts: uint64[n], first addresses.
        ends: uint64[n], the addresses behind the last.
    """
    order = np.lexsort((starts, groups))
    # A group and the rank of an address in one number, ascending: addresses themselves leave too few bits for groups.
    group = np.cumsum(np.diff(groups[order], prepend=groups[order[:1]]) != 0)
    bounds = np.unique(starts)
    base = group * (len(bounds) + 1)
    first, behind = (base + np.searchsorted(bounds, each[order]) for each in (starts, ends))
    # Of two that overlap, the second in this order has its first address in the first.
    count = np.maximum(np.searchsorted(first, behind) - np.arange(len(first)) - 1, 0)
    if count.sum() > _MAX_PAIRS:
        return None
    return np.repeat(order, count), order[ranges(np.arange(1, len(first) + 1), count)]
