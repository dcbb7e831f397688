"""Reads the tracepoints of the kernel's GPU scheduler on all CPUs, from a ring buffer per CPU.

The bytes are returned as the kernel wrote them; formats/wire/gpu_jobs.py decodes them after the recording.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Sequence
from pathlib import Path

from iaprof.bpf.perf_buffer import BuffersOfCpus, CpuEvents
from iaprof.bpf.perf_event import (
    CLOCK_MONOTONIC,
    IOC_SET_OUTPUT,
    READ_TIME_ENABLED,
    TYPE_TRACEPOINT,
    Attr,
    Flag,
    Sample,
)
from iaprof.formats.wire.gpu_jobs import JobFormat, JobStep, format_of

# Enough for some 600 jobs of which one CPU has all records, between two reads; half of that wakes a reader.
BUFFER_PAGES = 64
_TRACING = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
_NAMES = {  # since Linux 6.17; before
    JobStep.QUEUED: ("drm_sched_job_queue", "drm_sched_job"),
    JobStep.RUN: ("drm_sched_job_run", "drm_run_job"),
    JobStep.DONE: ("drm_sched_job_done", "drm_sched_process_job"),
}


def job_formats(tracing: Sequence[Path] = _TRACING) -> list[JobFormat]:
    """Returns the formats of the tracepoints, one for each step; [] if this kernel does not have all of them now.

    They exist once a driver with this scheduler is loaded.
    """
    for folder in tracing:
        formats = []
        for step, names in _NAMES.items():
            for name in names:
                with contextlib.suppress(OSError, ValueError):
                    text = (folder / "events" / "gpu_scheduler" / name / "format").read_text()
                    formats.append(format_of(step, text))
                    break
        known = [each for each in formats if each is not None]
        if len(known) == len(_NAMES):
            return known
    return []


class _CpuJobs(CpuEvents):
    """One CPU's events."""

    def __init__(self, cpu: int, formats: Sequence[JobFormat], pages: int) -> None:
        self._formats = formats
        super().__init__(cpu, pages)
        try:
            for other in self.fds[1:]:
                fcntl.ioctl(other, IOC_SET_OUTPUT, self.fds[0])
        except OSError:
            self.close()
            raise

    def open_events(self) -> int:
        """See CpuEvents."""
        for each in self._formats:
            attr = Attr(type=TYPE_TRACEPOINT, config=each.id, sample_period=1, wakeup_watermark=self.size // 2)
            attr.sample_type, attr.read_format = Sample.TID | Sample.TIME | Sample.CPU | Sample.RAW, READ_TIME_ENABLED
            attr.flags, attr.clockid = Flag.WATERMARK | Flag.USE_CLOCKID, CLOCK_MONOTONIC
            self.open(attr)
        return self.fds[0]


class JobBuffers(BuffersOfCpus):
    """The buffers of all CPUs. A half-full one wakes the reader."""

    def __init__(self, formats: Sequence[JobFormat], pages: int = BUFFER_PAGES) -> None:
        """Opens them; `formats` are those of the tracepoints, `pages` is the size of each CPU's, a power of two."""
        self._formats, self._pages = formats, pages
        super().__init__()

    def events_of(self, cpu: int) -> CpuEvents:
        """See BuffersOfCpus."""
        return _CpuJobs(cpu, self._formats, self._pages)
