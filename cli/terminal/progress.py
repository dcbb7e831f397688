"""Progress on a terminal: lines that overwrite themselves."""

from __future__ import annotations

import contextlib
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from iaprof.basics.quantities import counted, in_bytes
from iaprof.cli.terminal.summary import write

if TYPE_CHECKING:
    from iaprof.record.session import Status

_PROGRESS_AFTER_S = 1.0  # before the first message of show_progress
MOST_WAITING = 1000
"""Texts that wait to be written; a Printer only counts more."""


class Progress:
    """Draws the status line; other messages appear above it."""

    def __init__(self, printer: Printer | None = None) -> None:
        """Takes what writes the texts; None to write them at once."""
        self._printer = printer
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
        if self._printer is not None and self._printer.is_behind:
            return
        self._write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
        self._drawn = True

    def say(self, text: str) -> None:
        """Prints a line above the status line."""
        self.clear()
        self._write(f"{text}\n")

    def clear(self) -> None:
        """Erases the status line."""
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def _write(self, text: str) -> None:
        (write if self._printer is None else self._printer.write)(text)


class Printer:
    """Writes to stderr in a thread: a stopped terminal, or a pipe that nobody reads, holds up nobody else.

    As a context manager, it waits at the end until everything is written.
    """

    def __init__(self) -> None:
        self._texts: queue.Queue[str] = queue.Queue(MOST_WAITING)
        self._left_out = 0
        self._has_thread = False
        with contextlib.suppress(RuntimeError):  # a limit of threads: texts are written at once
            threading.Thread(target=self._write_each, daemon=True).start()
            self._has_thread = True

    @property
    def is_behind(self) -> bool:
        """Whether texts wait."""
        return self._texts.unfinished_tasks > 0

    def write(self, text: str) -> None:
        """Writes a text, later."""
        if not self._has_thread:
            write(text)
            return
        try:
            self._texts.put_nowait(text)
        except queue.Full:
            self._left_out += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._texts.join()
        if self._left_out:
            write(f"iaprof: {counted(self._left_out, 'more message')} could not be printed in time\n")

    def _write_each(self) -> None:
        while True:
            text = self._texts.get()
            try:
                write(text)
            finally:
                self._texts.task_done()


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


@contextlib.contextmanager
def show_joining(records: int) -> Iterator[Callable[[int], None]]:
    """Yields a progress callback (records done), which writes to a terminal once joining takes over a second."""

    def line(done: int) -> str:
        share = f" ({100 * done / records:.0f} %)" if 0 < records >= done else ""
        return f"joining stalls to launches: {done / 1e6:,.1f} M records{share}"

    with show_progress(line) as progress:
        yield progress


@contextlib.contextmanager
def show_progress(line: Callable[[int], str]) -> Iterator[Callable[[int], None]]:
    """Yields a progress callback (what is done), which writes `line` of it to a terminal after a second."""
    begun = time.monotonic()
    drawn = False

    def progress(done: int) -> None:
        nonlocal drawn
        if time.monotonic() - begun > _PROGRESS_AFTER_S:
            sys.stderr.write(f"\r\x1b[K{line(done)}")
            sys.stderr.flush()
            drawn = True

    terminal = sys.stderr is not None and sys.stderr.isatty()
    try:
        yield progress if terminal else lambda done: None
    finally:
        if drawn:
            sys.stderr.write("\r\x1b[K")
