"""Finds address ranges that overlap."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.ranges import ranges

_MAX_PAIRS = 1 << 23  # an honest process has few kernels that overlap


def overlaps(
    groups: NDArray[np.uint64], starts: NDArray[np.uint64], ends: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Finds each pair of overlapping ranges of a group, once.

    Args:
        groups: uint64[n].
        starts: uint64[n], first addresses.
        ends: uint64[n], one past the last addresses.

    Returns:
        Two columns of indices, int64[pairs]; None if there are more than _MAX_PAIRS.
    """
    order = np.lexsort((starts, groups))
    # Ascending keys: the group, then the rank of the address. Addresses themselves leave too few bits for the group.
    group = np.cumsum(np.diff(groups[order], prepend=groups[order[:1]]) != 0)
    bounds = np.unique(starts)
    base = group * (len(bounds) + 1)
    first, behind = (base + np.searchsorted(bounds, each[order]) for each in (starts, ends))
    # In this order, ranges overlap if the first one contains the second one's first address.
    count = np.maximum(np.searchsorted(first, behind) - np.arange(len(first)) - 1, 0)
    if count.sum() > _MAX_PAIRS:
        return None
    return np.repeat(order, count), order[ranges(np.arange(1, len(first) + 1), count)]
