"""Samples of captures, and what their rows refer to: what the kept profiles and all sums have in common.

Where several stacks launched a kernel at about the same time, its samples are divided among them. A row's `fork` says
by a number what these stacks have in common, from the outermost frame to where they part, so that it stays known in a
sum which frames have all of them: those above. Captures of one program have the same forks, however many there are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from iaprof.formats.profile import Code, Launch
from iaprof.report.fleet.rows import KEYS, Rows

TABLES = {"launch": "launches", "kernel": "kernels", "code": "codes", "device": "devices"}
"""By column of the rows: the member with what its numbers mean."""
NO_CALLERS = 1
"""The fork of stacks that have nothing in common."""
_PREFIX_BYTES = 7  # of a prefix's number, which fits int64
_UNKNOWN: dict[str, object] = {"launch": None, "kernel": None, "code": Code("", (), ()), "device": ""}


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


def prefixes(launch: Launch) -> list[int]:
    """Returns a number for each prefix of a launch's stack, the process first: 2 to 2^56, a hash of its texts."""
    operators = (f"operator {each}" for each in launch.operators)
    frames = (f"frame {each}" for each in (*launch.stack, *launch.kernel_stack))
    hash_ = hashlib.blake2b(digest_size=8)
    found = []
    for text in (f"{launch.comm}\n{launch.container}", *operators, *frames):
        hash_.update(f"{text}\0".encode())
        found.append(int.from_bytes(hash_.copy().digest()[:_PREFIX_BYTES], "little") + NO_CALLERS + 1)
    return found


def fork_of(stacks: Iterable[Sequence[int]]) -> int:
    """Returns the fork of stacks, each as `prefixes` has it: the number of the longest prefix of all."""
    fork = NO_CALLERS
    for at_depth in zip(*stacks, strict=False):
        if len(set(at_depth)) > 1:
            break
        fork = at_depth[0]
    return fork
