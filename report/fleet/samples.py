"""Samples of captures as columns, adding up those that are equal, and what their rows refer to.

Where several stacks launched a kernel at about the same time, its samples are divided among them. A row's `fork` says
by a number what these stacks have in common, from the outermost frame to where they part, so that it stays known in a
sum which frames have all of them: those above. Captures of one program have the same forks, however many there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import Code, Launch

KEYS = ("capture", "launch", "kernel", "code", "device", "offset", "time", "fork")
"""The columns that tell rows apart. A column that nobody asks for is 0 everywhere."""
VALUES = ("counts", "energy", "divided")
"""The columns that are added up."""

TABLES = {"launch": "launches", "kernel": "kernels", "code": "codes", "device": "devices"}
"""By column of the rows: the member with what its numbers mean."""
NO_CALLERS = 1
"""The fork of stacks that have nothing in common."""
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio (Knuth, TAOCP 6.4)
_UNKNOWN: dict[str, object] = {"launch": None, "kernel": None, "code": Code("", (), ()), "device": ""}


@dataclass(frozen=True, eq=False)
class Rows:
    """Samples by capture, launch, instruction, device and time."""

    capture: NDArray[np.int64]  # [n], number of the capture, or of its group
    launch: NDArray[np.int64]  # [n], index into the launches
    kernel: NDArray[np.int64]  # [n], index into the kernels
    code: NDArray[np.int64]  # [n], index into the codes
    device: NDArray[np.int64]  # [n], index into the devices
    offset: NDArray[np.int64]  # [n], bytes from the kernel's first instruction; the address if no kernel is known
    time: NDArray[np.int64]  # [n], start of the interval, ns since 1970
    fork: NDArray[np.int64]  # [n], where the stacks part among which samples are divided: samples.py; 0: none are
    counts: NDArray[np.int64]  # [n, m], samples by reason
    energy: NDArray[np.int64]  # [n], nJ
    divided: NDArray[np.int64]  # [n], samples for which several stacks can have launched the kernel

    def __len__(self) -> int:
        return len(self.capture)

    @classmethod
    def none(cls, reasons: int) -> Rows:
        """No rows."""
        empty = np.empty(0, np.int64)
        keys = dict.fromkeys(KEYS, empty)
        return cls(**keys, counts=np.empty((0, reasons), np.int64), energy=empty, divided=empty)

    @classmethod
    def concatenated(cls, several: Sequence[Rows]) -> Rows:
        """The rows of several, which have the same reasons."""
        return cls(*(np.concatenate([getattr(each, field.name) for each in several]) for field in fields(cls)))

    def renumbered(self, numbers: Mapping[str, NDArray[np.int64]]) -> Rows:
        """Replaces the numbers in some columns.

        Args:
            numbers: by column: the new number of each old one.
        """
        return replace(self, **{name: of[getattr(self, name)] for name, of in numbers.items()})

    def without(self, columns: Collection[str]) -> Rows:
        """Makes columns of KEYS 0, so that `summed` adds up what only they tell apart."""
        return replace(self, **{name: np.zeros(len(self), np.int64) for name in columns})

    def with_counts(self, places: Sequence[int], reasons: int) -> Rows:
        """Moves each reason's counts to another column.

        Args:
            places: the new column of each reason.
            reasons: the new number of columns.
        """
        counts = np.zeros((len(self), reasons), np.int64)
        counts[:, list(places)] = self.counts
        return replace(self, counts=counts)

    def only(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> Rows:
        """Some of the rows: bool[n], or indices."""
        return Rows(*(getattr(self, field.name)[rows] for field in fields(self)))

    def summed(self) -> Rows:
        """Adds up rows with equal keys; the result is sorted by these."""
        if not len(self):
            return self
        columns = [column for name in KEYS if (column := getattr(self, name)).any()]
        order = np.lexsort(columns[::-1]) if columns else np.arange(len(self))
        differs = np.zeros(len(self), bool)
        differs[0] = True
        for column in columns:
            ordered = column[order]
            differs[1:] |= ordered[1:] != ordered[:-1]
        first = np.flatnonzero(differs)
        keys = {name: getattr(self, name)[order[first]] for name in KEYS}
        return Rows(**keys, **{name: np.add.reduceat(getattr(self, name)[order], first) for name in VALUES})


@dataclass(frozen=True, slots=True)
class HashedKernel:
    """A kernel in many captures: by name, and by a hash of its code."""

    symbol: str
    file: str
    hash: str  # "" if its code is unknown


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows, and the tables that they refer to by index; None stands for what is unknown."""

    rows: Rows
    launches: Sequence[Launch | None]
    kernels: Sequence[HashedKernel | None]
    codes: Sequence[Code]
    devices: Sequence[str]
    reasons: Sequence[str]

    def tables(self) -> dict[str, Any]:
        """Returns what the rows refer to, by member."""
        return {name: getattr(self, name) for name in (*TABLES.values(), "reasons")}

    def without_unused(self) -> Self:
        """Leaves out what no row refers to; the rest keeps its order."""
        tables: dict[str, Any] = {}
        columns = {}
        for column, table in TABLES.items():
            values: Sequence[object] = getattr(self, table)
            numbers, columns[column] = np.unique(getattr(self.rows, column), return_inverse=True)
            tables[table] = [values[each] for each in numbers.tolist()]
        return replace(self, rows=replace(self.rows, **columns), **tables)

    def dropped(self, kept: Collection[str]) -> Self:
        """Adds up rows that only other columns than `kept`, and `capture`, tell apart."""
        of_stacks = {"fork"} if "launch" in kept else set()
        rows = self.rows.without(set(KEYS) - {"capture", *kept, *of_stacks}).summed()
        tables: dict[str, Any] = {}
        for column, table in TABLES.items():  # what no row refers to would be sent and compared for nothing
            values: Sequence[object] = getattr(self, table)
            numbers, at = np.unique(getattr(rows, column), return_inverse=True)
            tables[table] = [values[each] for each in numbers.tolist()] if column in kept else [_UNKNOWN[column]]
            rows = replace(rows, **{column: at})
        return replace(self, rows=rows, **tables)


def hashed(text: str) -> int:
    """Returns a text's hash, which is the same everywhere: 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Prefixes:
    """Numbers of the prefixes of stacks: hashes of their texts, 2 to 2^56 + 1."""

    def __init__(self) -> None:
        """Hashes each text once."""
        self._hashed = cache(hashed)

    def of(self, launch: Launch) -> NDArray[np.int64]:
        """Returns the number of each prefix of a launch's stack, the process first: int64[1 + operators + frames]."""
        texts = (
            f"{launch.comm}\n{launch.container}",
            *(f"{each}\n" for each in launch.operators),  # no frame has a line break
            *launch.stack,
            *launch.kernel_stack,
        )
        hashes = np.fromiter(map(self._hashed, texts), np.uint64, len(texts))
        powers = np.cumprod(np.full(len(texts), GOLDEN, np.uint64))  # modulo 2^64, as the sum: the order counts
        return (np.cumsum(hashes * powers) >> np.uint64(8)).astype(np.int64) + NO_CALLERS + 1


def fork_of(stacks: Iterable[NDArray[np.int64]]) -> int:
    """Returns the fork of stacks, each with its prefixes' numbers: the number of the longest prefix of all."""
    common: NDArray[np.int64] | None = None
    for stack in stacks:
        common = stack if common is None else common
        length = min(len(common), len(stack))
        common = common[: np.append(common[:length] == stack[:length], False).argmin()]
    return NO_CALLERS if common is None or not len(common) else int(common[-1])
