"""Samples of captures, and what their rows refer to: what the kept profiles and all sums have in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from iaprof.formats.profile import Code, Launch
from iaprof.report.fleet.rows import KEYS, Rows

TABLES = {"launch": "launches", "kernel": "kernels", "code": "codes", "device": "devices"}
"""By column of the rows: the member with what its numbers mean."""
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

    def dropped(self, kept: Collection[str]) -> Self:
        """Adds up rows that only other columns than `kept`, and `capture`, tell apart."""
        rows = self.rows.without(set(KEYS) - {"capture", *kept}).summed()
        tables: dict[str, Any] = {}
        for column, table in TABLES.items():  # what no row refers to would be sent and compared for nothing
            values: Sequence[object] = getattr(self, table)
            numbers, at = np.unique(getattr(rows, column), return_inverse=True)
            tables[table] = [values[each] for each in numbers.tolist()] if column in kept else [_UNKNOWN[column]]
            rows = replace(rows, **{column: at})
        return replace(self, rows=rows, **tables)
