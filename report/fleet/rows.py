"""Rows of profiles as columns, and adding up those that are equal: what all arithmetic on many captures consists of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

KEYS = ("capture", "launch", "kernel", "code", "device", "offset", "time", "fork")
"""The columns that tell rows apart. A column that nobody asks for is 0 everywhere."""
VALUES = ("counts", "energy", "divided")
"""The columns that are added up."""


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
