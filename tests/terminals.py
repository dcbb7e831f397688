"""A pseudo-terminal in which a program runs, and what it draws."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from waiting import LONGEST_WAIT_S, until

_CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[=>78c]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1bP.*?\x1b\\", re.DOTALL
)


class Terminal:
    """Runs a command in a terminal of its own; a context manager that ends both."""

    def __init__(self, command: Sequence[object], environment: Mapping[str, str], columns: int, lines: int) -> None:
        """Starts the command.

        Args:
            command: the program and its arguments.
            environment: of the command, but for TERM.
            columns: width of the terminal, cells.
            lines: height of the terminal.
        """
        self.fd, theirs = pty.openpty()
        self._resize(columns, lines)
        self._drawn = b""
        self.modes = termios.tcgetattr(self.fd)
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self) -> None:
        try:
            while data := os.read(self.fd, 1 << 16):
                self._drawn += data
        except OSError:  # all that had the terminal open have ended
            pass

    @property
    def text(self) -> str:
        """All that was drawn so far, without sequences that control the terminal."""
        return _CONTROLS.sub("\n", self._drawn.decode("utf-8", "replace"))

    def until(self, *texts: str) -> None:
        """Waits until each of the texts was drawn, or everything is, as the command has ended."""
        until(lambda: all(text in self.text for text in texts) or not self._reader.is_alive())
        assert all(text in self.text for text in texts), self.text[-4000:]

    def press(self, keys: str) -> None:
        """Types keys."""
        os.write(self.fd, keys.encode())

    def wait(self) -> int:
        """Waits for the command's end; returns its exit code."""
        return self.process.wait(LONGEST_WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(LONGEST_WAIT_S)
        os.close(self.fd)
