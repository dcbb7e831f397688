"""Creates, reads and writes BPF maps by their descriptors, and reads ring buffers in bulk, through a mapping."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.syscall import (
    BPF_MAP_CREATE,
    BPF_MAP_DELETE_BATCH,
    BPF_MAP_DELETE_ELEM,
    BPF_MAP_LOOKUP_BATCH,
    BPF_MAP_LOOKUP_ELEM,
    BPF_MAP_UPDATE_BATCH,
    BPF_MAP_UPDATE_ELEM,
    bpf,
    bpf_in_place,
)

_ARRAY, _ARRAY_OF_MAPS = 2, 12  # enum bpf_map_type


def _element(fd: int, key: int, value: int = 0) -> bytes:
    """Packs the part of union bpf_attr for commands on one element: map, addresses of key and value, flags."""
    return struct.pack("<IxxxxQQQ", fd, key, value, 0)


def create_map(name: str, kind: int, key_bytes: int, value_bytes: int, entries: int, flags: int = 0) -> int:
    """Creates a map and returns its descriptor, close-on-exec.

    Args:
        name: shown by the kernel, truncated to 15 bytes.
        kind: enum bpf_map_type.
        key_bytes: 0 for a ring buffer.
        value_bytes: 0 for a ring buffer.
        entries: maximum number of elements; bytes for a ring buffer.
        flags: BPF_F_*.

    Raises:
        OSError: the kernel refused.
    """
    # The part of union bpf_attr for BPF_MAP_CREATE; inner map and NUMA node are 0.
    numbers = struct.pack("<IIIIIII", kind, key_bytes, value_bytes, entries, flags, 0, 0)
    return bpf(BPF_MAP_CREATE, numbers + name.encode()[:15].ljust(16, b"\0"))


def write_slot(fd: int, index: int, value: bytes) -> None:
    """Writes an element of an array map.

    Raises:
        OSError: the index is too large.
    """
    write_element(fd, struct.pack("<I", index), value)


def write_element(fd: int, key: bytes, value: bytes) -> None:
    """Writes an element of a map.

    Raises:
        OSError: the map is full.
    """
    keys, values = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value, len(value))
    bpf(BPF_MAP_UPDATE_ELEM, _element(fd, ctypes.addressof(keys), ctypes.addressof(values)))


def read_element(fd: int, key: bytes, size: int) -> bytes | None:
    """Reads the element with this key, which has `size` bytes; None if there is none."""
    keys, values = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(size)
    try:
        bpf(BPF_MAP_LOOKUP_ELEM, _element(fd, ctypes.addressof(keys), ctypes.addressof(values)))
    except FileNotFoundError:
        return None
    return values.raw


def delete_element(fd: int, key: bytes) -> None:
    """Deletes an element of a map.

    Raises:
        OSError: there is no element with this key.
    """
    keys = ctypes.create_string_buffer(key, len(key))
    bpf(BPF_MAP_DELETE_ELEM, _element(fd, ctypes.addressof(keys)))


class PerCpuCounters:
    """A per-CPU array map with one element, which is an array of 64-bit counters."""

    def __init__(self, fd: int, cpus: int, counters: int) -> None:
        """Allocates the memory that every read uses.

        Args:
            fd: the map's descriptor; the caller closes it.
            cpus: number of possible CPUs.
            counters: number of counters per CPU.
        """
        self._key = ctypes.c_uint32(0)
        self._values = np.zeros((cpus, counters), np.uint64)
        self._request = _element(fd, ctypes.addressof(self._key), self._values.ctypes.data)

    def read(self) -> NDArray[np.uint64]:
        """Returns the counters summed over all CPUs, uint64[counters]; takes one system call."""
        bpf(BPF_MAP_LOOKUP_ELEM, self._request)
        totals: NDArray[np.uint64] = self._values.sum(axis=0, dtype=np.uint64)
        return totals


class HashMap:
    """A hash map that user space reads as arrays."""

    def __init__(self, fd: int, key: np.dtype[Any], value: np.dtype[np.void], most: int) -> None:
        """Wraps a map.

        Args:
            fd: the map's descriptor; the caller closes it.
            key: dtype of its keys.
            value: dtype of its values.
            most: maximum number of elements.
        """
        self._fd, self._key, self._value, self._most = fd, key, value, most

    def read(self) -> tuple[NDArray[Any], NDArray[np.void]]:
        """Returns keys and values, [n] each, of the elements that existed during the whole call."""
        keys, values = np.empty(self._most, self._key), np.empty(self._most, self._value)
        token = np.zeros(2, np.uint32)
        # The part of union bpf_attr for batches: position before and after, keys, values, count, map, flags.
        request = ctypes.create_string_buffer(
            struct.pack(
                "<QQQQIIQQ",
                *(0, token.ctypes.data, keys.ctypes.data, values.ctypes.data, self._most, self._fd, 0, 0),
            )
        )
        with contextlib.suppress(FileNotFoundError):  # this batch reached the end of the map
            bpf_in_place(BPF_MAP_LOOKUP_BATCH, request)
        count = struct.unpack_from("<I", request, 32)[0]
        return keys[:count], values[:count]

    def delete_all(self, keys: NDArray[Any]) -> None:
        """Deletes the elements with these keys, all of which exist, with one system call."""
        if len(keys):
            keys = np.ascontiguousarray(keys)
            bpf(BPF_MAP_DELETE_BATCH, struct.pack("<QQQQIIQQ", 0, 0, keys.ctypes.data, 0, len(keys), self._fd, 0, 0))

    def delete(self, keys: NDArray[Any]) -> None:
        """Deletes the elements with these keys, as far as they exist."""
        key = np.zeros(1, self._key)
        request = _element(self._fd, key.ctypes.data)
        for each in keys:
            key[0] = each
            with contextlib.suppress(FileNotFoundError):
                bpf(BPF_MAP_DELETE_ELEM, request)


def add_keys(fd: int, keys: NDArray[np.uint32]) -> None:
    """Adds keys (uint32[n]), each with the value 1 (uint32), to a hash map, with one system call.

    Raises:
        OSError: the map is full, and not of an LRU type.
    """
    if len(keys) == 0:
        return
    keys, values = np.ascontiguousarray(keys), np.ones(len(keys), np.uint32)
    # The part of union bpf_attr for batches: position before and after, keys, values, count, map, flags.
    bpf(BPF_MAP_UPDATE_BATCH, struct.pack("<QQQQIIQQ", 0, 0, keys.ctypes.data, values.ctypes.data, len(keys), fd, 0, 0))


def remove_keys(fd: int, keys: NDArray[np.uint32]) -> None:
    """Removes keys (uint32[n]) from a hash map, as far as they exist.

    Removes them one by one, because a batch stops at the first key that does not exist.
    """
    key = ctypes.c_uint32(0)
    request = _element(fd, ctypes.addressof(key))
    for key.value in keys.tolist():
        with contextlib.suppress(FileNotFoundError):
            bpf(BPF_MAP_DELETE_ELEM, request)


def wait_for_running_programs() -> None:
    """Returns when every BPF program that runs now has ended, except programs that may sleep.

    Replaces an element of an array of maps: the kernel then waits until no program uses the old element (Linux 4.20).

    Raises:
        OSError: no memory for two small maps.
    """
    inner = bpf(BPF_MAP_CREATE, struct.pack("<IIII", _ARRAY, 4, 4, 1))
    try:
        outer = bpf(BPF_MAP_CREATE, struct.pack("<IIIIII", _ARRAY_OF_MAPS, 4, 4, 1, 0, inner))
        try:
            write_slot(outer, 0, struct.pack("<I", inner))
        finally:
            os.close(outer)
    finally:
        os.close(inner)


_PAGE = mmap.PAGESIZE
_HEADER = 8
_BUSY = np.uint32(1 << 31)
_DISCARDED = np.uint32(1 << 30)
MOST_RECORDS = 1 << 30
MOST_HELD_NS = 1_000_000_000  # that a record may be unfinished: its thread may have been preempted while it wrote


class RingBuffer:
    """A ring buffer whose records all have one dtype: thousands become one array, without a call per record.

    No record is read before those that were begun earlier, so a thread that is not run while it writes a record holds
    up all that come after it. The programs do not wait for anything in that time (reading absent memory fails at once);
    but on a kernel that preempts itself a thread of the lowest priority may get no CPU. Such times are counted.

    A record of another size means that the programs are not those that the reader expects; it is counted and skipped.

    The kernel's layout (Documentation/bpf/ringbuf.rst): a page with the consumer's position, a page with the producer's
    position, then the data, which is mapped twice in a row so that no record is ever split. Each record is an 8-byte
    header (length; bit 31 while it is being written; bit 30 when it was discarded) and its payload, rounded up to 8
    bytes.
    """

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
        return min(position + (_HEADER + length + 7 & ~7), end), True

    def close(self) -> None:
        """Unmaps the buffer."""
        del self._consumer, self._producer, self._data
        self._consumer_map.close()
        self._producer_map.close()
