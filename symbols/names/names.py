"""Modules, which hold code, names of address ranges in them, and the interface of symbolizers, which give the names.

An address range is named by its chain of inlined functions, with files and lines. Function names are symbols as the
compiler wrote them, not demangled.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.ranges import ranges

# The sources of names in an ELF file, as users see them, the best first.
DEBUG_INFORMATION, SYMBOL_TABLE, DYNAMIC_SYMBOLS = "debug information", "symbol table", "dynamic symbols"
RELOCATIONS, CODE = "relocations", "code"  # of functions that call others in libraries, and of signal handlers' ends
SOURCES = (  # The sources of names in an ELF file, as users see them, the best first.
    DEBUG_INFORMATION,
    SYMBOL_TABLE,
    DYNAMIC_SYMBOLS,
    RELOCATIONS,
    CODE,
)

MOST_INLINED = 256  # functions shown for one address
LONGEST_NAME = 1 << 14  # bytes of a function or file name in UTF-8; `shortened` cuts longer ones
LONGEST_READ = 4 * LONGEST_NAME  # bytes that are read of a name: where no more differs, two names become one
_SHORTENED = re.compile(r"\.\.\.\[cut, [0-9a-f]{8}\]$")


class ModuleKind(StrEnum):
    """The kind of a module. It decides what an address in the module means."""

    FILE = "file"  # an ELF file; addresses are offsets in the file, bytes
    VDSO = "vdso"  # the ELF image that the Linux kernel maps into every process; addresses are offsets in the image
    KERNEL = "kernel"  # the Linux kernel with its modules; addresses are virtual addresses
    GENERATED = "generated"  # code that a process generated; addresses are virtual addresses of that process


class Module(NamedTuple):
    """A file or mapping with CPU code."""

    kind: ModuleKind
    path: str = ""  # of a FILE, as the process saw it; [vdso]; [kernel]; the name of a GENERATED mapping
    build_id: bytes | None = None  # of a FILE; None if it has none
    inode: int = 0  # of a FILE without a build-id; 0 if unknown
    pid: int = 0  # of GENERATED; for a FILE, any process that mapped it; 0 if unknown

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells modules apart: files with the same path and build-id are one module, whoever mapped them.

        The same build-id at another path is another module: a file that forges a build-id does not get at the names of
        the other file.
        """
        if self.kind is not ModuleKind.FILE:
            return self.kind, self.pid
        return self.build_id, self.path, self.inode


class Place(NamedTuple):
    """An address in a module."""

    module: Module
    address: int  # see ModuleKind


def shortened(name: str) -> str:
    """Returns a name of LONGEST_NAME bytes at most. A cut one ends in a mark with a hash, so that names stay distinct.

    Letters that UTF-8 does not have are escaped in it.
    """
    if len(name) <= LONGEST_NAME // 4:
        return name
    encoded = name.encode("utf-8", "backslashreplace")
    if len(encoded) <= LONGEST_NAME:
        return name
    mark = f"...[cut, {hashlib.sha256(encoded).hexdigest()[:8]}]"
    return encoded[: LONGEST_NAME - len(mark)].decode("utf-8", "ignore") + mark


def is_shortened(name: str) -> bool:
    """Whether `shortened` cut this name."""
    return len(name) > LONGEST_NAME // 4 and _SHORTENED.search(name) is not None


class Frame(NamedTuple):
    """A function of a chain of inlined ones, and where in its source the code is, or the call of the next function."""

    function: str
    file: str = ""  # empty where unknown
    line: int = 0  # 0 where unknown


@dataclass(frozen=True, eq=False)
class Names:
    """Names of n address ranges of one module, sorted by address, then by size, the largest first."""

    addresses: NDArray[np.uint64]  # [n] first addresses
    sizes: NDArray[np.uint64]  # [n] bytes; 1 if the name is known to hold for this address only
    starts: NDArray[np.int64]  # [n + 1] frames of range i: starts[i] to starts[i + 1], the outermost first
    functions: NDArray[np.int32]  # [frames] indices into strings
    files: NDArray[np.int32]  # [frames] indices into strings
    lines: NDArray[np.uint32]  # [frames]
    strings: list[str]

    @classmethod
    def of(cls, entries: Iterable[tuple[int, int, Sequence[Frame]]]) -> Names:
        """Makes names of (address, size, frames with the outermost first) entries; those without frames are dropped."""
        kept = sorted((e for e in entries if e[2]), key=lambda entry: (entry[0], -entry[1]))
        numbers: dict[str, int] = {}
        frames = [frame for _, _, chain in kept for frame in chain]
        return cls(
            np.array([address for address, _, _ in kept], np.uint64),
            np.array([size for _, size, _ in kept], np.uint64),
            np.cumsum([0, *(len(chain) for _, _, chain in kept)], dtype=np.int64),
            np.array([numbers.setdefault(shortened(f.function), len(numbers)) for f in frames], np.int32),
            np.array([numbers.setdefault(shortened(f.file), len(numbers)) for f in frames], np.int32),
            np.array([f.line for f in frames], np.uint32),
            list(numbers),
        )

    @classmethod
    def joined(cls, pieces: Sequence[Names]) -> Names:
        """Returns the names of several together; if several have the same range, that of the last one counts."""
        if len(pieces) == 1:
            return pieces[0]
        first_frames = np.cumsum([0, *(len(piece.functions) for piece in pieces)])
        first_strings = np.cumsum([0, *(len(piece.strings) for piece in pieces)])
        addresses, sizes, functions, files, lines = (
            np.concatenate([getattr(piece, name) + offset for piece, offset in zip(pieces, offsets, strict=False)])
            for name, offsets in (
                ("addresses", np.zeros(len(pieces), np.uint64)),
                ("sizes", np.zeros(len(pieces), np.uint64)),
                ("functions", first_strings.astype(np.int32)),
                ("files", first_strings.astype(np.int32)),
                ("lines", np.zeros(len(pieces), np.uint32)),
            )
        )
        first = np.concatenate(
            [piece.starts[:-1] + offset for piece, offset in zip(pieces, first_frames, strict=False)]
        )
        counts = np.concatenate([np.diff(piece.starts) for piece in pieces])
        order = np.lexsort((~sizes, addresses))
        counts, first = counts[order], first[order]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        frames = ranges(first, counts)
        strings = [text for piece in pieces for text in piece.strings]
        return cls(addresses[order], sizes[order], starts, functions[frames], files[frames], lines[frames], strings)

    def outermost(self) -> Names:
        """Returns the same ranges with their outermost frames only."""
        first = self.starts[:-1]
        columns = (self.functions[first], self.files[first], self.lines[first])
        return Names(self.addresses, self.sizes, np.arange(len(self) + 1), *columns, self.strings)

    def at(self, addresses: NDArray[np.uint64]) -> Names:
        """Returns names for single addresses: a range of one byte for each address, uint64[n], that has a name."""
        rows = self.find(addresses)
        addresses, rows = addresses[rows >= 0], rows[rows >= 0]
        counts = np.diff(self.starts)[rows]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        frames = ranges(self.starts[rows], counts)
        ones = np.ones(len(addresses), np.uint64)
        columns = (self.functions[frames], self.files[frames], self.lines[frames])
        return Names(addresses, ones, starts, *columns, self.strings)

    def __len__(self) -> int:
        return len(self.addresses)

    def find(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the range of each address, of several the one that begins last: int64[n]; -1 for none."""
        rows = _last_covering(self.addresses, self.sizes, addresses)
        missing = np.flatnonzero(rows < 0)
        wide = np.flatnonzero(self.sizes > 1)
        if len(missing) and len(wide) < len(self):  # a one-byte range may lie within the range of a function
            inside = _last_covering(self.addresses[wide], self.sizes[wide], addresses[missing])
            rows[missing] = np.where(inside >= 0, wide[np.maximum(inside, 0)] if len(wide) else -1, -1)
        return rows

    def frames(self, row: int) -> tuple[Frame, ...]:
        """Returns the frames of a range, the outermost first, at most MOST_INLINED."""
        return tuple(
            Frame(self.strings[self.functions[i]], self.strings[self.files[i]], int(self.lines[i]))
            for i in range(int(self.starts[row]), min(int(self.starts[row + 1]), int(self.starts[row]) + MOST_INLINED))
        )


def _last_covering(
    begins: NDArray[np.uint64], sizes: NDArray[np.uint64], addresses: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Returns the last range that begins up to each address if it covers the address, else -1: int64[n]."""
    if not len(begins):
        return np.full(len(addresses), -1, np.int64)
    rows = np.searchsorted(begins, addresses, side="right") - 1
    at = np.maximum(rows, 0)
    return np.where((rows >= 0) & (addresses - begins[at] < sizes[at]), rows, -1)


NO_NAMES = Names.of([])


@dataclass(frozen=True)
class Symbolized:
    """What a symbolizer found out about the addresses of one module."""

    names: Names = field(default=NO_NAMES)
    source: str = ""  # where the names are from, as text: "debug information of /usr/lib/debug/..."
    problem: str = ""  # why some addresses have no name: one sentence; empty if nothing went wrong
    frame_pointers: bool | None = None  # whether the code was built with frame pointers; None if unknown
    outermost: NDArray[np.uint64] | None = None  # the addresses in functions that have no caller; None if unknown
    no_calls: NDArray[np.uint64] | None = None  # the addresses at which no call instruction ends; None if unknown


class Symbolizer(Protocol):
    """Names the addresses of modules."""

    def name(self, module: Module, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Symbolized | None:
        """Names addresses of a module; returns None if this symbolizer is not for such modules.

        Args:
            module: the module.
            addresses: uint64[n], distinct and sorted; ModuleKind says what they mean.
            times: uint64[n], when each was first seen, CLOCK_MONOTONIC ns: generated code changes over time.
        """
