"""Finds which slice of a thread is the innermost one around a time or around another slice, for all at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NOTHING = -1
_Ints = NDArray[np.int64]


class Nesting:
    """The slices of some threads. They need not nest: what crosses another one is simply not inside it."""

    def __init__(self, thread: _Ints, begin: _Ints, end: _Ints) -> None:
        """Sorts slices, int64[n] each: by thread, and outer ones before what they contain. Times in ns."""
        self.order = np.lexsort((-end, begin, thread))
        """int64[n]: the slices in that order, to which all numbers refer that methods return."""
        self.thread, self.begin, self.end = thread[self.order], begin[self.order], end[self.order]
        self._first = np.searchsorted(self.thread, self.thread)  # of each one's thread
        # The latest end of 1, 2, 4, 8, ... neighbours: to find the last slice before one that ends late enough.
        self._levels = [self.end]
        while len(self._levels[-1]) > 1:
            ends = self._levels[-1]
            padded = np.append(ends, np.iinfo(np.int64).min) if len(ends) % 2 else ends
            self._levels.append(np.maximum(padded[::2], padded[1::2]))

    def parents(self) -> _Ints:
        """Returns the innermost slice that contains each one wholly: int64[n]; NOTHING if there is none."""
        place = np.arange(len(self.end))
        found = self._last_reaching(place - 1, self.end)
        return np.where(found >= self._first, found, NOTHING)

    def around(self, thread: _Ints, time: _Ints) -> _Ints:
        """Returns the innermost slice of a thread around each time: int64[m]; NOTHING if there is none.

        A slice has its begin in it, and not its end.
        """
        low, high = np.searchsorted(self.thread, thread), np.searchsorted(self.thread, thread, "right")
        # The number of slices of the thread that began: ranks stand for times, so that a key has both.
        ranks = np.searchsorted(begins := np.sort(self.begin), time, "right")
        width = len(begins) + 1
        keys = self.thread * width + np.searchsorted(begins, self.begin, "right")
        begun = np.searchsorted(keys, thread * width + ranks, "right")
        found = self._last_reaching(np.clip(begun, low, high) - 1, time + 1)
        return np.where(found >= low, found, NOTHING)

    def _last_reaching(self, place: _Ints, until: _Ints) -> _Ints:
        """Returns the last slice at or before each place whose end is at or after a time; NOTHING if there is none."""
        node, found = place.copy(), np.full(len(place), NOTHING)
        level_of = np.full(len(place), NOTHING)
        open_ = np.flatnonzero(place >= 0)
        for level, ends in enumerate(self._levels):
            here = node[open_]
            reaches = ends[here] >= until[open_] if not level else np.zeros(len(here), bool)
            left = (here % 2 == 1) & ~reaches
            before = np.zeros(len(here), bool)
            before[left] = ends[here[left] - 1] >= until[open_][left]
            node[open_[before]] -= 1
            level_of[open_[reaches | before]] = level
            open_ = open_[~(reaches | before)]
            node[open_] >>= 1
        for level in range(len(self._levels) - 1, 0, -1):
            own = np.flatnonzero(level_of == level)
            right = np.minimum(2 * node[own] + 1, len(self._levels[level - 1]) - 1)
            node[own] = np.where(self._levels[level - 1][right] >= until[own], right, 2 * node[own])
            level_of[own] = level - 1
        known = level_of == 0
        found[known] = node[known]
        return found


def depths(parents: _Ints) -> _Ints:
    """Returns how many slices are around each one: int64[n]. Pointers double, so that depth costs little."""
    depth, ancestor = (parents >= 0).astype(np.int64), parents.copy()
    while (going := np.flatnonzero(ancestor >= 0)).size:
        above = ancestor[going]
        depth[going] += depth[above]
        ancestor[going] = ancestor[above]
    return depth
