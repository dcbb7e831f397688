"""Jitdump: what a process says of the code that it generates, with times, lines and the code itself.

linux/tools/perf/Documentation/jitdump-specification.txt has the layout. A record is one of 16 bytes and more:

    LOAD        code is at an address from this time on, until other code is
    MOVE        it has gone elsewhere
    DEBUG_INFO  files and lines of the code that the next LOAD of that address brings
    CLOSE, UNWINDING_INFO and what later versions bring say nothing about names

The file is the process's, so anything may be in it.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.symbols.files.perf_map import text_of
from iaprof.symbols.names.layers import Layers
from iaprof.symbols.names.names import LONGEST_NAME, Frame

MOST_RECORDS = 1 << 21  # the rest is not read
MOST_LINES = 1 << 21  # entries of the debug information that is looked into
_MAGIC, _VERSION = 0x4A695444, 1
_MAGIC_OF_OTHERS = 0x4454694A  # where the bytes of a number are stored in the other order
_ARCH_TIMESTAMP = 1  # a flag: times are the processor's own
_HEADER = struct.Struct("<IIIIIIQQ")  # magic, version, bytes, ELF machine, padding, pid, time, flags
_RECORD = struct.Struct("<IIQ")  # kind, bytes, time
_LOAD = struct.Struct("<IIQQQQ")  # pid, tid, vma, code's address, bytes and number; the name and the code follow
_MOVE = struct.Struct("<IIQQQQQ")  # pid, tid, vma, old address, new address, bytes, number
_DEBUG_INFO = struct.Struct("<QQ")  # code's address, count of entries
_ENTRY = struct.Struct("<QII")  # address, line, discriminator; the file's name follows
_LOAD_KIND, _MOVE_KIND, _DEBUG_KIND = 0, 1, 2
_SAME_FILE = b"\xff"
_LONGEST_NAME = 4 * LONGEST_NAME + 1  # bytes, the NUL included
_LAST_ADDRESS = np.uint64((1 << 64) - 1)


class JitdumpError(Exception):
    """It is no jitdump, or one that cannot be used; the text says why."""


@dataclass(frozen=True)
class Jitdump:
    """What was read."""

    frames: dict[int, Frame]  # by index of the address that was asked for
    problem: str  # why there may be more in it; empty when it was read to its end


class _Loads:
    """LOAD and MOVE records in columns: code at an address since a time."""

    def __init__(self) -> None:
        self.times, self.addresses, self.sizes = array("Q"), array("Q"), array("Q")
        self.begins = array("Q")  # where the code's LOAD record begins in the file
        self.debug = array("Q")  # where its DEBUG_INFO record begins; 0 for none

    def add(self, time: int, address: int, size: int, begin: int, debug: int) -> None:
        columns = (self.times, self.addresses, self.sizes, self.begins, self.debug)
        for column, value in zip(columns, (time, address, size, begin, debug), strict=True):
            column.append(value)


def read_jitdump(data: bytes | bytearray, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Jitdump:
    """Finds the functions that were at some addresses at some times.

    Args:
        data: the whole file.
        addresses: uint64[n], sorted.
        times: uint64[n], CLOCK_MONOTONIC ns.

    Raises:
        JitdumpError: it is none, or of the other byte order or another version.
    """
    begin, has_times = _read_header(data)
    loads, problem = _read_records(data, begin)
    starts, sizes, since = (np.array(column, np.uint64) for column in (loads.addresses, loads.sizes, loads.times))
    if not has_times:  # then what was loaded last counts, in the order of the file
        since, times = np.zeros_like(since), np.zeros_like(times)
    stops = starts + np.minimum(sizes, _LAST_ADDRESS - starts)
    rows = np.flatnonzero(np.searchsorted(addresses, starts) < np.searchsorted(addresses, stops))
    layers = Layers(starts[rows], stops[rows], since[rows], np.arange(len(rows)))
    last = layers.last(layers.pieces(addresses), times)
    lines = _Lines(data)
    frames: dict[int, Frame] = {}
    for index in np.flatnonzero(last >= 0).tolist():
        row = int(rows[last[index]])
        begin = loads.begins[row]
        name = _name(data, begin)
        if not name:
            continue
        # Debug information has the addresses that the code had when it was loaded.
        (loaded_at,) = struct.unpack_from("<Q", data, begin + _RECORD.size + 16)
        address = int(addresses[index]) - loads.addresses[row] + loaded_at
        file, line = lines.find(loads.debug[row], address)
        frames[index] = Frame(name, file, line)
    return Jitdump(frames, problem or lines.problem)


def _read_header(data: bytes | bytearray) -> tuple[int, bool]:
    """Where the records begin, and whether their times are CLOCK_MONOTONIC's."""
    if len(data) < _HEADER.size:
        raise JitdumpError("it is too short for a jitdump")
    magic, version, size, _, _, _, _, flags = _HEADER.unpack_from(data)
    if magic == _MAGIC_OF_OTHERS:
        raise JitdumpError("it was written by a machine of the other byte order")
    if magic != _MAGIC:
        raise JitdumpError("it is no jitdump")
    if version != _VERSION:
        raise JitdumpError(f"it is a jitdump of version {version}, of which only {_VERSION} can be read")
    if not _HEADER.size <= size <= len(data):
        raise JitdumpError("its header is damaged")
    return size, not flags & _ARCH_TIMESTAMP


def _read_records(data: bytes | bytearray, begin: int) -> tuple[_Loads, str]:
    """The records that say where code is, and why they may not be all."""
    loads = _Loads()
    debug: dict[int, int] = {}  # where the DEBUG_INFO is for the next LOAD of an address
    rows: dict[int, int] = {}  # of loads, by the number that MOVE records call the code by
    for _ in range(MOST_RECORDS):
        if begin + _RECORD.size > len(data):
            return loads, ""
        kind, size, time = _RECORD.unpack_from(data, begin)
        body, end = begin + _RECORD.size, begin + size
        if size < _RECORD.size:
            return loads, f"it is damaged at byte {begin}"
        if end > len(data):
            return loads, ""  # its process had not finished writing
        if kind == _LOAD_KIND and body + _LOAD.size <= end:
            _, _, _, address, code_size, number = _LOAD.unpack_from(data, body)
            rows[number] = len(loads.times)
            loads.add(time, address, code_size, begin, debug.pop(address, 0))
        elif kind == _MOVE_KIND and body + _MOVE.size <= end:
            _, _, _, _, address, code_size, number = _MOVE.unpack_from(data, body)
            if number in rows:
                row = rows[number]
                loads.add(time, address, code_size, loads.begins[row], loads.debug[row])
        elif kind == _DEBUG_KIND and body + _DEBUG_INFO.size <= end:
            address, _ = _DEBUG_INFO.unpack_from(data, body)
            debug[address] = begin
        begin = end
    is_longer = begin + _RECORD.size <= len(data)
    return loads, f"it has more than {MOST_RECORDS} records, of which the first were read" if is_longer else ""


def _name(data: bytes | bytearray, begin: int) -> str:
    """The function's name in a LOAD record."""
    (size,) = struct.unpack_from("<I", data, begin + 4)
    start = begin + _RECORD.size + _LOAD.size
    stop = min(begin + size, start + _LONGEST_NAME)
    end = data.find(b"\0", start, stop)
    return text_of(data, start, end if end >= 0 else stop)


class _Lines:
    """Files and lines of code, read of those functions only that are asked for."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = data
        self._left = MOST_LINES
        self._tables: dict[int, tuple[NDArray[np.uint64], list[tuple[int, int, int]]]] = {}
        self.problem = ""

    def find(self, begin: int, address: int) -> tuple[str, int]:
        """File and line at an address, by the DEBUG_INFO record at `begin`; 0 stands for no record."""
        if not begin:
            return "", 0
        if begin not in self._tables:
            self._tables[begin] = self._read(begin)
        addresses, entries = self._tables[begin]
        index = int(np.searchsorted(addresses, np.uint64(address & int(_LAST_ADDRESS)), side="right")) - 1
        if index < 0:
            return "", 0
        start, end, line = entries[index]
        return text_of(self._data, start, end), line

    def _read(self, begin: int) -> tuple[NDArray[np.uint64], list[tuple[int, int, int]]]:
        """Its entries sorted by address: uint64[n], and where the file's name begins and ends, and the line."""
        _, size, _ = _RECORD.unpack_from(self._data, begin)
        place, stop = begin + _RECORD.size, begin + size
        _, count = _DEBUG_INFO.unpack_from(self._data, place)
        place += _DEBUG_INFO.size
        found: list[tuple[int, int, int, int]] = []
        file = 0, 0
        for _ in range(count):
            if place + _ENTRY.size >= stop:
                break
            if self._left == 0:
                self.problem = f"it has more than {MOST_LINES} lines, of which the first were read"
                break
            self._left -= 1
            address, line, _ = _ENTRY.unpack_from(self._data, place)
            name = place + _ENTRY.size
            end = self._data.find(b"\0", name, stop)
            if end < 0:
                break
            if self._data[name:end] != _SAME_FILE:
                file = name, end
            found.append((address, *file, line))
            place = end + 1
        found.sort(key=lambda entry: entry[0])
        return np.array([entry[0] for entry in found], np.uint64), [entry[1:] for entry in found]
