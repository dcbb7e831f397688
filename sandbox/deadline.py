"""Time limits for a process that stand still while other programs keep it from running.

A file must not seem hostile because the machine is busy: a child with a low priority may wait seconds for a CPU.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

MOST_WAITING_S = 120.0  # that a process may wait for a CPU before one deadline
_LOOK_S = 0.25  # between two looks at a process that waits for a CPU
_LONGEST = 100  # bytes of /proc/PID/schedstat

_total_lock = threading.Lock()
_total_s = 0.0
_counted_until = 0.0  # time.monotonic(); what passed before is in the total, or never will be


def patient_clock() -> float:
    """Returns time.monotonic() without the time in which processes with a deadline waited for a CPU, seconds."""
    return time.monotonic() - _total_s


class CpuWaits:
    """How long a process ran, and waited for a CPU (Documentation/scheduler/sched-stats.rst of the kernel)."""

    def __init__(self, pid: int) -> None:
        """Args: the process. Where the kernel does not tell, it never ran or waited."""
        self._stat = Path(f"/proc/{pid}/stat")
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open(f"/proc/{pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def seconds(self) -> tuple[float, float]:
        """Returns the CPU time, and the time of all waits for a CPU that are over; 0, 0 if the process has ended."""
        if self._file is None:
            return 0.0, 0.0
        try:
            ran, waited, *_ = os.pread(self._file, _LONGEST, 0).split()
            return int(ran) / 1e9, int(waited) / 1e9
        except (OSError, ValueError):
            return 0.0, 0.0

    def is_runnable(self) -> bool:
        """Tells whether the process runs or waits for a CPU, rather than for anything else."""
        try:
            return self._stat.read_text().rpartition(") ")[2].startswith("R")
        except OSError:
            return False


class Deadline:
    """A time limit, from now on."""

    def __init__(self, waits: CpuWaits, seconds: float) -> None:
        """Args: of the process that something is expected of; the limit."""
        self._waits, (self._ran, self._waited) = waits, waits.seconds()
        self._begun, self._seconds = time.monotonic(), seconds
        self._credit_s = 0.0  # for waits
        self._ran_at_look_s: float | None = None  # the process's CPU time when it seemed to wait
        self._is_over = False

    def left(self) -> float:
        """Returns for how long to wait before asking again, seconds.

        Raises:
            TimeoutError: the time is over.
        """
        elapsed = time.monotonic() - self._begun
        left = self._seconds - elapsed
        if left <= 0:
            ran = self._look()
            left += self._credit_s
            if left > 0:
                self._ran_at_look_s = None  # what it waited is counted now
            elif ran < self._seconds and elapsed < self._seconds + MOST_WAITING_S:
                left = self._left_to_wait(ran)
        if left <= 0:
            raise TimeoutError
        return left

    def over(self) -> None:
        """Takes the waits from `patient_clock`, once: what was expected has come, or is given up."""
        global _total_s, _counted_until
        if self._is_over:
            return
        self._is_over = True
        self._look()
        with _total_lock:
            now = time.monotonic()
            _total_s += min(self._credit_s, max(now - max(self._begun, _counted_until), 0.0))
            _counted_until = now

    def _left_to_wait(self, ran: float) -> float:
        """Returns for how long to wait for a process whose wait for a CPU is not counted yet; 0 if it has none.

        One that has run since it seemed to wait has waited less than it seemed: its waits were counted when they ended.
        """
        if not self._waits.is_runnable() or (self._ran_at_look_s is not None and ran > self._ran_at_look_s):
            return 0.0
        self._ran_at_look_s = ran
        return min(_LOOK_S, self._seconds - ran)

    def _look(self) -> float:
        """Credits the process with its waits; returns its CPU time since the beginning."""
        ran, waited = self._waits.seconds()
        ran, waited = max(ran - self._ran, 0.0), max(waited - self._waited, self._credit_s)
        # A wait that began before the time limit did is counted whole when it ends.
        self._credit_s = min(waited, max(time.monotonic() - self._begun - ran, 0.0), MOST_WAITING_S)
        return ran
