"""Until when a kernel can have run: its process has ended, or another kernel has taken its place.

Both come late rather than early: a kernel that is thought to run longer than it did competes for stalls, one that is
thought to have ended loses them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import equal
from iaprof.report.join.overlaps import overlaps

NEVER = np.uint64((1 << 64) - 1)


class Lives:
    """When processes began and ended."""

    def __init__(self, processes: pa.Table) -> None:
        """`processes` has the columns time_ns, pid, tid, event of `process` rows, in any order."""
        times, pids, tids = (processes[name].to_numpy() for name in ("time_ns", "pid", "tid"))
        leader = tids == pids
        is_fork, is_exit = (equal(processes["event"], name) for name in ("fork", "exit"))
        self._begins = TimesByPid(pids[is_fork & leader], times[is_fork & leader])
        self._deaths = TimesByPid(pids[is_exit & leader], times[is_exit & leader])
        self._exits = TimesByPid(pids[is_exit], times[is_exit])

    def ends(self, pids: NDArray[np.uint64], born: NDArray[np.uint64], last: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """When the processes ended that had these pids at these times: uint64[n], ns; NEVER where nothing says so.

        A process has ended when its last thread has. What it launched after that says that it had not.

        Args:
            pids: uint64[n].
            born: uint64[n], a time at which the process was there.
            last: uint64[n], when it last launched something; 0 for never.
        """
        died = self._deaths.next(pids, born)
        following = self._begins.next(pids, np.where(died == NEVER, born, died))  # the pid's next process
        end = np.maximum(self._exits.last(pids, following), died)
        return np.where((died == NEVER) | (last > end), NEVER, end)


class TimesByPid:
    """Times of each pid."""

    def __init__(self, pids: NDArray[np.uint32], times: NDArray[np.uint64]) -> None:
        order = np.lexsort((times, pids))
        self._pids, self._times = pids[order].astype(np.uint64), times[order]

    def at(self, pids: NDArray[np.uint64], times: NDArray[np.uint64]) -> NDArray[np.int64]:
        """How many moments, of this pid up to that time and of lower pids, there are."""
        keys = np.concatenate([self._pids, pids])
        moments = np.concatenate([self._times, times])
        asked = np.arange(len(keys)) >= len(self._pids)
        order = np.lexsort((asked, moments, keys))
        found = np.empty(len(keys), np.int64)
        found[order] = np.cumsum(~asked[order])
        return found[len(self._pids) :]

    def next(self, pids: NDArray[np.uint64], times: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The first moment of each pid after a time; NEVER for none."""
        index = self.at(pids, times)
        there = index < len(self._pids)
        safe = np.where(there, index, 0)
        there &= self._pids[safe] == pids if len(self._pids) else False
        return np.where(there, self._times[safe] if len(self._pids) else NEVER, NEVER)

    def last(self, pids: NDArray[np.uint64], times: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The last moment of each pid up to a time; 0 for none."""
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
    """When each kernel's memory was given to another kernel of its process: uint64[n], ns; NEVER where it was not.

    Args:
        pids: uint64[n], whose kernel.
        starts: uint64[n], its first address.
        ends: uint64[n], the address behind its last.
        since: uint64[n], when it was compiled.
        last: uint64[n], its last launch: what is launched after another took its place was not replaced by it.
    """
    found = np.full(len(pids), NEVER, np.uint64)
    pairs = overlaps(pids, starts, ends)
    if pairs is not None:
        for old, new in (pairs, pairs[::-1]):
            replaces = (since[new] > since[old]) & (since[new] >= last[old])
            np.minimum.at(found, old[replaces], since[new][replaces])
    return found
