"""The status line of a recording on a terminal, which overwrites itself."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

from iaprof.basics.quantities import in_bytes
from iaprof.cli.terminal.summary import say

if TYPE_CHECKING:
    from iaprof.record.session import Status


class Progress:
    """Draws the status line; other messages appear above it."""

    def __init__(self) -> None:
        self._drawn = False
        self._before: Status | None = None

    def show(self, status: Status) -> None:
        """Draws a recording's status, with rates since the last call."""
        line = describe(status, self._before)
        self._before = status
        self._draw(line)

    def naming(self, done: int, modules: int) -> None:
        """Draws the progress of symbolizing."""
        self._draw(f"naming symbols: {done:,} of {modules:,} files")

    def reading(self, done: int) -> None:
        """Draws the number of bytes of a text that have been read."""
        self._draw(f"read {in_bytes(done)}")

    def merging(self, done: int, rows: int) -> None:
        """Draws the progress of merging captures."""
        self._draw(f"merging: {100 * done // rows} %")

    def _draw(self, line: str) -> None:
        self._write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
        self._drawn = True

    def say(self, text: str) -> None:
        """Prints a line above the status line."""
        self.clear()
        say(text)

    def clear(self) -> None:
        """Erases the status line."""
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:  # the terminal is gone, but the recording continues
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def describe(status: Status, before: Status | None) -> str:
    """The line: 0:12  lost 0  1.2M records/s  48k launches/s  31/32 kernels  1.1 GB  cpu 1.3 %.

    Args:
        status: the current status.
        before: the last status; rates are since then.
    """
    minutes, seconds = divmod(int(status.seconds), 60)
    then = (before.seconds, before.records, before.launches, before.cpu_s) if before else (0.0, 0, 0, 0.0)
    span = max(status.seconds - then[0], 1e-3)
    parts = [
        f"{minutes}:{seconds:02}{' paused' if status.paused else ''}",
        f"lost {_short(status.lost)}" if status.lost or not status.losses else f"lost something {status.losses} times",
        f"{_short((status.records - then[1]) / span)} records/s",
        f"{_short((status.launches - then[2]) / span)} launches/s",
        f"{status.matched}/{status.kernels} kernels",
        in_bytes(status.bytes),
        f"cpu {100 * (status.cpu_s - then[3]) / span:.1f} %",
    ]
    return "  ".join(parts)


def _short(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 999.5:
            return f"{number:.0f}{unit}" if not unit or number >= 9.95 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"
