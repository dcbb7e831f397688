"""Reads BPF ring buffers in bulk: thousands of records of one size become one array, without a call per record.

No record is read before those that were begun earlier, so a thread that is not run while it writes a record holds up
all that come after it. The programs do not wait for anything in that time (reading absent memory fails at once); but on
a kernel that preempts itself a thread of the lowest priority may get no CPU. Such times are counted.

A record of another size means that the programs are not those that the reader expects; it is counted and skipped.

The kernel's layout (Documentation/bpf/ringbuf.rst): a page with the consumer's position, a page with the producer's
position, then the data, which is mapped twice in a row so that no record is ever split. Each record is an 8-byte header
(length; bit 31 while it is being written; bit 30 when it was discarded) and its payload, rounded up to 8 bytes.
"""

from __future__ import annotations

import mmap
import time

import numpy as np
from numpy.typing import NDArray

_PAGE = mmap.PAGESIZE
_HEADER = 8
_BUSY = np.uint32(1 << 31)
_DISCARDED = np.uint32(1 << 30)
MOST_RECORDS = 1 << 30
MOST_HELD_NS = 1_000_000_000  # that a record may be unfinished: its thread may have been preempted while it wrote


def _rounded(length: int) -> int:
    """Returns a record's length in the buffer: rounded up to 8 bytes."""
    return (length + 7) & ~7


class RingBuffer:
    """A ring buffer whose records all have one dtype."""

    def __init__(self, fd: int, size: int, dtype: np.dtype[np.void]) -> None:
        """Maps the buffer.

        Args:
            fd: the map's file descriptor; the caller closes it.
            size: of the data in bytes, a power of two and a multiple of the page size.
            dtype: of the payload.

        Raises:
            OSError: the buffer cannot be mapped.
        """
        self._fd = fd
        self._size = size
        self.misfits = 0  # number of records with another length than the dtype's, which are skipped
        self._held_at, self._held_since = -1, 0  # the unfinished record that the last read ended at, and since when
        self._held: list[tuple[int, int]] = []  # begin and end of times that were too long
        self._dtype, self._row_bytes = dtype, _HEADER + dtype.itemsize
        if self._row_bytes % 8:
            raise ValueError("records must be a multiple of 8 bytes long")
        self._consumer_map = mmap.mmap(fd, _PAGE)
        self._producer_map = mmap.mmap(fd, _PAGE + 2 * size, prot=mmap.PROT_READ, offset=_PAGE)
        self._consumer = np.frombuffer(self._consumer_map, np.uint64, 1)
        self._producer = np.frombuffer(self._producer_map, np.uint64, 1)
        self._data = np.frombuffer(self._producer_map, np.uint8, 2 * size, offset=_PAGE)

    def fileno(self) -> int:
        """Returns the map's descriptor, which becomes readable when a program requests a wakeup."""
        return self._fd

    def read(self, most: int = MOST_RECORDS) -> NDArray[np.void]:
        """Returns a copy of complete records in order, of shape [n], and frees their space in the buffer.

        Records whose length is not the dtype's are skipped and counted in `misfits`.

        Args:
            most: how many records to read; the others stay in the buffer.
        """
        position, end = int(self._consumer[0]), int(self._producer[0])
        parts: list[NDArray[np.uint8]] = []  # a row for each payload: numpy copies bytes faster than records
        is_complete = True
        while is_complete and end - position >= _HEADER and (left := most - sum(map(len, parts))) > 0:
            position, is_complete = self._read_expected(position, end, parts, left)
        self._consumer[0] = position
        held_at = position if position < end else -1
        if held_at != self._held_at:
            self._note_held(held_at)
        payloads = np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.empty(0, np.uint8)
        return payloads.reshape(-1).view(self._dtype)

    def _note_held(self, held_at: int) -> None:
        now = time.monotonic_ns()
        if self._held_at >= 0 and now - self._held_since > MOST_HELD_NS:
            self._held.append((self._held_since, now))
        self._held_at, self._held_since = held_at, now

    def take_held(self) -> list[tuple[int, int]]:
        """Returns when records were held up for more than MOST_HELD_NS: begins and ends, CLOCK_MONOTONIC ns; each once.

        A time that lasts is returned when it has ended.
        """
        held, self._held = self._held, []
        return held

    @property
    def unread(self) -> int:
        """Bytes of records that were begun, and not read yet."""
        return int(self._producer[0]) - int(self._consumer[0])

    def _read_expected(self, position: int, end: int, parts: list[NDArray[np.uint8]], most: int) -> tuple[int, bool]:
        """Reads records of the expected length from `position` on, and skips the misfit after them, if any.

        Returns:
            The position after these records, and whether a complete record may follow.
        """
        count = min((end - position) // self._row_bytes, most)
        start = position % self._size
        rows = self._data[start : start + count * self._row_bytes].reshape(count, self._row_bytes)
        lengths = rows[:, :4].view("<u4")[:, 0].copy()
        others = np.flatnonzero((lengths & ~_DISCARDED) != self._dtype.itemsize)
        if len(others):
            count = int(others[0])
            rows, lengths = rows[:count], lengths[:count]
        if count:
            kept = (lengths & _DISCARDED) == 0
            parts.append((rows if kept.all() else rows[kept])[:, _HEADER:].copy())
            position += count * self._row_bytes
        if count == most:
            return position, True
        return self._skip_misfit(position, end)

    def _skip_misfit(self, position: int, end: int) -> tuple[int, bool]:
        """Skips the record at `position` if it is a complete misfit; returns the same as `_read_expected`."""
        if end - position < _HEADER:
            return position, False
        start = position % self._size
        header = self._data[start : start + 4].view("<u4")[0]
        if header & _BUSY:
            return position, False
        length = int(header & ~_DISCARDED)
        if length == self._dtype.itemsize and end - position >= self._row_bytes:
            return position, True  # the record has been completed meanwhile
        self.misfits += 1
        # If the length leads past the written data, the next record cannot be found: skip all data.
        return min(position + _rounded(_HEADER + length), end), True

    def close(self) -> None:
        """Unmaps the buffer."""
        del self._consumer, self._producer, self._data
        self._consumer_map.close()
        self._producer_map.close()
