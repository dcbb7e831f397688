"""Rotation of the output: when, and who makes the captures of earlier parts.

The recording always goes to CAPTURE.spool. An earlier part becomes a capture of its own, named by the time of its end,
while recording goes on. The last part has the name that the user gave.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.record.capture.finisher import Finisher
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.options import Options
from iaprof.record.part_files import PartFiles, free_name, spool_path
from iaprof.record.spool import Spool
from iaprof.record.symbolize.roots import Roots

OnPart = Callable[[Path, dict[str, Any], int], None]


class Rotation:
    """Rotates the output of one recording."""

    def __init__(self, options: Options, journal: Journal, loop: Loop, roots: Roots, on_part: OnPart) -> None:
        """Begins with the first part.

        Args:
            options: when to rotate.
            journal: its spool is replaced.
            loop: tells when a part is finished.
            roots: of processes, with which files are opened when a part is finished.
            on_part: is called for each earlier part that is finished: path, header, bytes.
        """
        self._options, self._journal, self._loop, self._roots = options, journal, loop, roots
        self._on_part = on_part
        self._finisher: Finisher | None = None
        self.is_open = False
        """Whether stacks may still be added to the part that ended last: see `end_part`."""
        self.files = PartFiles(options.output, options.max_files, options.max_total, journal.inform, journal.warn)
        self.files.make_room()
        self._since = time.monotonic()
        self.number = 0

    @property
    def is_due(self) -> bool:
        """Whether it is time to rotate, and no part is being finished."""
        options = self._options
        if self._finisher is not None:
            return False
        large = options.switch_bytes is not None and self._journal.spool.size >= options.switch_bytes
        return large or (options.switch_s is not None and time.monotonic() - self._since >= options.switch_s)

    @property
    def is_under_way(self) -> bool:
        """Whether a part is being finished."""
        return self._finisher is not None

    def rotate(self) -> None:
        """Begins another part; `end_part` then ends the previous one.

        Raises:
            IaprofError: the disk is full, or writing failed otherwise.
        """
        output, old = self._options.output, self._journal.spool
        self._part = free_name(output, time.time())
        old.rename(spool_path(self._part))
        self._old = old
        self._state_fd = os.memfd_create("rotation-state", os.MFD_CLOEXEC)
        self._journal.switch_to(Spool(spool_path(output)))
        self._since = time.monotonic()
        self.number += 1
        self._finisher = Finisher(old, self._options.symbols, self._state_fd, self._roots.by_process())
        self.is_open = True

    def end_part(self) -> None:
        """Has the capture of the previous part made: nothing more is written to its spool."""
        assert self._finisher is not None
        self.is_open = False
        self._journal.end_previous()
        self._finisher.go(self._part)
        self._loop.wait_for(self._finisher.fileno(), self._read)

    def _read(self) -> None:
        assert self._finisher is not None
        if self._finisher.read():
            self._loop.forget(self._finisher.fileno())
            self._take_part()

    def wait(self) -> None:
        """Waits until no part is being finished."""
        if self.is_open:
            self.end_part()
        if self._finisher is not None:
            self._take_part()

    def _take_part(self) -> None:
        finisher, self._finisher = self._finisher, None
        assert finisher is not None
        try:
            header, size = finisher.result()
            self._journal.spool.take_over(self._state_fd)
            self._old.remove()
            self._on_part(self._part, header, size)
            self.files.add(self._part)
        except IaprofError as error:
            spool = self._old.path
            self._journal.warn(f"{error}; 'iaprof recover {spool}' makes the capture of that part")
        finally:
            finisher.close()
            self._old.close()
            os.close(self._state_fd)

    def close(self) -> None:
        """Ends the process that finishes a part, if there is one."""
        if self._finisher is not None:
            self._finisher.close()
