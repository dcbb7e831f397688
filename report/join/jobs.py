"""Which processes had work on a GPU at a time, by the jobs of the kernel's scheduler.

A job is with the GPU from when the scheduler gives it to the driver until the driver says that it has ended: it ran
within that time. Of jobs of long-running queues, which Level Zero uses on xe, the driver never says so, and the
scheduler ends them at once. So a process with such a job can have run at any time, and so can one without jobs, as not
every driver has this scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import order_by
from iaprof.formats.header.gpu_jobs import all_recorded, pci_addresses
from iaprof.report.join.lifetimes import NEVER

_UNKNOWN_PID = 0  # of jobs that were queued before the recording
_Ints = NDArray[np.int64]
_Times = NDArray[np.uint64]


class Jobs:
    """The times in which each process had work on a GPU."""

    def __init__(self, rows: pa.Table, pids: _Ints) -> None:
        """Takes time_ns, end_ns, pid and at_once of `gpu_job` rows, and the processes that have kernels."""
        self._begins, self._ends = rows["time_ns"].to_numpy(), rows["end_ns"].fill_null(NEVER).to_numpy()
        self._pids, self._process = np.unique(rows["pid"].to_numpy().astype(np.int64), return_inverse=True)
        self._tells = self._pids != _UNKNOWN_PID
        self._tells[self._process[rows["at_once"].to_numpy()]] = False
        # Before its first job, a process may have had one since before the recording, which never ended in it.
        first = np.full(len(self._pids), NEVER, np.uint64)
        np.minimum.at(first, self._process, self._begins)
        self._busy = Intervals(
            np.append(self._begins, np.zeros(len(first), np.uint64)),
            np.append(self._ends, first),
            np.append(self._process, np.arange(len(first))),
        )
        self._unknown = self._of(self._pids == _UNKNOWN_PID)
        self.others = self._of(self._tells & ~np.isin(self._pids, pids))
        """When processes without kernels had jobs on a GPU, as far as these tell."""

    def _of(self, processes: NDArray[np.bool_]) -> Intervals:
        rows = processes[self._process]
        return Intervals(self._begins[rows], self._ends[rows])

    def can_have_run(self, pids: _Ints, since: _Times, until: _Times) -> NDArray[np.bool_]:
        """Returns whether each process can have had work on a GPU between two times: bool[n]."""
        process = np.minimum(np.searchsorted(self._pids, pids), len(self._pids) - 1)
        tells = self._tells[process] & (self._pids[process] == pids)
        busy, unknown = self._busy.overlap(since, until, process), self._unknown.overlap(since, until)
        can_have: NDArray[np.bool_] = ~tells | busy | unknown
        return can_have


class Intervals:
    """Times in which something is so, of several lanes. They may overlap."""

    def __init__(self, begins: _Times, ends: _Times, lanes: _Ints | None = None) -> None:
        """Takes begins and ends, uint64[n], and the lane of each, int64[n]; None: all are of lane 0."""
        lanes = np.zeros(len(begins), np.int64) if lanes is None else lanes
        order = order_by(lanes, begins)
        lanes, begins, ends = lanes[order], begins[order], ends[order]
        # Lanes and ranks of times fit into one number.
        self._begins, self._width = np.sort(begins), len(begins) + 1
        self._key = lanes * self._width + np.searchsorted(self._begins, begins)
        last = np.sort(ends)
        reached = np.maximum.accumulate(lanes * self._width + np.searchsorted(last, ends)) - lanes * self._width
        self._reached = last[reached]  # by then, all of the lane that began before have ended

    def overlap(self, since: _Times, until: _Times, lanes: _Ints | None = None) -> NDArray[np.bool_]:
        """Returns whether each stretch, since..until, has a moment of them in its lane: bool[n]."""
        if not len(self._begins):
            return np.zeros(len(since), bool)
        first = np.zeros(len(since), np.int64) if lanes is None else lanes * self._width
        at = np.searchsorted(self._key, first + np.searchsorted(self._begins, until, side="right")) - 1
        there = np.maximum(at, 0)
        overlaps: NDArray[np.bool_] = (at >= 0) & (self._key[there] >= first) & (self._reached[there] >= since)
        return overlaps


def jobs_of(capture: CaptureReader, pids: Iterable[int]) -> Jobs | None:
    """Returns the jobs of the GPUs whose samples a capture has.

    Args:
        capture: the open capture.
        pids: the processes that have kernels.

    Returns:
        The jobs; None if there are none, or some are missing: then nothing follows from them.
    """
    if not capture.count("gpu_job") or not all_recorded(capture.header):
        return None
    import pyarrow.compute as pc  # which takes long, and few captures need it

    rows = capture.table("gpu_job", ("time_ns", "end_ns", "pid", "device", "at_once"))
    # Which GPU a job is for is not known before Linux 6.17.
    sampled = pa.array([*pci_addresses(capture.header), None], pa.string())
    rows = rows.filter(pc.is_in(rows["device"].cast(pa.string()), sampled))
    return Jobs(rows, np.unique(np.array(list(pids), np.int64))) if len(rows) else None
