"""Adding up shares of samples by (interval, cell, site, address): sums that stay where they are while stalls stream by.

Each interval, cell and site that come together have a *block*: a place for each address of the cell. Adding is then one
indexed addition for a column, without sorting or hashing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.ranges import ranges

_MIN_CAPACITY = 16
_BITS = 31  # of a cell, and of a site
_LOW = (1 << _BITS) - 1
_NO_KEY = (1 << 63) - 1
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sums:
    """What was added up."""

    interval: _Ints  # [n]
    site: _Ints  # [n]
    address: _Ints  # [n], numbers
    values: NDArray[np.float64]  # [columns, n]


class CellAddresses:
    """The addresses of each cell, numbered within it as they come."""

    def __init__(self) -> None:
        """None yet."""
        self.cell = np.empty(0, np.int64)
        """Of each address: its cell."""
        self.place = np.empty(0, np.int64)
        """Of each address: which of its cell's it is, in the order in which they came."""
        self.count = np.zeros(0, np.int64)
        """Of each cell: how many there are."""

    def add(self, cells: _Ints, known_cells: int) -> None:
        """Takes in the next addresses, which are in these cells."""
        count = np.append(self.count, np.zeros(known_cells - len(self.count), np.int64))
        order = np.argsort(cells, kind="stable")
        within = np.empty(len(cells), np.int64)
        added = np.bincount(cells, minlength=len(count))
        within[order] = ranges(0, added)
        self.cell = np.append(self.cell, cells)
        self.place = np.append(self.place, count[cells] + within)
        self.count = count + added


class _Numbers:
    """Small numbers for keys, in the order in which they come."""

    def __init__(self) -> None:
        # The keys, ascending, the last of which is none; and their numbers.
        self._keys, self._numbers = np.array([_NO_KEY]), np.array([-1])

    def __len__(self) -> int:
        return len(self._keys) - 1

    def number(self, keys: _Ints) -> _Ints:
        """The number of each key: int64[n]. New ones get numbers above all others."""
        index = np.searchsorted(self._keys, keys)
        missing = self._keys[index] != keys
        if missing.any():
            new = np.unique(keys[missing])
            number = np.concatenate([self._numbers, len(self) + np.arange(len(new))])
            known = np.concatenate([self._keys, new])
            order = np.argsort(known)
            self._keys, self._numbers = known[order], number[order]
            index = np.searchsorted(self._keys, keys)
        return self._numbers[index]

    def keys(self) -> _Ints:
        """The key of each number."""
        keys = np.empty(len(self), np.int64)
        keys[self._numbers[:-1]] = self._keys[:-1]
        return keys


class Tally:
    """Columns of sums."""

    def __init__(self, columns: int) -> None:
        """All sums are 0."""
        self._columns = columns
        self._reset()

    def _reset(self) -> None:
        self._sums = [np.zeros(0) for _ in range(self._columns)]  # apart, so that they grow one after the other
        self.slots = 0
        """How many there are, in use or not."""
        self._groups = _Numbers()  # of intervals and cells
        self._blocks = _Numbers()  # of groups and sites
        self._first_slot, self._capacity = np.empty(0, np.int64), np.empty(0, np.int64)  # of each block

    def blocks(self, intervals: _Ints, cells: _Ints, sites: _Ints, count: _Ints) -> _Ints:
        """Where the block of each interval, cell and site begins: int64[n].

        Args:
            intervals: int64[n].
            cells: int64[n].
            sites: int64[n].
            count: int64[n], how many addresses each cell has by now.
        """
        blocks = self._blocks.number(self._groups.number(intervals << _BITS | cells) << _BITS | sites)
        new = np.zeros(len(self._blocks) - len(self._first_slot), np.int64)
        self._first_slot, self._capacity = np.append(self._first_slot, new), np.append(self._capacity, new)
        small = np.flatnonzero(self._capacity[blocks] < count)
        if len(small):
            self._grow(blocks[small], count[small])
        return self._first_slot[blocks]

    def _grow(self, blocks: _Ints, needed: _Ints) -> None:
        """Moves blocks to where they have more room than is needed now: behind all others."""
        blocks, first = np.unique(blocks, return_index=True)
        first_slot, capacity = self._first_slot[blocks], self._capacity[blocks]
        new_capacity = np.maximum(needed[first] + (needed[first] >> 2), _MIN_CAPACITY)
        new_first = self.slots + np.cumsum(new_capacity) - new_capacity
        self.slots += int(new_capacity.sum())
        old, new = ranges(first_slot, capacity), ranges(new_first, capacity)
        for column, sums in enumerate(self._sums):
            if self.slots > len(sums):
                more = np.zeros(self.slots + self.slots // 8)
                more[: len(sums)] = sums
                self._sums[column] = sums = more
            sums[new] = sums[old]
            sums[old] = 0
        self._first_slot[blocks], self._capacity[blocks] = new_first, new_capacity
        if self.slots > 2 * self._capacity.sum():
            self._compact()

    def _compact(self) -> None:
        """Moves all blocks together."""
        old = ranges(self._first_slot, self._capacity)
        self._first_slot = np.cumsum(self._capacity) - self._capacity
        self.slots = len(old)
        for column, sums in enumerate(self._sums):
            self._sums[column] = sums[old]

    def add(self, column: int, slots: _Ints, values: NDArray[np.float64]) -> None:
        """Adds values to sums: `places` are the beginning of a block plus an address's place in its cell."""
        np.add.at(self._sums[column], slots, values)

    def take(self, addresses: CellAddresses) -> Sums:
        """The sums of places where not all are 0; from then on it is empty."""
        nonzero = np.zeros(len(self._sums[0]), bool)
        for sums in self._sums:
            nonzero |= sums != 0
        used = np.flatnonzero(nonzero)
        order = np.lexsort((self._capacity, self._first_slot))  # behind those without room that begin there too
        block = order[np.searchsorted(self._first_slot[order], used, side="right") - 1]
        keys = self._blocks.keys()[block]
        group = self._groups.keys()[keys >> _BITS]
        # Addresses by cell and place in it.
        by_cell = np.lexsort((addresses.place, addresses.cell))
        first = np.searchsorted(addresses.cell[by_cell], group & _LOW)
        number = by_cell[first + used - self._first_slot[block]]
        values = np.empty((self._columns, len(used)))
        for column, sums in enumerate(self._sums):
            values[column] = sums[used]
            self._sums[column] = np.zeros(0)
        self._reset()
        return Sums(group >> _BITS, keys & _LOW, number, values)
