"""Looks up many addresses at once in a SymCache, the table that the `symbolic` library makes of debug information.

The library looks up one address at a time, with a few foreign calls that take a few microseconds. As the file consists
of a few plain arrays (symbolic-symcache's src/raw/v9.rs), NumPy can look up all addresses at once. Files of other
versions are refused.
"""

from __future__ import annotations

import os.path
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 9
_MAGIC = b"SYMC"
_HEADER = np.dtype(
    [("magic", "S4"), ("version", "<u4"), ("debug_id", "V32"), ("arch", "<u4"), ("files", "<u4"), ("functions", "<u4"),
     ("locations", "<u4"), ("ranges", "<u4"), ("string_bytes", "<u4"), ("reserved", "V16")]
)  # fmt: skip
_FILE = np.dtype(
    [("folder", "<u4"), ("directory", "<u4"), ("name", "<u4"), ("server", "<u4", 3)]  # folder: of the compilation
)
_FUNCTION = np.dtype([("name", "<u4"), ("folder", "<u4"), ("entry", "<u4"), ("language", "<u4")])
_LOCATION = np.dtype([("file", "<u4"), ("line", "<u4"), ("function", "<u4"), ("caller", "<u4")])
HEADER_BYTES = _HEADER.itemsize
_NONE = 0xFFFF_FFFF
_DEEPEST = 256  # functions in a chain of inlined ones


class SymCacheError(ValueError):
    """The data are not a SymCache, or are cut off."""


@dataclass(frozen=True, eq=False)
class Chains:
    """The chains of inlined functions of n addresses; frames in the order of the addresses."""

    counts: NDArray[np.int64]  # [n] frames of each address; 0 if debug information does not cover it
    functions: NDArray[np.int64]  # [frames] for function_names; the outermost function of an address first
    files: NDArray[np.int64]  # [frames] for file_names; -1 for none
    lines: NDArray[np.uint32]  # [frames]


class SymCache:
    """A SymCache in memory."""

    def __init__(self, data: bytes | mmap, folder: bytes = b"") -> None:
        """Takes the file's bytes, which must not change.

        Args:
            data: the bytes.
            folder: in which the source was compiled, if that is not in the data.

        Raises:
            SymCacheError: the bytes are not a SymCache.
        """
        self._folder = folder
        view = memoryview(data)
        header = _header(view)
        at = _HEADER.itemsize
        tables: list[NDArray[Any]] = []
        for entry, count in (
            (_FILE, int(header["files"])),
            (_FUNCTION, int(header["functions"])),
            (_LOCATION, int(header["locations"])),
            (np.dtype("<u4"), int(header["ranges"])),
        ):
            at = at + 7 & ~7
            if at + entry.itemsize * count > len(view):
                raise SymCacheError("it is cut off")
            tables.append(np.frombuffer(view, entry, count, at))
            at += entry.itemsize * count
        self._files, self._functions, self._locations, self._ranges = tables
        self._first = len(self._locations) - len(self._ranges)  # the locations of ranges come after all others
        if self._first < 0:
            raise SymCacheError("it is damaged")
        self._strings = data[at + 7 & ~7 :]

    def find(self, addresses: NDArray[np.uint64]) -> Chains:
        """Looks up addresses, uint64[n], relative to the first address of the file's first loaded segment."""
        rows = np.searchsorted(self._ranges, np.minimum(addresses, _NONE).astype(np.uint32), side="right") - 1
        levels: list[NDArray[np.int64]] = []
        locations = np.where((rows >= 0) & (addresses < _NONE), rows + self._first, _NONE)
        while len(levels) < _DEEPEST and (known := locations < len(self._locations)).any():
            levels.append(locations)
            locations = np.where(known, self._locations["caller"][np.where(known, locations, 0)], _NONE)
        if not levels:
            nothing = np.empty(0, np.int64)
            return Chains(np.zeros(len(addresses), np.int64), nothing, nothing, np.empty(0, np.uint32))
        by_level = np.array(levels[::-1]).T  # [addresses, levels] the outermost first
        known = by_level < len(self._locations)
        chain = self._locations[np.where(known, by_level, 0)]
        # A single function without a file comes from a symbol, for which there are better tables.
        known &= chain["function"] < len(self._functions)
        known &= (known.sum(axis=1) > 1)[:, None] | (chain["file"] < len(self._files))
        frames = chain[known]
        files = frames["file"].astype(np.int64)
        return Chains(
            known.sum(axis=1),
            frames["function"].astype(np.int64),
            np.where(files < len(self._files), files, -1),
            frames["line"].astype(np.uint32),
        )

    def function_names(self, numbers: NDArray[np.int64], longest: int) -> list[bytes]:
        """Returns the symbols of functions, cut to `longest` bytes."""
        data, texts = self._strings, []
        for at in self._functions["name"][numbers].tolist():
            # A shortcut for lengths of two LEB128 bytes, as there are tens of thousands of names.
            if at + 1 < len(data) and (high := data[at + 1]) < 128 <= (low := data[at]):
                texts.append(data[at + 2 : at + 2 + min(low & 127 | high << 7, longest)])
            else:
                texts.append(self._string(at, longest))
        return texts

    def file_names(self, numbers: NDArray[np.int64], longest: int) -> list[bytes]:
        """Returns the paths of source files, absolute if the compiler recorded the folder; empty for -1."""
        texts = []
        for number in numbers.tolist():
            path = self._files[number].tolist()[:3] if number >= 0 else ()
            texts.append(
                os.path.join(self._folder if path else b"", *(self._string(each, longest) for each in path))[:longest]
            )
        return texts

    def _string(self, offset: int, longest: int) -> bytes:
        """Returns the string at an offset; its length in LEB128 comes first."""
        length = shift = 0
        for at in range(offset, min(offset + 5, len(self._strings))):
            byte = self._strings[at]
            length |= (byte & 127) << shift
            if byte < 128:
                return self._strings[at + 1 : at + 1 + min(length, longest)]
            shift += 7
        return b""


def range_count(head: bytes) -> int:
    """Returns the number of address ranges in a SymCache, from its first HEADER_BYTES. Raises SymCacheError."""
    return int(_header(head)["ranges"])


def _header(data: bytes | memoryview) -> np.void:
    if len(data) < HEADER_BYTES:
        raise SymCacheError("it is too short")
    header: np.void = np.frombuffer(data, _HEADER, 1)[0]
    if header["magic"] != _MAGIC or header["version"] != VERSION:
        raise SymCacheError("it is of another version")
    return header
