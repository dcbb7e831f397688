"""Asks file systems that may not answer for a file, before the recorder opens one there.

A network file system whose server is gone keeps whoever opens or reads a file waiting, perhaps forever, although root
mounted it. So a child opens the file first, and has a limited time. A file system that has just answered is not asked
again, so if it stops in that moment the recorder does wait.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time

from iaprof.basics.mounts import ROOTS_MOUNTS
from iaprof.sandbox.worker import Closing, Worker

PATIENCE_S = 2.0  # for an answer
ASK_AGAIN_S = 1.0  # after an answer
REST_S = 60.0  # after none
_LAST_WAIT_S = 0.2  # for a killed child to end: the file system may keep it
_MOST_DEVICES = 1 << 12  # that are remembered


class Answering(Closing):
    """Knows which file systems answer; also a context manager. The child starts when it is needed."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        """Asks nothing yet."""
        self._patience_s = patience_s
        self._child: Worker | None = None
        self._until: dict[int, tuple[bool, float]] = {}  # by device: whether it answers, and until when that counts

    def answers(self, device: int, path: str) -> bool:
        """Tells whether opening and reading a file will not wait forever.

        Args:
            device: of its file system: major number << 32 | minor number.
            path: of the file.
        """
        if not ROOTS_MOUNTS.may_wait(device):
            return True
        known, until = self._until.get(device, (False, 0.0))
        if time.monotonic() < until:
            return known
        answers = self._ask(path)
        if len(self._until) >= _MOST_DEVICES:
            self._until.clear()
        self._until[device] = answers, time.monotonic() + (ASK_AGAIN_S if answers else REST_S)
        return answers

    def _ask(self, path: str) -> bool:
        try:
            if self._child is None or self._child.has_ended():
                self.close()
                self._child = Worker("iaprof.sandbox.answering:main", channel=socket.SOCK_SEQPACKET, bare=True)
            channel = self._child.channel
            channel.send(os.fsencode(path))
            if self._child.within(self._patience_s, lambda: channel.recv(1)):
                return True
        except OSError:
            pass
        self.close()  # it does not answer, or ends: its channel is closed before it can be waited for
        return False

    def close(self) -> None:
        """Ends the child; the next question starts another one."""
        if self._child is not None:
            self._child.close(_LAST_WAIT_S)
            self._child = None


def main() -> None:
    """Runs in the child: does with each file what the recorder will do, and says so."""
    channel = socket.socket(fileno=0)
    while path := channel.recv(4096):
        with contextlib.suppress(OSError):  # which is an answer
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                os.fstatvfs(file)  # what else is asked may be answered from memory
                os.pread(file, 4096, 0)
            finally:
                os.close(file)
        channel.send(b"a")


ANSWERING = Answering()
atexit.register(ANSWERING.close)
