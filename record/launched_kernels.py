"""The numbers of a recording's status: distinct kernels that were launched, and those whose code was taken."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.launches import LaunchFlags
from iaprof.gpu.code import ADDRESS_MASK, canonical


class LaunchedKernels:
    """Counts the distinct kernels that were launched, and those of them in a code object that was taken."""

    def __init__(self) -> None:
        self._launched = np.empty(0, np.uint64)  # distinct addresses
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._matched = 0
        self._changed = False

    def add_launches(self, launches: NDArray[np.void]) -> None:
        """Adds the kernels of LAUNCH[n]."""
        readable = (launches["flags"] & LaunchFlags.BAD_ARGS) == 0
        addresses = np.unique(launches["address"][readable] & np.uint64(ADDRESS_MASK))
        if not np.isin(addresses, self._launched, assume_unique=True).all():
            self._launched = np.union1d(self._launched, addresses)
            self._changed = True

    def add_code(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Adds address ranges of code that was taken: (address, size)."""
        for address, size in ranges:
            start = canonical(address)
            self._starts.append(start)
            self._ends.append(start + size)
            self._changed = True

    def counts(self) -> tuple[int, int]:
        """Returns how many distinct kernels were launched, and how many of them have known code."""
        if self._changed:
            self._changed = False
            starts = np.sort(np.array(self._starts, np.uint64))
            ends = np.sort(np.array(self._ends, np.uint64))
            # A kernel is inside a range if more ranges have begun than ended at its address.
            begun = np.searchsorted(starts, self._launched, "right")
            self._matched = int((begun > np.searchsorted(ends, self._launched, "right")).sum())
        return len(self._launched), self._matched
