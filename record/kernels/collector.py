"""The debug-ELF collector: takes the files that `compile_kernel` probes name, each distinct content once.

A child process (collector_child.py) opens them. This side hands it one path at a time, never waits for it, and
replaces it when it takes too long. Users take turns, so that no user waits for all files of another. For every file
that is not taken, a reason is reported.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from collections import Counter, deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.accounts import ACCOUNTS, Places
from iaprof.sandbox.worker import Worker

TIMEOUT_NS = 2_000_000_000
MOST_COUNTED_NS = 500_000_000  # of the time between two reads: if the recorder stood still, perhaps the child did, too
MAX_WAITING = 8192
MAX_WAITING_OF_ONE_USER = 4096  # see bpf.accounts for what one user is
MAX_HANGS_OF_ONE_USER = 8  # a file system in user space can keep even a killed child, and its memory, forever
_LAST_WAIT_S = 0.2  # for killed children to end, when the recording ends
MAX_TOTAL_BYTES = 4 << 30  # of distinct contents in one output file


class Compiled(NamedTuple):
    """A module that a process compiled."""

    time_ns: int
    pid: int
    uid: int
    gid: int
    path: bytes
    account: str  # which answers for the process


class TakenElf(NamedTuple):
    """A debug ELF. `content` is None if the same content came before."""

    compiled: Compiled
    digest: str
    size: int
    content: memoryview | None


class RefusedElf(NamedTuple):
    """A debug ELF that was not taken, and why."""

    compiled: Compiled
    reason: str


def start_child() -> Worker:
    """Starts collector_child.py."""
    return Worker("iaprof.record.kernels.collector_child:main", channel=socket.SOCK_SEQPACKET, bare=True)


class DebugElfCollector:
    """The child process, and the files that wait for it."""

    def __init__(self) -> None:
        """Starts the child."""
        self.cpu_seconds = 0.0  # of children that have ended
        self.own_folder = b""  # of the injected library: files there can be read after their process has ended
        self._waiting: dict[str, deque[Compiled]] = {}  # by account, in order
        self._places = Places(MAX_WAITING, MAX_WAITING_OF_ONE_USER)
        self._refused: deque[RefusedElf] = deque()  # without asking the child
        self._hangs: Counter[str] = Counter()  # by account
        self._killed: list[Worker] = []  # children that may not have ended yet
        self._current: Compiled | None = None
        self._waited_ns = self._read_ns = 0  # for the current one
        self._seen: set[str] = set()
        self._taken_bytes = 0
        self._start()

    def _start(self) -> None:
        self._child = start_child()
        self._child.channel.setblocking(False)  # recv_fds does not pass MSG_DONTWAIT on

    def fileno(self) -> int:
        """Returns a descriptor that is readable when an answer has come. It changes when the child is replaced."""
        return self._child.channel.fileno()

    @property
    def idle(self) -> bool:
        """Whether all files are answered."""
        return self._current is None and not self._waiting and not self._refused

    def request(self, records: NDArray[np.void]) -> int:
        """Queues the files of compiled modules.

        Args:
            records: COMPILED[n].

        Returns:
            How many were rejected for lack of room.
        """
        full = 0
        for record in records:  # a process has few of them
            pid, uid = int(record["pid"]), int(record["uid"])
            compiled = Compiled(
                int(record["time"]),
                pid,
                uid,
                int(record["gid"]),
                bytes(record["path"]).split(b"\0", 1)[0],  # after it is what the ring buffer held before
                ACCOUNTS.of_process(pid, uid),
            )
            if self._places.refusal(compiled.account):
                full += 1
                continue
            self._places.take(compiled.account)
            if self._hangs[compiled.account] >= MAX_HANGS_OF_ONE_USER:
                self._refused.append(RefusedElf(compiled, "other files of its user took too long"))
            else:
                self._waiting.setdefault(compiled.account, deque()).append(compiled)
        self._send_next()
        return full

    def _send_next(self) -> None:
        if self._current is not None or not self._waiting:
            return
        account = next(iter(self._waiting))
        queue = self._waiting.pop(account)
        self._current = queue.popleft()
        self._places.give_back(account)
        if queue:
            self._waiting[account] = queue  # after the other users
        self._waited_ns, self._read_ns = 0, time.monotonic_ns()
        request = {
            "pid": self._current.pid,
            "uid": self._current.uid,
            "gid": self._current.gid,
            "path": self._current.path.hex(),
            "ours": os.path.dirname(self._current.path) == self.own_folder,
        }
        with contextlib.suppress(OSError):  # `read` notices a dead child
            self._child.send(request)

    def read(self) -> TakenElf | RefusedElf | None:
        """Returns the answer to one file, or None if none has come; to be called until it returns None."""
        if self._refused:
            refused = self._refused.popleft()
            self._places.give_back(refused.compiled.account)
            return refused
        if self._current is None:
            return None
        try:
            answer, fds = self._child.receive()
        except BlockingIOError:
            now = time.monotonic_ns()
            self._waited_ns += min(now - self._read_ns, MOST_COUNTED_NS)
            self._read_ns = now
            if self._waited_ns < TIMEOUT_NS:
                return None
            return self._replace("reading it took too long")
        except OSError:
            return self._replace("the process that reads it died")
        compiled, self._current = self._current, None
        try:
            return self._answer(compiled, answer, fds)
        finally:
            for fd in fds:
                os.close(fd)
            self._send_next()

    def _answer(self, compiled: Compiled, answer: dict[str, Any], fds: list[int]) -> TakenElf | RefusedElf:
        if "refused" in answer or not fds:
            return RefusedElf(compiled, str(answer.get("refused", "it could not be read")))
        digest, size = str(answer["digest"]), int(answer["size"])
        if digest in self._seen:
            return TakenElf(compiled, digest, size, None)
        if self._taken_bytes + size > MAX_TOTAL_BYTES:
            return RefusedElf(compiled, f"{MAX_TOTAL_BYTES >> 30} GiB of debug ELFs were taken already")
        content = memoryview(mmap.mmap(fds[0], size, prot=mmap.PROT_READ))  # it goes to the spool without a copy
        self._seen.add(digest)
        self._taken_bytes += size
        return TakenElf(compiled, digest, size, content)

    def _replace(self, reason: str) -> RefusedElf:
        assert self._current is not None
        compiled, self._current = self._current, None
        child = self._child
        self._start()  # while the old channel is open: the new descriptor must be another number
        self._kill(child)
        self._hangs[compiled.account] += 1
        if self._hangs[compiled.account] == MAX_HANGS_OF_ONE_USER:
            others = self._waiting.pop(compiled.account, ())
            self._refused += [RefusedElf(other, "other files of its user took too long") for other in others]
        self._send_next()
        return RefusedElf(compiled, reason)

    def _kill(self, child: Worker) -> None:
        child.close(0)
        self._killed.append(child)
        self._forget_ended()

    def _forget_ended(self) -> None:
        """Forgets killed children that have ended; does not wait."""
        self.cpu_seconds += sum(child.cpu_seconds for child in self._killed if child.has_ended())
        self._killed = [child for child in self._killed if child.status is None]

    def forget_contents(self) -> None:
        """Makes contents be handed out again: they go into another output file."""
        self._seen.clear()
        self._taken_bytes = 0

    def close(self) -> list[RefusedElf]:
        """Ends the child.

        Returns:
            The files that were not answered.
        """
        unanswered = [self._current] if self._current else []
        unanswered += [compiled for queue in self._waiting.values() for compiled in queue]
        refused = [*self._refused, *(RefusedElf(compiled, "the recording ended first") for compiled in unanswered)]
        self._current = None
        self._waiting.clear()
        self._refused.clear()
        self._kill(self._child)
        deadline = time.monotonic() + _LAST_WAIT_S
        while self._killed and time.monotonic() < deadline:
            time.sleep(0.001)
            self._forget_ended()
        return refused
