"""BPF ring buffers read in bulk: thousands of records of one size become one array, without a call per record.

The kernel's layout (Documentation/bpf/ringbuf.rst): a page with the consumer's position, a page with the producer's,
then the data, which is mapped twice in a row so that no record is ever split. Each record is an 8-byte header
(length; bit 31 while it is being written; bit 30 when it was discarded) and its payload, rounded up to 8 bytes.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

_PAGE = mmap.PAGESIZE
_HEADER = 8
_BUSY = np.uint32(1 << 31)
_DISCARDED = np.uint32(1 << 30)


class RingBuffer:
    """One ring buffer whose records are all of `dtype`."""

    def __init__(self, fd: int, size: int, dtype: np.dtype[np.void]) -> None:
        """Maps the buffer.

        Args:
            fd: the map's file descriptor; it stays the caller's.
            size: bytes of data, a power of two and a multiple of the page size.
            dtype: of the payload.

        Raises:
            OSError: it cannot be mapped.
        """
        self._fd = fd
        self._size = size
        self._row = np.dtype([("length", "<u4"), ("offset", "<u4"), ("payload", dtype)])
        if self._row.itemsize % 8:
            raise ValueError("records must be a multiple of 8 bytes long")
        self._consumer_map = mmap.mmap(fd, _PAGE)
        self._producer_map = mmap.mmap(fd, _PAGE + 2 * size, prot=mmap.PROT_READ, offset=_PAGE)
        self._consumer = np.frombuffer(self._consumer_map, np.uint64, 1)
        self._producer = np.frombuffer(self._producer_map, np.uint64, 1)
        self._data = np.frombuffer(self._producer_map, np.uint8, 2 * size, offset=_PAGE)

    def fileno(self) -> int:
        """The map's descriptor; readable when a program asked for a wake-up."""
        return self._fd

    def read(self) -> NDArray[np.void]:
        """All records that are complete, in order: a copy, of shape [n]. The room they took is given back."""
        consumed = int(self._consumer[0])
        available = int(self._producer[0]) - consumed
        count = available // self._row.itemsize
        if count == 0:
            return np.empty(0, self._row["payload"])
        start = consumed % self._size
        rows = self._data[start : start + count * self._row.itemsize].view(self._row)
        lengths = rows["length"].copy()
        busy = np.flatnonzero(lengths & _BUSY)
        if len(busy):
            count = int(busy[0])
            rows, lengths = rows[:count], lengths[:count]
        kept = (lengths & _DISCARDED) == 0
        records: NDArray[np.void] = rows["payload"].copy() if kept.all() else rows["payload"][kept]
        self._consumer[0] = consumed + count * self._row.itemsize
        return records

    def close(self) -> None:
        """Unmaps the buffer."""
        del self._consumer, self._producer, self._data
        self._consumer_map.close()
        self._producer_map.close()
