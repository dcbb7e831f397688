"""The recorder's side of the learner: starts it, takes what it sends, and starts another when it died."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

from iaprof.bpf.launches import LaunchProbes
from iaprof.record.own_cost import ended_cpu_seconds

MOST_STARTS = 4
READY, SYNC = b"r", b"s"  # see learner.py, which is not imported here: it takes memory
READY_S = 5.0
SYNC_S = 5.0
LAST_WAIT_S = 3.0  # for what is left, when the recording ends
_MOST_MESSAGES = 1000  # that are taken at once
_LONGEST = 1 << 16
_LOOK = struct.Struct("<I")
_SO_SNDBUFFORCE, _CHANNEL_BYTES = 32, 8 << 20  # asm-generic/socket.h
_DYING_S = 0.2
_TICKS = os.sysconf("SC_CLK_TCK")
_START = "import sys; sys.path[:] = sys.argv[2:]; from iaprof.record.unwinding.learner import main; main(sys.argv[1])"
_DESCRIPTORS = ("copies", "rules", "spaces", "loads", "ways", "pythons")


class Learning:
    """The process."""

    def __init__(self, probes: LaunchProbes) -> None:
        """Starts it.

        Args:
            probes: whose stacks it finishes; they are closed after it.

        Raises:
            OSError: it cannot be started.
        """
        self._maps = {name: probes.maps[name] for name in _DESCRIPTORS}
        self._numbers = {
            "copies_bytes": probes.sizes.copied_pages * mmap.PAGESIZE,
            "bits": probes.sizes.rule_bits,
            "depth": probes.depth,
        }
        self._starts = 0
        self._ended_cpu_s = 0.0  # of processes that ended
        self.is_ready = False  # to finish stacks
        self._asked_s: float | None = None  # when, if there was no answer yet
        self._was_asked = False
        self._channel: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Copies that it gives back are many, and the recorder may be busy; so may be processes to look into.
            for end in (ours, theirs):
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _CHANNEL_BYTES)
            settings = {**self._maps, **self._numbers, "starts": self._starts, "channel": theirs.fileno()}
            paths = [path for path in sys.path if os.path.isabs(path)]
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, json.dumps(settings), *paths],
                pass_fds=[theirs.fileno(), *self._maps.values()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env={"OPENBLAS_NUM_THREADS": "1"},
            )
        ours.setblocking(False)
        self._channel, self._starts = ours, self._starts + 1

    def fileno(self) -> int:
        """Readable when something came; -1 when no process is there any more."""
        return self._channel.fileno() if self._channel is not None else -1

    def read(self) -> Iterator[bytes]:
        """What it sent: each a record of stack_dtype, or of COPY for a stack that the recording's end may finish."""
        for _ in range(_MOST_MESSAGES):
            if self._channel is None:
                return
            try:
                message = self._channel.recv(_LONGEST)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._died()
                return
            if message == SYNC:
                self._asked_s = None
            elif message != READY:
                yield message
            self.is_ready = True

    def wait(self) -> list[bytes]:
        """Waits until it is ready, but no longer than READY_S; gives what it sent by then."""
        sent: list[bytes] = []
        deadline = time.monotonic() + READY_S
        while not self.is_ready and self._channel is not None and (left := deadline - time.monotonic()) > 0:
            select.select([self._channel], [], [], left)
            sent += self.read()
        return sent

    def look_for_python(self, pid: int) -> None:
        """Has it look for an interpreter in a process."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(_LOOK.pack(pid))

    def has_finished(self) -> bool:
        """Whether all stacks are finished that were copied when this was asked first; true, too, after SYNC_S."""
        if self._asked_s is None and not self._was_asked and self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(SYNC)
                self._asked_s = time.monotonic()
                self._was_asked = True
        if self._asked_s is not None and time.monotonic() < self._asked_s + SYNC_S and self._channel is not None:
            return False
        self._asked_s, self._was_asked = None, False
        return True

    def _died(self) -> None:
        self._end()
        if self._starts < MOST_STARTS:
            with contextlib.suppress(OSError):
                self._start()

    def _end(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._child is not None:
            used = self._used(self._child)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGKILL)  # Popen.kill would wait for it and forget what it took
            self._ended_cpu_s += max(used, self._reap(self._child))
            self._child = None

    @staticmethod
    def _reap(child: subprocess.Popen[bytes]) -> float:
        """CPU time of a process that was killed; 0 if it does not end in time."""
        deadline = time.monotonic() + _DYING_S
        while (used := ended_cpu_seconds(child)) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return used or 0.0

    @staticmethod
    def _used(child: subprocess.Popen[bytes]) -> float:
        """CPU time of a process, and of its own children that have ended, so far."""
        with open(f"/proc/{child.pid}/stat", "rb") as file:
            stat = file.read()
        return sum(map(int, stat[stat.rindex(b")") + 2 :].split()[11:15])) / _TICKS

    @property
    def cpu_seconds(self) -> float:
        """CPU time of it, and of its own children that have ended, so far."""
        return self._ended_cpu_s + (self._used(self._child) if self._child is not None else 0.0)

    def finish(self) -> list[bytes]:
        """Ends it when it has finished what is left, or after LAST_WAIT_S; gives that."""
        left: list[bytes] = []
        if self._channel is None:
            return left
        self._channel.shutdown(socket.SHUT_WR)
        self._starts = MOST_STARTS  # its end is no death
        deadline = time.monotonic() + LAST_WAIT_S
        while self._channel is not None and (wait := deadline - time.monotonic()) > 0:
            select.select([self._channel], [], [], wait)
            left += self.read()
        self._end()
        return left

    def close(self) -> None:
        """Ends it at once."""
        self._end()
