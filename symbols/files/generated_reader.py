"""Runs in a sandboxed child: reads perf maps and jitdumps, for symbols/symbolizers/generated.py.

The data of a request are addresses, then as many times; its file is the one to read. The file is copied, not mapped, as
its process may be writing to it. The process writes the file, so it may contain anything.

In a jitdump a process describes the code that it generates, with times, lines and the code itself.
linux/tools/perf/Documentation/jitdump-specification.txt has the layout. A record has 16 bytes or more and is one of:

    LOAD        code is at an address from this time on, until other code replaces it
    MOVE        code has moved to another address
    DEBUG_INFO  files and lines of the code of the next LOAD at the same address
    CLOSE, UNWINDING_INFO and records of later versions have no names
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.sandbox.reader import Operation, Refusal
from iaprof.symbols.files.symbol_lists import read_perf_map, text_of
from iaprof.symbols.names.names import LONGEST_READ, Frame
from iaprof.symbols.names.segment_tree import SegmentTree

MOST_RECORDS = 1 << 21  # the rest is not read
MOST_LINES = 1 << 21  # entries of debug information; the rest is not read
_MAGIC, _VERSION = 0x4A695444, 1
_MAGIC_SWAPPED = 0x4454694A  # in files with the other byte order
_ARCH_TIMESTAMP = 1  # a flag: times are those of the processor's time-stamp counter
_HEADER = struct.Struct("<IIIIIIQQ")  # magic, version, bytes, ELF machine, padding, pid, time, flags
_RECORD = struct.Struct("<IIQ")  # kind, bytes, time
_LOAD = struct.Struct("<IIQQQQ")  # pid, tid, vma, code's address, bytes and number; the name and the code follow
_MOVE = struct.Struct("<IIQQQQQ")  # pid, tid, vma, old address, new address, bytes, number
_DEBUG_INFO = struct.Struct("<QQ")  # code's address, count of entries
_ENTRY = struct.Struct("<QII")  # address, line, discriminator; the file's name follows
_LOAD_KIND, _MOVE_KIND, _DEBUG_KIND = 0, 1, 2
_SAME_FILE = b"\xff"
_LAST_ADDRESS = np.uint64((1 << 64) - 1)

MOST_BYTES = 256 << 20  # of a file
_CHUNK = 16 << 20  # bytes
MOST_CHARACTERS = 4 << 20  # in an answer; a character takes up to 12 bytes of JSON


class JitdumpError(Exception):
    """The file is not a jitdump, or not a usable one; the text says why."""


@dataclass(frozen=True)
class Jitdump:
    """The functions found in a jitdump."""

    frames: dict[int, Frame]  # by index of the given address
    problem: str  # why the file was not read to its end; empty if it was


class _Loads:
    """LOAD and MOVE records as columns: code at an address since a time."""

    def __init__(self) -> None:
        self.times, self.addresses, self.sizes = array("Q"), array("Q"), array("Q")
        self.begins = array("Q")  # the file offset of the code's LOAD record
        self.debug = array("Q")  # the file offset of its DEBUG_INFO record; 0 for none

    def add(self, time: int, address: int, size: int, begin: int, debug: int) -> None:
        columns = (self.times, self.addresses, self.sizes, self.begins, self.debug)
        for column, value in zip(columns, (time, address, size, begin, debug), strict=True):
            column.append(value)


def read_jitdump(data: bytes | bytearray, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Jitdump:
    """Finds the function that was at each address at its time.

    Args:
        data: the whole file.
        addresses: uint64[n], sorted.
        times: uint64[n], CLOCK_MONOTONIC ns.

    Raises:
        JitdumpError: the file is not a jitdump, or has the other byte order or another version.
    """
    begin, has_times = _read_header(data)
    loads, problem = _read_records(data, begin)
    starts, sizes, since = (np.array(column, np.uint64) for column in (loads.addresses, loads.sizes, loads.times))
    if not has_times:  # then the last record of the file that covers an address counts
        since, times = np.zeros_like(since), np.zeros_like(times)
    stops = starts + np.minimum(sizes, _LAST_ADDRESS - starts)
    rows = np.flatnonzero(np.searchsorted(addresses, starts) < np.searchsorted(addresses, stops))
    tree = SegmentTree(starts[rows], stops[rows], since[rows], np.arange(len(rows)))
    last = tree.last(tree.segments(addresses), times)
    lines = _Lines(data)
    frames: dict[int, Frame] = {}
    for index in np.flatnonzero(last >= 0).tolist():
        row = int(rows[last[index]])
        begin = loads.begins[row]
        name = _name(data, begin)
        if not name:
            continue
        # Debug information has the addresses at which the code was loaded, before any MOVE.
        (loaded_at,) = struct.unpack_from("<Q", data, begin + _RECORD.size + 16)
        address = int(addresses[index]) - loads.addresses[row] + loaded_at
        file, line = lines.find(loads.debug[row], address)
        frames[index] = Frame(name, file, line)
    return Jitdump(frames, problem or lines.problem)


def _read_header(data: bytes | bytearray) -> tuple[int, bool]:
    """Returns the offset of the first record, and whether times are from CLOCK_MONOTONIC."""
    if len(data) < _HEADER.size:
        raise JitdumpError("it is too short for a jitdump")
    magic, version, size, _, _, _, _, flags = _HEADER.unpack_from(data)
    if magic == _MAGIC_SWAPPED:
        raise JitdumpError("it was written by a machine of the other byte order")
    if magic != _MAGIC:
        raise JitdumpError("it is not a jitdump")
    if version != _VERSION:
        raise JitdumpError(f"it is a jitdump of version {version}, of which only {_VERSION} can be read")
    if not _HEADER.size <= size <= len(data):
        raise JitdumpError("its header is damaged")
    return size, not flags & _ARCH_TIMESTAMP


def _read_records(data: bytes | bytearray, begin: int) -> tuple[_Loads, str]:
    """Returns the LOAD and MOVE records, and why some may be missing."""
    loads = _Loads()
    debug: dict[int, int] = {}  # by address: the offset of the DEBUG_INFO record for the next LOAD
    rows: dict[int, int] = {}  # of `loads`, by the number of the code, which MOVE records refer to
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
    """Returns the function's name from the LOAD record that begins there."""
    (size,) = struct.unpack_from("<I", data, begin + 4)
    start = begin + _RECORD.size + _LOAD.size
    stop = min(begin + size, start + LONGEST_READ)
    end = data.find(b"\0", start, stop)
    return text_of(data, start, end if end >= 0 else stop)


class _Lines:
    """Files and lines of code; reads the debug information of a function when it is first needed."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = data
        self._left = MOST_LINES
        self._tables: dict[int, tuple[NDArray[np.uint64], list[tuple[int, int, int]]]] = {}
        self.problem = ""

    def find(self, begin: int, address: int) -> tuple[str, int]:
        """Returns file and line of an address, from the DEBUG_INFO record at offset `begin`; 0 stands for no record."""
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
        """Reads the entries of a DEBUG_INFO record, sorted by address.

        Returns:
            uint64[n], addresses; for each, where the file name begins and ends in the data, and the line.
        """
        _, size, _ = _RECORD.unpack_from(self._data, begin)
        at, stop = begin + _RECORD.size, begin + size
        _, count = _DEBUG_INFO.unpack_from(self._data, at)
        at += _DEBUG_INFO.size
        entries: list[tuple[int, int, int, int]] = []
        file = 0, 0
        for _ in range(count):
            if at + _ENTRY.size >= stop:
                break
            if self._left == 0:
                self.problem = f"it has more than {MOST_LINES} lines, of which the first were read"
                break
            self._left -= 1
            address, line, _ = _ENTRY.unpack_from(self._data, at)
            name = at + _ENTRY.size
            end = self._data.find(b"\0", name, stop)
            if end < 0:
                break
            if self._data[name:end] != _SAME_FILE:
                file = name, end
            entries.append((address, *file, line))
            at = end + 1
        entries.sort(key=lambda entry: entry[0])
        return np.array([entry[0] for entry in entries], np.uint64), [entry[1:] for entry in entries]


def operations(_stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations of this child, by name."""
    # Makes libraries import what they need, before the sandbox forbids opening files.
    read_perf_map(b"10 1 function\n", np.array([0x10], np.uint64))
    return {"perf_map": perf_map, "jitdump": jitdump}


def perf_map(_parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """Names addresses by a perf map."""
    addresses, _ = _addresses_and_times(data)
    content, problem = _content(files[0])
    names, skipped = read_perf_map(content, addresses)
    if skipped:
        problem = f"{skipped} of its lines {'is' if skipped == 1 else 'are'} damaged"
    return _answer({index: Frame(name) for index, name in names.items()}, problem)


def jitdump(_parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
    """Names addresses by a jitdump."""
    content, problem = _content(files[0])
    try:
        dump = read_jitdump(content, *_addresses_and_times(data))
    except JitdumpError as error:
        raise Refusal("JitdumpError", str(error)) from None
    return _answer(dump.frames, dump.problem or problem)


def _addresses_and_times(data: bytearray) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    numbers = np.frombuffer(data, np.uint64)
    return numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]


def _content(file: int) -> tuple[bytearray, str]:
    """Reads the first MOST_BYTES of a file; returns them, and a sentence if there are more."""
    content = bytearray()
    while chunk := os.pread(file, min(_CHUNK, MOST_BYTES - len(content)), len(content)):
        content += chunk
    is_longer = os.pread(file, 1, MOST_BYTES) != b""
    return content, f"it is longer than {MOST_BYTES >> 20} MiB, of which the first were read" if is_longer else ""


def _answer(frames: dict[int, Frame], problem: str) -> object:
    """Returns the frames as columns, with each distinct text once."""
    texts: dict[str, int] = {}
    columns: dict[str, list[int]] = {"index": [], "function": [], "file": [], "line": []}
    left = MOST_CHARACTERS
    for index, frame in sorted(frames.items()):
        left -= sum(len(text) for text in (frame.function, frame.file) if text not in texts)
        if left < 0:
            problem = f"its names are longer than {MOST_CHARACTERS} characters together, of which the first were read"
            break
        columns["index"].append(index)
        columns["function"].append(texts.setdefault(frame.function, len(texts)))
        columns["file"].append(texts.setdefault(frame.file, len(texts)))
        columns["line"].append(frame.line)
    return {**columns, "strings": list(texts), "problem": problem}
