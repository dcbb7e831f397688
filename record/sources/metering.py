"""The source of metrics, which are read at intervals while stalls are sampled."""

from __future__ import annotations

import time
from typing import Any

from iaprof.record.budget import Level
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.sources.metrics import Metrics
from iaprof.record.sources.sampler import Sampler
from iaprof.record.sources.source import Source
from iaprof.record.spool import FrameKind


class Metering(Source):
    """The metrics of the GPUs whose stalls are recorded, and of the processes that use them."""

    def __init__(self, sampler: Sampler, interval_ns: int) -> None:
        """Takes the source of samples, whose GTs it measures, and the time between two metrics; 0 for no metrics."""
        self._sampler, self._interval_ns, self._interval_now_ns = sampler, interval_ns, interval_ns
        self._metrics: Metrics | None = None
        self._paused = True

    def header(self) -> dict[str, Any]:
        """See Source."""
        return {"metric_interval_ns": self._interval_ns}

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source."""
        self._journal = journal
        if self._interval_ns:
            self._metrics = Metrics(self._sampler.gts())
            self._sampler.on_new_gt = self._metrics.add
            for problem in self._metrics.problems:
                journal.inform(problem)
            self._loop = loop
            self._beat(time.monotonic_ns() + self._interval_ns)

    def watch(self, pid: int) -> None:
        """Measures the CPU use of a process, too."""
        if self._metrics is not None:
            self._metrics.watch([pid])

    def resume(self) -> None:
        """See Source."""
        self._paused = False

    def pause(self) -> None:
        """See Source."""
        self._paused = True

    def thin(self, level: Level) -> None:
        """See Source; metrics that are rarer have their next sample at the time at which it was due."""
        self._interval_now_ns = level.metric_interval_ns or self._interval_now_ns

    def _beat(self, due: int) -> None:
        """Samples at `due`, and again and again after the interval; those that have passed meanwhile are skipped."""

        def sample() -> None:
            if self._metrics is not None and not self._paused:
                self._metrics.sample()
            self._beat(max(due + self._interval_now_ns, time.monotonic_ns()))

        self._loop.at(due, sample)

    def read(self) -> None:
        """See Source."""
        if self._metrics is not None:
            for meta, rows in self._metrics.take():
                self._journal.write(FrameKind.METRICS, meta, rows, time=time.monotonic_ns(), part=len(meta))

    def finish(self) -> None:
        """See Source."""
        self.read()

    def close(self) -> None:
        """Closes all metrics."""
        if self._metrics is not None:
            self._metrics.close()
