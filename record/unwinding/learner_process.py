"""The recorder's side of the learner: starts it, reads its messages, and restarts it when it dies."""

from __future__ import annotations

import contextlib
import mmap
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from iaprof.basics.errors import IaprofError
from iaprof.sandbox.worker import Worker

if TYPE_CHECKING:  # NumPy takes as long to import as the learner to start, which it does meanwhile
    from iaprof.bpf.probes.launches import LaunchProbes

MOST_STARTS = 4
# See learner.py, which is not imported here: it takes memory.
READY, SYNC = b"r", b"s"
DROPPED_MARK, DROPPED = b"d", struct.Struct("<cI")
READY_S = 30.0  # for the learner's start, on a busy machine: it finishes no stack of a launch before
SYNC_S = 5.0
LAST_WAIT_S = 10.0  # for the rest, when the recording ends; the learner gives it back after ENDING_S
_MOST_MESSAGES = 1000  # read at once
_LONGEST = 1 << 16
_PREPARE_REQUEST = struct.Struct("<I?")
_CHANNEL_BYTES = 8 << 20
_DYING_S = 0.2
_NICE = -20  # while it waits for a CPU, BPF copies stacks that lack rules, or leaves them unfinished


class LearnerProcess:
    """The learner's process."""

    def __init__(self, sync_s: float = SYNC_S) -> None:
        """Starts the process, which imports its modules and starts its children; then it waits for `learn_from`.

        Args:
            sync_s: how long to wait for stacks that were copied before, in seconds.

        Raises:
            IaprofError: the process cannot be started.
        """
        self._probes: LaunchProbes | None = None
        self._sync_s = sync_s
        self._starts = 0
        self._ended_cpu_s = 0.0  # of learners that have ended
        self.is_ready = False  # to finish stacks
        self._asked_s: float | None = None  # time of the last SYNC; None if it was answered
        self._was_asked = False
        self._child: Worker | None = None
        try:
            self._start()
        except OSError as error:
            raise IaprofError(f"there is no room for the process that finishes stacks: {error.strerror}") from error

    def _start(self) -> None:
        self._child = Worker(
            "iaprof.record.unwinding.learner:main",
            channel=socket.SOCK_SEQPACKET,
            # It gives back many copies, and the recorder may be slow to read them; also requests to search processes
            # queue up.
            queue_bytes=_CHANNEL_BYTES,
            errors=None,
            nice=_NICE,
        )
        self._child.channel.setblocking(False)
        self._starts += 1
        if self._probes is not None:
            self.learn_from(self._probes)

    def learn_from(self, probes: LaunchProbes) -> None:
        """Has the process finish stacks.

        Args:
            probes: the source of unfinished stacks; they must be closed after the learner.
        """
        from iaprof.bpf.rule_table import Spaces

        self._probes = probes
        names = "copies", "rules", *Spaces.MAPS
        settings = {
            "maps": names,
            "copies_bytes": probes.sizes.copied_pages * mmap.PAGESIZE,
            "bits": probes.sizes.rule_bits,
            "depth": probes.depth,
            "starts": self._starts - 1,
        }
        if self._child is not None:
            with contextlib.suppress(OSError):  # it has died, which the next read sees
                self._child.send(settings, [probes.maps[name] for name in names])

    def fileno(self) -> int:
        """Returns a descriptor that is readable when a message has come; -1 when no learner is running any more."""
        return self._child.channel.fileno() if self._child is not None else -1

    def read(self) -> Iterator[bytes]:
        """Yields messages: finished stacks, copies for the recording's end to finish, interpreters: see learner.py."""
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
        """Waits until the learner is ready, at most READY_S; returns the messages that came."""
        sent: list[bytes] = []
        deadline = time.monotonic() + READY_S
        while not self.is_ready and self._child is not None and (left := deadline - time.monotonic()) > 0:
            select.select([self._child.channel], [], [], left)
            sent += self.read()
        return sent

    def prepare(self, pid: int, will_launch: bool) -> None:
        """Has the learner search a process for an interpreter, and open all its files if it will launch."""
        if self._child is not None:
            with contextlib.suppress(OSError):
                self._child.channel.send(_PREPARE_REQUEST.pack(pid, will_launch))

    def has_finished(self) -> bool:
        """Asks, at the first call, whether all stacks copied so far are finished; true if so, and after sync_s."""
        if self._asked_s is None and not self._was_asked and self._child is not None:
            with contextlib.suppress(OSError):
                self._child.channel.send(SYNC)
                self._asked_s = time.monotonic()
                self._was_asked = True
        if self._asked_s is not None and time.monotonic() < self._asked_s + self._sync_s and self._child is not None:
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
        """CPU time so far of the learner and of its children that have ended."""
        return self._ended_cpu_s + (self._child.cpu_seconds_so_far() if self._child is not None else 0.0)

    def finish(self) -> list[bytes]:
        """Ends the learner when it has finished the rest, or after LAST_WAIT_S; returns its last messages."""
        messages: list[bytes] = []
        if self._child is None:
            return messages
        self._child.channel.shutdown(socket.SHUT_WR)
        self._starts = MOST_STARTS  # it is not restarted now
        deadline = time.monotonic() + LAST_WAIT_S
        while self._child is not None and (wait := deadline - time.monotonic()) > 0:
            select.select([self._child.channel], [], [], wait)
            messages += self.read()
        self._end()
        return messages

    def close(self) -> None:
        """Ends the learner at once."""
        self._end()
