"""The source of GPU jobs: when each process had work on a GPU, by the tracepoints of the kernel's GPU scheduler."""

from __future__ import annotations

import time

from iaprof.bpf.gpu_jobs import JobBuffers, job_formats
from iaprof.formats.header.gpu_jobs import SOURCE
from iaprof.formats.wire.gpu_jobs import formats_to_json
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.sources.new_cpus import NewCpus
from iaprof.record.sources.source import Source
from iaprof.record.spool import FrameKind


class GpuJobs(Source):
    """The tracepoints on all CPUs; none where no driver with this scheduler is loaded."""

    def __init__(self, wanted: bool = True) -> None:
        """Opens the buffers, if the kernel has the tracepoints. Without them, less is known of who ran when.

        Args:
            wanted: whether the GPUs whose samples are recorded can have such a driver.
        """
        self._buffers: JobBuffers | None = None
        self._problem = ""
        self._has_finished = False
        formats = job_formats() if wanted else []
        self._meta = formats_to_json(formats)
        if formats:
            try:
                self._buffers = JobBuffers(formats)
            except OSError as error:
                self._problem = f"the jobs on GPUs cannot be watched (perf_event_open: {error.strerror})"
            else:
                self._new_cpus = NewCpus(self._buffers, SOURCE, "the jobs that it queued and ended")

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source."""
        self._journal = journal
        if self._problem:
            now = time.monotonic_ns()
            journal.loss(SOURCE, "not recorded", None, self._problem, now, now)
            journal.warn(self._problem)
        if self._buffers is not None:
            loop.wait_for(self._buffers.fileno(), self.read)

    def read(self) -> None:
        """See Source: empties the buffers."""
        if self._buffers is not None:
            for cpu, data in self._buffers.read():
                now = time.monotonic_ns()
                self._journal.write(FrameKind.GPU_JOBS, self._meta, data, time=now, source=cpu, shape=len(self._meta))

    def losses(self) -> None:
        """See Source: what happened on a CPU that came online, before its buffer was opened."""
        if self._buffers is not None and not self._has_finished:
            self._new_cpus.look(self._journal)

    def finish(self) -> None:
        """See Source."""
        self._has_finished = True
        if self._buffers is not None:
            self._buffers.stop()
            self.read()

    def close(self) -> None:
        """Gives the buffers back."""
        if self._buffers is not None:
            self._buffers.close()
