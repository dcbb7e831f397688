"""Whether a library was built with frame pointers, told from its code: how its functions begin.

A function that keeps them begins with push %rbp; mov %rsp,%rbp. Compilers put endbr64 before that, and sometimes a
few instructions more. So what counts is the share of functions, of some size, near whose beginning the two stand.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SAMPLED = 256  # functions
SMALLEST = 64  # bytes of a function: smaller ones need no frame in any build
_OPENING = 24  # bytes at a function's beginning
_PROLOGUES = (b"\x55\x48\x89\xe5", b"\x55\x48\x8b\xec")  # the two encodings of that mov
_MOST_SECTIONS, _MOST_SEGMENTS = 1024, 64
_MOST_SYMBOLS = 1 << 18
_X86_64, _PT_LOAD, _EXECUTABLE = 62, 1, 1
_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_STT_FUNC = 2
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)


@dataclass(frozen=True)
class Openings:
    """How the functions that were looked at begin."""

    with_frame: int
    functions: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.with_frame / self.functions if self.functions else 0.0

    @property
    def kept(self) -> bool:
        """Whether it was built with frame pointers; assembly and shrink-wrapped functions never have them all."""
        return self.share >= 0.5


def read_openings(fd: int) -> Openings | None:
    """Looks at up to SAMPLED functions of an open x86-64 ELF file; None when it is none.

    The file may be anybody's: everything that is read of it is bounded, and nothing of it is believed.
    """
    try:
        return _openings(fd)
    except (struct.error, ValueError, OverflowError, OSError):
        return None


def _openings(fd: int) -> Openings | None:
    header = os.pread(fd, 64, 0)
    if header[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", header, 18)[0] != _X86_64:
        return None
    segments_at, sections_at = struct.unpack_from("<QQ", header, 32)
    segment_count, _, section_count = struct.unpack_from("<HHH", header, 56)
    segments = [
        (address, offset, size)
        for kind, flags, offset, address, _, size, _, _ in struct.iter_unpack(
            "<IIQQQQQQ", _table(fd, segments_at, 56, min(segment_count, _MOST_SEGMENTS))
        )
        if kind == _PT_LOAD and flags & _EXECUTABLE
    ]
    sections = _table(fd, sections_at, 64, min(section_count, _MOST_SECTIONS))
    starts: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)]
    for _, kind, _, _, offset, size, *_ in struct.iter_unpack("<IIQQQQIIQQ", sections):
        if kind in (_SHT_SYMTAB, _SHT_DYNSYM):
            starts.append(
                _functions(_table(fd, offset, _SYMBOL.itemsize, min(size // _SYMBOL.itemsize, _MOST_SYMBOLS)))
            )
    every = np.unique(np.concatenate(starts))
    sampled = every[:: max(1, -(-len(every) // SAMPLED))]
    openings = [opening for address in sampled if (opening := _opening(fd, segments, int(address)))]
    with_frame = sum(any(prologue in opening for prologue in _PROLOGUES) for opening in openings)
    return Openings(with_frame, len(openings))


def _table(fd: int, offset: int, entry: int, count: int) -> bytes:
    """Whole entries, as many as the file has."""
    data = os.pread(fd, entry * count, offset)
    return data[: len(data) // entry * entry]


def _functions(table: bytes) -> NDArray[np.uint64]:
    """Addresses of the functions that are in this file and large enough: uint64[n]."""
    symbols = np.frombuffer(table, _SYMBOL)
    chosen = (symbols["info"] & 0xF == _STT_FUNC) & (symbols["section"] != 0) & (symbols["size"] >= SMALLEST)
    addresses: NDArray[np.uint64] = symbols["value"][chosen].astype(np.uint64)
    return addresses


def _opening(fd: int, segments: list[tuple[int, int, int]], address: int) -> bytes:
    for start, offset, size in segments:
        if start <= address and address + _OPENING <= start + size:
            return os.pread(fd, _OPENING, address - start + offset)
    return b""
