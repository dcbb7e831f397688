"""Signals while recording: the first ends the recording in good order, the second ends the process.

SIGINT, SIGTERM and SIGHUP (the terminal was closed) are handled from beginning to end, so none causes a traceback or
leaves a file behind: code that can stop checks `count`, and a loop waits on `fileno`. SIGUSR2 asks for a new output
file. SIGCHLD only wakes the loop. Signals meant for a recorded command are kept for it.
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
_BY_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)  # sent to all processes of the foreground group


class Interrupted(IaprofError):
    """A signal came before anything was recorded."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted before the recording began: nothing was recorded")
        self.exit_code = 128 + number


class StopSignals:
    """Handles the signals within a `with` block."""

    def __init__(self) -> None:
        self.count = 0
        self.rotate = False  # SIGUSR2 came; who handles it sets this to False
        self.exit_message: Callable[[], str] = lambda: "iaprof: stopped at once\n"  # printed at a second signal
        self.call_once: Callable[[], None] | None = None  # called once, in place of ending the recording
        self._number = 0
        self._forward: list[int] = []
        self._previous: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _STOPPING:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            self._take(number, self._on_stop_signal)
        self._take(signal.SIGUSR2, self._rotate)
        self._take(signal.SIGCHLD, lambda *_: None)
        return self

    def _take(self, number: int, handler: Callable[[int, FrameType | None], object]) -> None:
        self._previous[number] = signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()

    def take_for_command(self) -> None:
        """Handles from now on also the signals for a recorded command: see `to_forward`."""
        for number in _FOR_COMMANDS:
            self._take(number, self._note)

    def to_forward(self) -> list[int]:
        """Returns the signals that came for a command and did not reach it; each once."""
        numbers, self._forward = self._forward, []
        return numbers

    def _note(self, number: int, _: FrameType | None) -> None:
        if number not in _BY_TERMINALS or not _in_front_of_a_terminal():
            self._forward.append(number)

    def _rotate(self, *_: object) -> None:
        self.rotate = True

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._number = number
        self._note(number, frame)
        if self.call_once is not None:
            call_once, self.call_once = self.call_once, None
            self.count = 1
            call_once()
            return
        if self.count == 1:
            return
        if self.count == 2:
            with contextlib.suppress(OSError):
                os.write(2, self.exit_message().encode())
            raise SystemExit(128 + number)  # context managers remove unfinished files
        os._exit(128 + number)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when a signal came."""
        return self._reader.fileno()

    def clear(self) -> None:
        """Makes `fileno` unreadable until the next signal."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def check(self) -> None:
        """Raises if a signal came; to be called before anything is recorded.

        Raises:
            Interrupted: a signal came.
        """
        if self.count:
            raise Interrupted(self._number)


def _in_front_of_a_terminal() -> bool:
    """Whether Ctrl-C in a terminal reaches us, and so the command, too."""
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
