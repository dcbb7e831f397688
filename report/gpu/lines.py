"""Finds the source file and line of a GPU instruction, from DWARF's line table.

report.gpu.functions finds the function. Addresses are canonical (48 bits, gpu.code). The tables are untrusted:
this runs in the sandboxed child, and its work is bounded by the tables' length.
"""

from __future__ import annotations

import posixpath
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from iaprof.gpu.code import canonical

MAX_LINE = 0x7FFF_FFFF


@dataclass(frozen=True, slots=True)
class LineRange:
    """The instructions of one row of the line table."""

    start: int
    end: int  # exclusive: the next row's address
    file: str  # with its directories as DWARF has them; "": the table names none
    line: int  # 0: the compiler attributes the code to no line


class FileTable:
    """A line program's numbered files, as paths."""

    def __init__(self, header: Any, directory: str) -> None:
        """Takes the line program's header (pyelftools) and the compiler's working directory."""
        self._entries = header["file_entry"]
        self._directories = header["include_directory"]
        self._working_directory = directory
        self._first = 0 if header["version"] >= 5 else 1
        self._paths: dict[int, str] = {}

    def path(self, number: int) -> str:
        """Returns the path of the file with that number; "" if there is none, as for DWARF 4's file 0."""
        if number not in self._paths:
            self._paths[number] = self._join(number)
        return self._paths[number]

    def _join(self, number: int) -> str:
        index = number - self._first
        if not 0 <= index < len(self._entries):
            return ""
        entry = self._entries[index]
        # Directory 0 is the working directory, in DWARF 5 explicitly.
        folder = int(entry.dir_index or 0) - self._first
        directory = text(self._directories[folder]) if 0 <= folder < len(self._directories) else ""
        path = posixpath.join(self._working_directory, directory, text(entry.name))
        # Do not resolve `..`: `a/../b` may be another file than `b`.
        components = [component for component in path.split("/") if component not in ("", ".")]
        return ("/" if path.startswith("/") else "") + "/".join(components)


class LineTable:
    """Line ranges, searchable by address."""

    def __init__(self, ranges: Iterable[LineRange]) -> None:
        self._ranges = sorted(ranges, key=lambda each: (each.start, each.end))
        self._starts = [each.start for each in self._ranges]

    def at(self, address: int) -> LineRange | None:
        """Returns the range that contains `address`; if several do, the one that starts last."""
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._ranges[index].end:
            return self._ranges[index]
        return None

    def boundaries(self, start: int, end: int) -> list[int]:
        """Returns the addresses between `start` and `end` at which the result of `at` may change."""
        low, high = bisect_right(self._starts, start), bisect_right(self._starts, end)
        own = self._ranges[max(low - 1, 0) : high]
        return [address for each in own for address in (each.start, each.end) if start < address < end]


def line_ranges(program: Any, files: FileTable) -> list[LineRange]:
    """Returns the rows of a line program (pyelftools' LineProgram) as ranges; drops rows of unterminated sequences."""
    found = []
    sequence: list[tuple[int, int, int]] = []
    for entry in program.get_entries():
        state = entry.state
        if state is None:
            continue
        sequence.append((canonical(state.address), state.file, state.line))
        if not state.end_sequence:
            continue
        for (start, file, line), (end, _, _) in pairwise(sequence):
            if start < end:  # if several rows have one address, the last one counts
                found.append(LineRange(start, end, files.path(file), line if 0 <= line <= MAX_LINE else 0))
        sequence = []
    return found


def text(name: bytes | None) -> str:
    """Decodes a DWARF string to text that any encoder accepts."""
    return (name or b"").decode("utf-8", "backslashreplace")
