"""How many different kernels were launched, and how many of them are known: for who watches a recording."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.launches import LaunchFlags


class Kernels:
    """How many different kernels were launched, and how many of them lie in a module that was taken."""

    def __init__(self) -> None:
        self._launched = np.empty(0, np.uint64)  # distinct addresses
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._matched = 0
        self._changed = False

    def launched(self, launches: NDArray[np.void]) -> None:
        """Kernels at these launches' addresses."""
        readable = (launches["flags"] & LaunchFlags.BAD_ARGS) == 0
        addresses = np.unique(launches["address"][readable] & np.uint64((1 << 48) - 1))
        if not np.isin(addresses, self._launched, assume_unique=True).all():
            self._launched = np.union1d(self._launched, addresses)
            self._changed = True

    def compiled(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Code that was taken, as (address, size)."""
        for address, size in ranges:
            start = address & ((1 << 48) - 1)
            self._starts.append(start)
            self._ends.append(start + size)
            self._changed = True

    def counts(self) -> tuple[int, int]:
        """How many were launched, and how many of them are known."""
        if self._changed:
            self._changed = False
            starts = np.sort(np.array(self._starts, np.uint64))
            ends = np.sort(np.array(self._ends, np.uint64))
            # inside something, where more ranges have begun than ended
            begun = np.searchsorted(starts, self._launched, "right")
            self._matched = int((begun > np.searchsorted(ends, self._launched, "right")).sum())
        return len(self._launched), self._matched
