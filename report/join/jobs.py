"""Which processes had work on a GPU at a time, by the jobs of the kernel's scheduler.

A job is with the GPU from when the scheduler gives it to the driver until the driver says that it has ended: it ran
within that time. Of jobs of long-running queues, which Level Zero uses on xe, the driver never says so, and the
scheduler ends them at once. So a process with such a job can have run at any time, and so can one without jobs, as not
every driver has this scheduler.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.gpu_jobs import all_recorded, pci_addresses
from iaprof.report.join.lifetimes import NEVER

_UNKNOWN_PID = 0  # of jobs that were queued before the recording
_Ints = NDArray[np.int64]
_Times = NDArray[np.uint64]


class Jobs:
    """The times in which each process had work on a GPU."""

    def __init__(self, rows: pa.Table) -> None:
        """Takes time_ns, end_ns, pid and at_once of `gpu_job` rows."""
        pids = rows["pid"].to_numpy().astype(np.int64)
        self._begins, self._ends = rows["time_ns"].to_numpy(), rows["end_ns"].fill_null(NEVER).to_numpy()
        self._pids, self._number = np.unique(pids, return_inverse=True)
        self._tells = self._pids != _UNKNOWN_PID
        self._tells[self._number[rows["at_once"].to_numpy()]] = False
        self._busy: dict[int, Intervals] = {}
        for number in np.flatnonzero(self._tells).tolist():
            rows = np.flatnonzero(self._number == number)
            # Before its first job, a process may have had one since before the recording, which never ended in it.
            unknown = np.array([0], np.uint64), self._begins[rows].min(keepdims=True)
            known = self._begins[rows], self._ends[rows]
            self._busy[number] = Intervals(*map(np.concatenate, zip(unknown, known, strict=True)))
        self._unknown = self._intervals(pids == _UNKNOWN_PID)

    def _intervals(self, rows: NDArray[np.bool_]) -> Intervals:
        return Intervals(self._begins[rows], self._ends[rows])

    def can_have_run(self, pids: _Ints, since: _Times, until: _Times) -> NDArray[np.bool_]:
        """Returns whether each process can have had work on a GPU between two times: bool[n]."""
        ran = np.ones(len(pids), bool)
        for number, busy in self._busy.items():
            rows = np.flatnonzero(pids == self._pids[number])
            ran[rows] = busy.overlap(since[rows], until[rows])
        return ran | self._unknown.overlap(since, until)

    def of_others(self, pids: _Ints) -> Intervals:
        """Returns when processes other than `pids` had jobs on a GPU, as far as these tell."""
        others = self._tells & ~np.isin(self._pids, pids)
        return self._intervals(others[self._number])


class Intervals:
    """Times in which something is so, in order and apart."""

    def __init__(self, begins: _Times, ends: _Times) -> None:
        """Takes their begins and ends, uint64[n], in any order."""
        order = np.argsort(begins, kind="stable")
        begins, reached = begins[order], np.maximum.accumulate(ends[order])
        new = np.flatnonzero(np.append(True, begins[1:] > reached[:-1])[: len(begins)])
        self._begins, self._ends = begins[new], reached[np.append(new, len(begins))[1:] - 1] if len(new) else reached

    def overlap(self, since: _Times, until: _Times) -> NDArray[np.bool_]:
        """Returns whether each stretch, since..until, has a moment of them: bool[n]."""
        if not len(self._begins):
            return np.zeros(len(since), bool)
        last = np.searchsorted(self._begins, until, side="right") - 1
        overlaps: NDArray[np.bool_] = (last >= 0) & (self._ends[np.maximum(last, 0)] >= since)
        return overlaps


def jobs_of(capture: CaptureReader) -> Jobs | None:
    """Returns the jobs of the GPUs whose samples a capture has.

    Returns None if there are none, or some are missing: then nothing follows from them.
    """
    if not capture.count("gpu_job") or not all_recorded(capture.header):
        return None
    import pyarrow.compute as pc  # which takes long, and few captures need it

    rows = capture.table("gpu_job", ("time_ns", "end_ns", "pid", "device", "at_once"))
    # Which GPU a job is for is not known before Linux 6.17.
    sampled = pa.array([*pci_addresses(capture.header), None], pa.string())
    rows = rows.filter(pc.is_in(rows["device"].cast(pa.string()), sampled))
    return Jobs(rows) if len(rows) else None
