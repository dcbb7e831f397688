"""Which slices are inside of which: those of a row by their times, those of a device by the launch that caused them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.grouped import Groups
from iaprof.timelines.intervals import FARTHEST
from iaprof.timelines.trace import ABSENT, Slices

NONE = -1
_FARTHEST = FARTHEST >> 1


def parents(track: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns for each slice the row of the innermost one of its track that has begun before it and not ended.

    Of slices that begin together, the longest is outside. Nothing is inside of a slice without a length. If slices
    partly overlap, which stages make rare, the later one counts as inside of the earlier.

    Args:
        track: int64[n], numbers of tracks from 0 on.
        start: int64[n], ns.
        end: int64[n], ns, not before the start.

    Returns:
        int64[n], rows; NONE where nothing is around a slice.
    """
    count = len(start)
    found = np.full(count, NONE, np.int64)
    if not count:
        return found
    order = np.lexsort((-end, start, track))
    track, start, end = track[order], start[order], end[order]
    depth = _depths(track, start, end)
    place = np.arange(count)
    # One number for each track and depth, those of a track adjacent.
    level = track * (int(depth.max()) + 1) + depth
    distinct, number = np.unique(level, return_inverse=True)
    around = np.flatnonzero(end > start)
    keys = np.sort(number[around] * count + place[around])
    inside = np.flatnonzero(depth > 0)
    above = np.searchsorted(distinct, level[inside] - 1)
    last = np.searchsorted(keys, above * count + place[inside]) - 1
    found[order[inside]] = order[keys[last] % count]
    return found


def depths(track: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns how many slices of its track are open when each begins, for arguments as of `parents`: int64[n]."""
    order = np.lexsort((-end, start, track))
    found = np.empty(len(start), np.int64)
    found[order] = _depths(track[order], start[order], end[order]) if len(start) else 0
    return found


def _depths(track: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns how many slices are open when each begins, for slices sorted by track, start and falling end."""
    some = end > start
    times, rank = np.unique(np.concatenate([start, end]), return_inverse=True)
    base = track * len(times)
    closing = np.sort((base + rank[len(start) :])[some])
    tracks = np.flatnonzero(np.append(True, track[1:] != track[:-1]))
    first = np.repeat(tracks, np.diff(np.append(tracks, len(track))))
    begun = np.append(0, np.cumsum(some))
    opened = begun[np.arange(len(track))] - begun[first]
    closed = np.searchsorted(closing, base + rank[: len(start)], "right") - np.searchsorted(closing, base)
    return np.asarray(opened - closed, np.int64)


def times(slices: Slices) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns when slices begin and end, in ns: int64[n] each, never so far from 0 that a difference would overflow."""
    start = np.clip(slices.start, -_FARTHEST, _FARTHEST)
    return start, start + np.minimum(lengths(slices), _FARTHEST)


def lengths(slices: Slices) -> NDArray[np.int64]:
    """Returns durations in whole ns; negative and absent ones are 0."""
    return np.asarray(np.rint(np.clip(np.nan_to_num(slices.duration), 0, FARTHEST)), np.int64)


def tracks(slices: Slices, ranks: NDArray[np.int64], device: NDArray[np.bool_]) -> Groups:
    """Returns the rows in which slices are shown: threads of a rank's processes, a device's apart from a host's."""
    return Groups(ranks, slices.pid, slices.tid, device)


def self_times(slices: Slices, parent: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the ns of each slice in which none of its track is inside of it: int64[n].

    Args:
        slices: of n rows.
        parent: what `parents` returns for them.
    """
    start, end = times(slices)
    own = end - start
    inner = np.flatnonzero(parent != NONE)
    outer = parent[inner]
    covered = np.maximum(np.minimum(end[inner], end[outer]) - start[inner], 0)
    inside = np.bincount(outer, covered, len(parent))
    return np.asarray(np.maximum(own - np.rint(np.minimum(inside, float(FARTHEST))).astype(np.int64), 0), np.int64)


def launches(slices: Slices, device: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns for each slice of a device the host's slice that launched it: the first one of its correlation.

    Args:
        slices: of n rows.
        device: bool[n], which are a device's.

    Returns:
        int64[n], rows; NONE for those of a host, and where no launch is known.
    """
    found = np.full(len(slices), NONE, np.int64)
    known = slices.correlation != ABSENT
    host, caused = np.flatnonzero(known & ~device), np.flatnonzero(known & device)
    if not len(host) or not len(caused):
        return found
    rows = np.concatenate([host, caused])
    pairs = Groups(slices.file[rows], slices.correlation[rows])
    first = np.full(len(pairs), NONE, np.int64)
    # Reversed: the last assignment counts, which is that of the first row.
    by_time = host[np.argsort(slices.start[host], kind="stable")][::-1]
    place = np.empty(len(slices), np.int64)
    place[rows] = pairs.numbers
    first[place[by_time]] = by_time
    found[caused] = first[place[caused]]
    return found
