"""Names of addresses: for each the functions that are inlined there into one another, with files and lines.

In columns, as they come from files and go into captures. Names are those that the compiler gave, not demangled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.ranges import ranges
from iaprof.symbols.names.modules import Module

MOST_INLINED = 256  # functions of one address that are shown
LONGEST_NAME = 1 << 13  # characters of a function's or file's name; the rest is cut off


@dataclass(frozen=True, slots=True)
class Frame:
    """One function of a chain of inlined ones: where in it the code, or the call of the next one, stands."""

    function: str
    file: str = ""  # empty where unknown
    line: int = 0  # 0 where unknown


@dataclass(frozen=True, eq=False)
class Names:
    """Names of n ranges of addresses of one module, sorted by address, then by size, the largest first."""

    addresses: NDArray[np.uint64]  # [n] first addresses
    sizes: NDArray[np.uint64]  # [n] bytes; 1 where only the very address was asked for
    starts: NDArray[np.int64]  # [n + 1] frames of range i: starts[i] to starts[i + 1], the outermost first
    functions: NDArray[np.int32]  # [frames] indices into strings
    files: NDArray[np.int32]  # [frames] indices into strings
    lines: NDArray[np.uint32]  # [frames]
    strings: list[str]

    @classmethod
    def of(cls, entries: Iterable[tuple[int, int, Sequence[Frame]]]) -> Names:
        """Made of (address, size, frames with the outermost first); an entry without frames names nothing."""
        kept = sorted((e for e in entries if e[2]), key=lambda entry: (entry[0], -entry[1]))
        numbers: dict[str, int] = {}
        frames = [frame for _, _, chain in kept for frame in chain]
        return cls(
            np.array([address for address, _, _ in kept], np.uint64),
            np.array([size for _, size, _ in kept], np.uint64),
            np.cumsum([0, *(len(chain) for _, _, chain in kept)], dtype=np.int64),
            np.array([numbers.setdefault(f.function[:LONGEST_NAME], len(numbers)) for f in frames], np.int32),
            np.array([numbers.setdefault(f.file[:LONGEST_NAME], len(numbers)) for f in frames], np.int32),
            np.array([f.line for f in frames], np.uint32),
            list(numbers),
        )

    @classmethod
    def joined(cls, parts: Sequence[Names]) -> Names:
        """All of them together; of the same range in several the last one's counts."""
        if len(parts) == 1:
            return parts[0]
        before = np.cumsum([0, *(len(part.functions) for part in parts)])
        texts = np.cumsum([0, *(len(part.strings) for part in parts)])
        addresses, sizes, functions, files, lines = (
            np.concatenate([getattr(part, name) + more for part, more in zip(parts, offsets, strict=False)])
            for name, offsets in (
                ("addresses", np.zeros(len(parts), np.uint64)),
                ("sizes", np.zeros(len(parts), np.uint64)),
                ("functions", texts.astype(np.int32)),
                ("files", texts.astype(np.int32)),
                ("lines", np.zeros(len(parts), np.uint32)),
            )
        )
        first = np.concatenate([part.starts[:-1] + more for part, more in zip(parts, before, strict=False)])
        counts = np.concatenate([np.diff(part.starts) for part in parts])
        order = np.lexsort((~sizes, addresses))
        counts, first = counts[order], first[order]
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        frames = ranges(first, counts)
        strings = [text for part in parts for text in part.strings]
        return cls(addresses[order], sizes[order], starts, functions[frames], files[frames], lines[frames], strings)

    def outermost(self) -> Names:
        """Of each range the first frame alone."""
        first = self.starts[:-1]
        columns = (self.functions[first], self.files[first], self.lines[first])
        return Names(self.addresses, self.sizes, np.arange(len(self) + 1), *columns, self.strings)

    def at(self, addresses: NDArray[np.uint64]) -> Names:
        """The names of these addresses alone, each for itself."""
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
        """The range of each address, the one that begins last where there are several; -1 for none: int64[n]."""
        rows = _last(self.addresses, self.sizes, addresses)
        missing = np.flatnonzero(rows < 0)
        wide = np.flatnonzero(self.sizes > 1)
        if len(missing) and len(wide) < len(self):  # the name of one address may stand inside of a function's range
            inside = _last(self.addresses[wide], self.sizes[wide], addresses[missing])
            rows[missing] = np.where(inside >= 0, wide[np.maximum(inside, 0)] if len(wide) else -1, -1)
        return rows

    def frames(self, row: int) -> tuple[Frame, ...]:
        """The frames of a range, the outermost first."""
        return tuple(
            Frame(self.strings[self.functions[i]], self.strings[self.files[i]], int(self.lines[i]))
            for i in range(int(self.starts[row]), min(int(self.starts[row + 1]), int(self.starts[row]) + MOST_INLINED))
        )


def _last(begins: NDArray[np.uint64], sizes: NDArray[np.uint64], addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The last range up to each address, if it covers it; else -1."""
    if not len(begins):
        return np.full(len(addresses), -1, np.int64)
    rows = np.searchsorted(begins, addresses, side="right") - 1
    at = np.maximum(rows, 0)
    return np.where((rows >= 0) & (addresses - begins[at] < sizes[at]), rows, -1)


NO_NAMES = Names.of([])


@dataclass(frozen=True)
class Named:
    """What a source knows of one module."""

    names: Names = field(default=NO_NAMES)
    source: str = ""  # what the names are from, for people: "debug information of /usr/lib/debug/..."
    problem: str = ""  # why not everything could be named: one sentence, empty when nothing went wrong
    frame_pointers: bool | None = None  # whether the code keeps them; None where that is not known
    outermost: NDArray[np.uint64] | None = None  # of the addresses, those without a caller; None where nobody can tell
    no_calls: NDArray[np.uint64] | None = None  # of the addresses, those where no call ends; likewise


class Naming(Protocol):
    """A source of names."""

    def name(self, module: Module, addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Named | None:
        """Names addresses of a module; None where this source has nothing to do with it.

        Args:
            module: whose they are.
            addresses: [n], distinct and sorted; what they mean depends on the module's kind.
            times: [n], when each was met first, CLOCK_MONOTONIC ns; for generated code, which changes.
        """
