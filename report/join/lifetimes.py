"""Finds until when a kernel can have run: until its process ended, or another kernel took its memory.

The estimates are late rather than early. A kernel whose end is too late competes for stalls; one whose end is too early
loses them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import rows_equal
from iaprof.formats.distinct import distinct
from iaprof.formats.ranges import ranges

_MAX_PAIRS = 1 << 23  # an honest process has few kernels that overlap

NEVER = np.uint64((1 << 64) - 1)


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
    bounds = distinct(starts)
    base = group * (len(bounds) + 1)
    first, behind = (base + np.searchsorted(bounds, each[order]) for each in (starts, ends))
    # In this order, ranges overlap if the first one contains the second one's first address.
    count = np.maximum(np.searchsorted(first, behind) - np.arange(len(first)) - 1, 0)
    if count.sum() > _MAX_PAIRS:
        return None
    return np.repeat(order, count), order[ranges(np.arange(1, len(first) + 1), count)]


class Lives:
    """When processes began and ended."""

    def __init__(self, processes: pa.Table) -> None:
        """Sorts the events.

        Args:
            processes: columns time_ns, pid, tid and event of `process` rows, in any order.
        """
        times, pids, tids = (processes[name].to_numpy() for name in ("time_ns", "pid", "tid"))
        leader = tids == pids
        is_fork, is_exit = (rows_equal(processes["event"], name) for name in ("fork", "exit"))
        self._begins = TimesByPid(pids[is_fork & leader], times[is_fork & leader])
        self._deaths = TimesByPid(pids[is_exit & leader], times[is_exit & leader])
        self._exits = TimesByPid(pids[is_exit], times[is_exit])

    def ends(self, pids: NDArray[np.uint64], born: NDArray[np.uint64], last: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns when these processes ended: uint64[n], ns; NEVER if no event says so.

        A process ends when its last thread exits. A launch after that shows that it had not ended.

        Args:
            pids: uint64[n].
            born: uint64[n], ns, a time at which the process existed: pids are reused.
            last: uint64[n], ns, the process's last launch; 0: none.
        """
        died = self._deaths.next(pids, born)
        following = self._begins.next(pids, np.where(died == NEVER, born, died))  # the next process with this pid
        end = np.maximum(self._exits.last(pids, following), died)
        return np.where((died == NEVER) | (last > end), NEVER, end)


class TimesByPid:
    """Times of events, searchable by pid."""

    def __init__(self, pids: NDArray[np.uint32], times: NDArray[np.uint64]) -> None:
        """Sorts the events: pids uint32[n], times uint64[n], ns."""
        order = np.lexsort((times, pids))
        self._pids, self._times = pids[order].astype(np.uint64), times[order]

    def at(self, pids: NDArray[np.uint64], times: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Counts the events of lower pids, and of this pid up to and including that time: int64[n]."""
        keys = np.concatenate([self._pids, pids])
        moments = np.concatenate([self._times, times])
        asked = np.arange(len(keys)) >= len(self._pids)
        order = np.lexsort((asked, moments, keys))
        found = np.empty(len(keys), np.int64)
        found[order] = np.cumsum(~asked[order])
        return found[len(self._pids) :]

    def next(self, pids: NDArray[np.uint64], times: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns the first event of each pid after a time: uint64[n], ns; NEVER if there is none."""
        index = self.at(pids, times)
        there = index < len(self._pids)
        safe = np.where(there, index, 0)
        there &= self._pids[safe] == pids if len(self._pids) else False
        return np.where(there, self._times[safe] if len(self._pids) else NEVER, NEVER)

    def last(self, pids: NDArray[np.uint64], times: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns the last event of each pid up to a time: uint64[n], ns; 0 if there is none."""
        index = self.at(pids, times) - 1
        if not len(self._pids):
            return np.zeros(len(pids), np.uint64)
        safe = np.maximum(index, 0)
        return np.where((index >= 0) & (self._pids[safe] == pids), self._times[safe], np.uint64(0))


def superseded(
    pids: NDArray[np.uint64],
    starts: NDArray[np.uint64],
    ends: NDArray[np.uint64],
    since: NDArray[np.uint64],
    last: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Returns when each process compiled another kernel over each kernel's memory: uint64[n], ns; NEVER if it did not.

    Args:
        pids: uint64[n], the kernel's process.
        starts: uint64[n], the kernel's first address.
        ends: uint64[n], one past its last address.
        since: uint64[n], ns, when it was compiled.
        last: uint64[n], ns, its last launch: a kernel that is launched after another was compiled was not replaced.
    """
    found = np.full(len(pids), NEVER, np.uint64)
    pairs = overlaps(pids, starts, ends)
    if pairs is not None:
        for old, new in (pairs, pairs[::-1]):
            replaces = (since[new] > since[old]) & (since[new] >= last[old])
            np.minimum.at(found, old[replaces], since[new][replaces])
    return found
