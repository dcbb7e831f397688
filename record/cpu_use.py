"""How much CPU time processes used, as `/proc/PID/stat` tells."""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from iaprof.formats.capture.metrics import describe_processes

PROC = Path("/proc")
MAX_PROCESSES = 64  # a look at each takes some 10 microseconds
_STAT_BYTES = 1024
_ROW = struct.Struct("<QQQQ")  # as formats.metrics.describe_processes has it
# proc_pid_stat(5), counted from `state`, the first behind the name, which may hold anything
_UTIME, _STIME, _START = 11, 12, 19


class CpuUse:
    """Processes whose CPU time is looked at, the ones most recently named."""

    meta = describe_processes(os.sysconf("SC_CLK_TCK"))
    period_ns = 1_000_000_000

    def __init__(self) -> None:
        """Begins with none."""
        self.due = 0
        # Descriptors, not paths: one stays that of its process when another one gets the pid.
        self._fds: OrderedDict[int, int] = OrderedDict()
        self._last: dict[int, bytes] = {}
        self._rows = bytearray()
        self._new = False

    def watch(self, pids: Iterable[int], now: int) -> None:
        """Looks at these too from now on.

        Args:
            pids: in the initial pid namespace. Who is no more is passed over.
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
            self._look(pid, now)

    def sample(self, now: int) -> None:
        """Adds a row of each process that still is, but of none just looked at: the kernel counts in coarse ticks."""
        for pid in list(self._fds):
            if now - int.from_bytes(self._last[pid][:8], "little") >= self.period_ns // 2:
                self._look(pid, now)
                self._new = True

    def take(self) -> bytes:
        """The rows since the last call, each process's last one of before first."""
        if not self._new:
            return b""
        rows, self._rows, self._new = bytes(self._rows), bytearray(), False
        for row in self._last.values():
            self._rows += row
        return rows

    def _look(self, pid: int, now: int) -> None:
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
        """Looks at none any more."""
        for pid in list(self._fds):
            self._forget(pid)
