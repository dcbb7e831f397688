"""CPU time that processes have used, from `/proc/PID/stat`."""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from iaprof.formats.capture.metrics import describe_processes

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
