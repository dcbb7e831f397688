"""The recorder's side of the learner: starts it, takes what it sends, and starts another when it died."""

from __future__ import annotations

import contextlib
import json
import mmap
import select
import socket
import struct
import time
from collections.abc import Iterator

from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.sandbox.worker import ONE_THREAD, Worker

MOST_STARTS = 4
READY, SYNC = b"r", b"s"  # see learner.py, which is not imported here: it takes memory
READY_S = 30.0  # for its start, on a busy machine: before, no stack of a launch would be finished
SYNC_S = 5.0
LAST_WAIT_S = 10.0  # for what is left, when the recording ends; the learner gives the rest back after ENDING_S
_MOST_MESSAGES = 1000  # that are taken at once
_LONGEST = 1 << 16
_LOOK = struct.Struct("<I")
_CHANNEL_BYTES = 8 << 20
_DYING_S = 0.2
_NICE = -5  # a launch of an unknown path is copied until it is known: who makes it known goes first
_DESCRIPTORS = ("copies", "rules", "spaces", "loads", "missed_paths", "pythons")


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
        self._child: Worker | None = None
        self._start()

    def _start(self) -> None:
        settings = {**self._maps, **self._numbers, "starts": self._starts}
        self._child = Worker(
            "iaprof.record.unwinding.learner:main",
            json.dumps(settings),
            channel=socket.SOCK_SEQPACKET,
            # Copies that it gives back are many, and the recorder may be busy; so may be processes to look into.
            queue_bytes=_CHANNEL_BYTES,
            files=list(self._maps.values()),
            environment=ONE_THREAD,
            errors=None,
            nice=_NICE,
        )
        self._child.channel.setblocking(False)
        self._starts += 1

    def fileno(self) -> int:
        """Readable when something came; -1 when no process is there any more."""
        return self._child.channel.fileno() if self._child is not None else -1

    def read(self) -> Iterator[bytes]:
        """What it sent: each a record of stack_dtype, or of COPY for a stack that the recording's end may finish."""
        for _ in range(_MOST_MESSAGES):
            if self._child is None:
                return
            try:
                message = self._child.channel.recv(_LONGEST)
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
        while not self.is_ready and self._child is not None and (left := deadline - time.monotonic()) > 0:
            select.select([self._child.channel], [], [], left)
            sent += self.read()
        return sent

    def look_for_python(self, pid: int) -> None:
        """Has it look for an interpreter in a process."""
        if self._child is not None:
            with contextlib.suppress(OSError):
                self._child.channel.send(_LOOK.pack(pid))

    def has_finished(self) -> bool:
        """Whether all stacks are finished that were copied when this was asked first; true, too, after SYNC_S."""
        if self._asked_s is None and not self._was_asked and self._child is not None:
            with contextlib.suppress(OSError):
                self._child.channel.send(SYNC)
                self._asked_s = time.monotonic()
                self._was_asked = True
        if self._asked_s is not None and time.monotonic() < self._asked_s + SYNC_S and self._child is not None:
            return False
        self._asked_s, self._was_asked = None, False
        return True

    def _died(self) -> None:
        self._end()
        if self._starts < MOST_STARTS:
            with contextlib.suppress(OSError):
                self._start()

    def _end(self) -> None:
        if self._child is not None:
            used = self._child.cpu_seconds_so_far()
            self._child.close(_DYING_S)
            self._ended_cpu_s += max(used, self._child.cpu_seconds)
            self._child = None

    @property
    def cpu_seconds(self) -> float:
        """CPU time of it, and of its own children that have ended, so far."""
        return self._ended_cpu_s + (self._child.cpu_seconds_so_far() if self._child is not None else 0.0)

    def finish(self) -> list[bytes]:
        """Ends it when it has finished what is left, or after LAST_WAIT_S; gives that."""
        left: list[bytes] = []
        if self._child is None:
            return left
        self._child.channel.shutdown(socket.SHUT_WR)
        self._starts = MOST_STARTS  # its end is no death
        deadline = time.monotonic() + LAST_WAIT_S
        while self._child is not None and (wait := deadline - time.monotonic()) > 0:
            select.select([self._child.channel], [], [], wait)
            left += self.read()
        self._end()
        return left

    def close(self) -> None:
        """Ends it at once."""
        self._end()
