"""Reads the ring buffer of copied stacks while the learner is busy, so that there is room for further copies.

To finish a stack the learner may have to read a large file first. On a busy machine that takes longer than a program
needs to fill the ring buffer with copies of its first launches.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.ringbuffer import RingBuffer

MOST_BYTES = 64 << 20  # that are read ahead; further copies stay in the ring buffer, and are lost when it is full


class CopyReader:
    """A ring buffer that a thread reads ahead."""

    def __init__(self, ring: RingBuffer, most_bytes: int = MOST_BYTES) -> None:
        """Starts the thread, which runs until the process ends.

        Args:
            ring: the ring buffer; it must stay open.
            most_bytes: how much to read ahead.
        """
        self._ring, self._most_bytes = ring, most_bytes
        self._lock = threading.Lock()
        self._ahead: list[NDArray[np.void]] = []
        self._bytes = 0
        self._has_room = threading.Event()
        self._has_room.set()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        threading.Thread(target=self._read_ahead, daemon=True).start()

    def fileno(self) -> int:
        """Returns a descriptor that is readable when records were read ahead."""
        return self._event

    @property
    def misfits(self) -> int:
        """Records of another length, which were not read."""
        return self._ring.misfits

    def read(self) -> NDArray[np.void]:
        """Returns all complete records so far, in order: an array of shape [n]."""
        with self._lock:
            arrays = [*self._ahead, self._ring.read()]
            self._ahead.clear()
            self._bytes = 0
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
            self._has_room.set()
        return np.concatenate(arrays)

    def _read_ahead(self) -> None:
        poll = select.poll()
        poll.register(self._ring.fileno(), select.POLLIN)
        while True:
            poll.poll()
            with self._lock:
                records = self._ring.read()
                if len(records):
                    self._ahead.append(records)
                    self._bytes += records.nbytes
                    os.eventfd_write(self._event, 1)
                if self._bytes >= self._most_bytes:
                    self._has_room.clear()
            self._has_room.wait()
