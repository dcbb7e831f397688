"""Creates, reads and writes BPF maps by their descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
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
