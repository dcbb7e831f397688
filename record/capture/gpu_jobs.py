"""`gpu_job` rows: the records of what happened to jobs on all CPUs, put together by job."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import make_rows
from iaprof.formats.distinct import distinct_texts, order_by
from iaprof.formats.file_names import as_text
from iaprof.formats.wire.gpu_jobs import JOB_EVENT, JobStep, decode, formats_from_json
from iaprof.record.spool import Frame

EVENTS_AT_ONCE = 1 << 17
_STEPS = len(JobStep)


class GpuJobRows:
    """Collects records until they make a row group, and keeps those of jobs that have not ended."""

    def __init__(self, events_at_once: int = EVENTS_AT_ONCE) -> None:
        """Makes rows whenever so many records were added."""
        self._events: list[NDArray[np.void]] = []
        self._most, self._new = events_at_once, 0
        self.lost = 0
        """Records that the kernel dropped for lack of space."""

    @property
    def is_full(self) -> bool:
        """Whether there are enough records for a row group."""
        return self._new >= self._most

    def add(self, frame: Frame) -> None:
        """Adds a frame.

        Raises:
            ValueError: the frame is damaged.
        """
        meta, data = frame.payload[: frame.shape], frame.payload[frame.shape :]
        events, lost = decode(formats_from_json(meta), data)
        self.lost += lost
        self._events.append(events)
        self._new += len(events)

    def take(self, first_ns: int | None = None) -> pa.StructArray:
        """Returns rows of the jobs of which all is known, and at the end of all that were given to a GPU.

        Args:
            first_ns: at the end: when the recording began, since when jobs ran of which only the end is known.
        """
        events = np.concatenate([np.empty(0, JOB_EVENT), *self._events])
        events = events[order_by(events["key"][:, 0], events["key"][:, 1], events["time"], events["step"])]
        new = np.ones(len(events), bool)
        new[1:] = (events["key"][1:] != events["key"][:-1]).any(axis=1) | (events["step"][1:] <= events["step"][:-1])
        job = np.cumsum(new) - 1
        whole = np.bincount(job) == _STEPS
        # Many jobs of which something is missing are only there if records were lost.
        is_last = first_ns is not None or int((~whole).sum()) > self._most
        taken = np.ones(len(events), bool) if is_last else whole[job]
        self._events, self._new = [events[~taken]], 0
        return _rows(np.cumsum(new[taken]) - 1, events[taken], first_ns or 0)


def _rows(job: NDArray[np.int64], events: NDArray[np.void], first_ns: int) -> pa.StructArray:
    """Makes the rows of jobs: int64[n], ascending, of JOB_EVENT[n]. Jobs that only were queued have none."""
    jobs = int(job[-1]) + 1 if len(job) else 0
    times, known = np.zeros((jobs, _STEPS), np.uint64), np.zeros((jobs, _STEPS), bool)
    times[job, events["step"]], known[job, events["step"]] = events["time"], True
    queued, run, done = known.T
    pid, at_once = np.zeros(jobs, np.uint32), np.zeros(jobs, bool)
    is_queued, is_done = events["step"] == JobStep.QUEUED, events["step"] == JobStep.DONE
    pid[job[is_queued]] = events["pid"][is_queued]
    at_once[job[is_done]] = events["at_once"][is_done]
    # If nothing tells when it began, a job was with the GPU at most since it was queued, or since before the recording.
    began = np.where(run, times[:, JobStep.RUN], np.where(queued, times[:, JobStep.QUEUED], np.uint64(first_ns)))
    shown = run | done
    first = np.searchsorted(job, np.flatnonzero(shown))

    def text(name: str) -> pa.Array:
        distinct, indices = distinct_texts(events[name][first])
        texts = pa.array([as_text(each) or None for each in distinct], pa.string())
        return texts.take(pa.array(indices))

    ends, queues = times[shown, JobStep.DONE], times[shown, JobStep.QUEUED]
    columns = {
        "time_ns": began[shown],
        "end_ns": pa.array(ends, mask=~done[shown]),
        "queued_ns": pa.array(queues, mask=~queued[shown]),
        "pid": pid[shown],
        "queue": text("queue"),
        "device": text("device"),
        "at_once": at_once[shown],
    }
    return make_rows("gpu_job", columns)
