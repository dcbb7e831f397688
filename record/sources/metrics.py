"""Metrics of GPUs and of recorded processes: raw numbers, from which formats/capture/metric_values.py makes values.

They are read at intervals while stalls are sampled. Cards and kernels differ in what can be measured; what cannot is
reported once and left out. What there is of each vendor: xe_metrics.py, i915_metrics.py, nvml.py.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from iaprof.formats.capture.metrics import describe, describe_processes
from iaprof.record.budget import Level
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.sources.metered import Measured, Metered
from iaprof.record.sources.source import Sampler, Source
from iaprof.record.spool import FrameKind


class Metering(Source):
    """The metrics of the GPUs whose stalls are recorded, and of the processes that use them."""

    def __init__(self, sampler: Sampler, interval_ns: int) -> None:
        """Takes the source of samples, whose GPUs it measures, and the time between two metrics; 0 for no metrics."""
        self._sampler, self._interval_ns, self._interval_now_ns = sampler, interval_ns, interval_ns
        self._metrics: Metrics | None = None
        self._paused = True
        self._known = self._told = 0  # of what is metered, and of problems
        if interval_ns:
            sampler.open_metrics()

    def header(self) -> dict[str, Any]:
        """See Source."""
        return {"metric_interval_ns": self._interval_ns}

    def start(self, journal: Journal, loop: Loop) -> None:
        """See Source."""
        self._journal = journal
        if self._interval_ns:
            metered = self._sampler.metered()
            self._metrics, self._known = Metrics(metered), len(metered)
            self._tell(self._metrics)
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
        """Samples at `due`, and again and again after the interval; those that have passed meanwhile are skipped.

        So are those in which nothing is due, as all numbers have longer periods.
        """

        def sample() -> None:
            following = 0
            if self._metrics is not None and not self._paused:
                metered = self._sampler.metered()
                for new in metered[self._known :]:
                    self._metrics.add(new)
                self._known = len(metered)
                self._metrics.sample()
                self._tell(self._metrics)
                following = min(self._metrics.due, time.monotonic_ns() + LOOK_NS)
            self._beat(max(due + self._interval_now_ns, following, time.monotonic_ns()))

        self._loop.at(due, sample)

    def _tell(self, metrics: Metrics) -> None:
        """Tells users who ask for details what is not measured, each once."""
        for problem in metrics.problems[self._told :]:
            self._journal.inform(problem)
        self._told = len(metrics.problems)

    def read(self) -> None:
        """See Source."""
        if self._metrics is not None:
            for meta, rows in self._metrics.take():
                self._journal.write(FrameKind.METRICS, meta, rows, time=time.monotonic_ns(), shape=len(meta))

    def finish(self) -> None:
        """See Source."""
        self.read()

    def close(self) -> None:
        """Closes all metrics."""
        if self._metrics is not None:
            self._metrics.close()


_NEVER = sys.maxsize
LOOK_NS = 100_000_000  # after which to look for new GPUs, when nothing is due earlier
PAUSE = 200
"""A GPU's numbers with a period are read more seldom if that takes long, at first or twice in a row: after so many
times as long."""


class Metrics:
    """All metrics."""

    def __init__(self, metered: Sequence[Metered]) -> None:
        """Opens what can be measured of these; nothing is measured before the first `sample`."""
        self.problems: list[str] = []  # sentences that say what is not measured; grows when a device vanishes
        self._cpu = CpuUse()
        self._counters: list[_Counters] = []
        for each in metered:
            self.add(each)

    def add(self, metered: Metered) -> None:
        """Measures one more, and its card if it is the first one of this card."""
        first = all(counters.card != metered.card for counters in self._counters)
        for each in metered.open(first):
            if not isinstance(each, Measured):
                if each.why not in self.problems:
                    self.problems.append(each.why)
            elif each.metrics:
                self._counters.append(_Counters(metered, each))
            else:
                each.numbers.close()

    def watch(self, pids: Iterable[int]) -> None:
        """Measures the CPU use of these processes, too; of many processes, of those named last."""
        self._cpu.watch(pids, time.monotonic_ns())

    @property
    def due(self) -> int:
        """When the next numbers are due, CLOCK_MONOTONIC ns."""
        return min(source.due for source in self._sources())

    def sample(self) -> None:
        """Reads what is due. Never raises: a device that has vanished is a problem."""
        for source in self._sources():
            now = time.monotonic_ns()
            if now >= source.due:
                try:
                    source.sample(now)
                except OSError as error:
                    self.problems.append(f"{source} cannot be measured any more: {error.strerror}")
                    source.close()
                    source.due = _NEVER
                else:
                    source.due = now + source.period_ns
                    if source.period_ns and isinstance(source, _Counters):
                        # After one that was quick, another program may have had the CPU meanwhile.
                        before, source.took_ns = source.took_ns, time.monotonic_ns() - now
                        source.due = max(source.due, now + PAUSE * min(before, source.took_ns))

    def take(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields what was read since the last call: descriptions and rows for formats.capture.metric_values.decode."""
        for source in self._sources():
            if rows := source.take():
                yield source.meta, rows
        self._counters = [counters for counters in self._counters if counters.due < _NEVER]

    def close(self) -> None:
        """Closes all metrics; `take` still returns the rest."""
        for source in self._sources():
            source.close()
            source.due = _NEVER

    def _sources(self) -> list[_Counters | CpuUse]:
        return [*self._counters, self._cpu]


class _Counters:
    """Numbers that are read together, and their rows."""

    def __init__(self, metered: Metered, measured: Measured) -> None:
        self.card = metered.card
        self.meta = describe(metered.stream, 1 + len(measured.numbers), measured.metrics)
        self.period_ns, self.due = measured.period_ns, 0
        self.took_ns = _NEVER  # to read them, the last time
        self._name = f"{metered.name}: {measured.what}"
        self._numbers = measured.numbers
        self._rows = bytearray()
        self._row = b""

    def __str__(self) -> str:
        return self._name

    def sample(self, now: int) -> None:
        self._row = now.to_bytes(8, "little") + self._numbers.read()
        self._rows += self._row

    def take(self) -> bytes:
        if len(self._rows) <= len(self._row):  # a rate needs two rows
            return b""
        rows, self._rows = bytes(self._rows), bytearray(self._row)
        return rows

    def close(self) -> None:
        self._numbers.close()


PROC = Path("/proc")
MAX_PROCESSES = 64  # reading one takes some 10 microseconds
_STAT_BYTES = 1024
_ROW = struct.Struct("<QQQQ")  # as formats.capture.metrics.describe_processes says
# proc_pid_stat(5), counted from `state`, the first field after the name, which may contain spaces and parentheses
_UTIME, _STIME, _START = 11, 12, 19


class CpuUse:
    """Samples the CPU time of the MAX_PROCESSES processes that were named last."""

    meta = describe_processes(os.sysconf("SC_CLK_TCK"))
    period_ns = 1_000_000_000

    def __init__(self) -> None:
        """Begins without processes."""
        self.due = 0
        # Descriptors, not paths: a descriptor still means its own process when another process gets the pid.
        self._fds: OrderedDict[int, int] = OrderedDict()
        self._last: dict[int, bytes] = {}
        self._rows = bytearray()
        self._has_new = False

    def watch(self, pids: Iterable[int], now: int) -> None:
        """Samples these processes too from now on.

        Args:
            pids: in the initial pid namespace; those that have ended are ignored.
            now: CLOCK_MONOTONIC ns.
        """
        for pid in pids:
            if pid in self._fds:
                if self._stat(pid):
                    self._fds.move_to_end(pid)
                    continue
                self._forget(pid)
            try:
                self._fds[pid] = os.open(PROC / str(pid) / "stat", os.O_RDONLY)
            except OSError:
                continue
            if len(self._fds) > MAX_PROCESSES:
                self._forget(next(iter(self._fds)))
            self._add_row(pid, now)

    def sample(self, now: int) -> None:
        """Adds a row for each living process whose last one is not fresh: the kernel counts time in coarse ticks."""
        for pid in list(self._fds):
            if now - int.from_bytes(self._last[pid][:8], "little") >= self.period_ns // 2:
                self._add_row(pid, now)
                self._has_new = True

    def take(self) -> bytes:
        """Returns the rows since the last call, after each process's last row before that; b"" if none is new."""
        if not self._has_new:
            return b""
        rows, self._rows, self._has_new = bytes(self._rows), bytearray(), False
        for row in self._last.values():
            self._rows += row
        return rows

    def _add_row(self, pid: int, now: int) -> None:
        stat = self._stat(pid)
        try:
            fields = stat[stat.rindex(b")") + 2 :].split()
            row = _ROW.pack(now, pid, int(fields[_START]), int(fields[_UTIME]) + int(fields[_STIME]))
        except (ValueError, IndexError):
            self._forget(pid)
            return
        self._last[pid] = row
        self._rows += row

    def _stat(self, pid: int) -> bytes:
        try:
            return os.pread(self._fds[pid], _STAT_BYTES, 0)
        except OSError:
            return b""

    def _forget(self, pid: int) -> None:
        os.close(self._fds.pop(pid))
        self._last.pop(pid, None)

    def close(self) -> None:
        """Closes all processes' files."""
        for pid in list(self._fds):
            self._forget(pid)
