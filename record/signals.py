"""Signals while recording: the first ends it in good order, a second one ends the process.

SIGINT, SIGTERM and SIGHUP (the terminal was closed) are taken from the first moment to the last, so that none of them
is met by a traceback or leaves a file behind: whoever has a natural place to stop looks at `count` there, and a loop
waits on `fileno`. SIGUSR2 asks for a new output file. SIGCHLD only wakes. What is meant for a command is noted for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Self

from iaprof.basics.errors import IaprofError

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FOR_COMMANDS = (signal.SIGUSR1, signal.SIGQUIT, signal.SIGCONT)
_BY_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)  # which send them to all that run in front


class Interrupted(IaprofError):
    """A signal came before anything was recorded."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted before the recording began: nothing was recorded")
        self.exit_code = 128 + number


class StopSignals:
    """Takes the signals from `with` on, until its end."""

    def __init__(self) -> None:
        self.count = 0
        self.rotate = False  # SIGUSR2 came; whoever acts on it makes this False
        self.farewell: Callable[[], str] = lambda: "iaprof: stopped at once\n"  # printed when a second one comes
        self.instead: Callable[[], None] | None = None  # is done once in place of what a signal would do
        self._number = 0
        self._forward: list[int] = []
        self._previous: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        self._ours, self._pythons = socket.socketpair()
        self._ours.setblocking(False)
        self._pythons.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._pythons.fileno(), warn_on_full_buffer=False)
        for number in _STOPPING:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            self._take(number, self._came)
        self._take(signal.SIGUSR2, self._rotate)
        self._take(signal.SIGCHLD, lambda *_: None)
        return self

    def _take(self, number: int, handler: Callable[[int, FrameType | None], object]) -> None:
        self._previous[number] = signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._ours.close()
        self._pythons.close()

    def take_for_command(self) -> None:
        """From now on takes those too that a command may be meant by: see `to_forward`."""
        for number in _FOR_COMMANDS:
            self._take(number, self._note)

    def to_forward(self) -> list[int]:
        """The signals that came for a command and did not reach it, once."""
        numbers, self._forward = self._forward, []
        return numbers

    def _note(self, number: int, _: FrameType | None) -> None:
        if number not in _BY_TERMINALS or not _in_front_of_a_terminal():
            self._forward.append(number)

    def _rotate(self, *_: object) -> None:
        self.rotate = True

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._number = number
        self._note(number, frame)
        if self.instead is not None:
            instead, self.instead = self.instead, None
            self.count = 1
            instead()
            return
        if self.count == 1:
            return
        if self.count == 2:
            with contextlib.suppress(OSError):
                os.write(2, self.farewell().encode())
            raise SystemExit(128 + number)  # unfinished files are taken away on the way out
        os._exit(128 + number)

    def fileno(self) -> int:
        """Readable when a signal came."""
        return self._ours.fileno()

    def clear(self) -> None:
        """Makes `fileno` wait again."""
        with contextlib.suppress(BlockingIOError):
            while self._ours.recv(4096):
                pass

    def check(self) -> None:
        """Called where nothing was recorded yet.

        Raises:
            Interrupted: a signal came.
        """
        if self.count:
            raise Interrupted(self._number)


def _in_front_of_a_terminal() -> bool:
    """Whether a terminal's Ctrl-C reaches us, and so the command, too."""
    try:
        fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(fd)
