"""Adding up shares of samples by (cell, site, address): sums that stay where they are while stalls stream by.

Each cell and site that come together have a *block*: a place for each address of the cell. Adding is then one indexed
addition for a column, without sorting or hashing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_SMALLEST_BLOCK = 16
_SITE_BITS = 31
_NONE = (1 << 63) - 1
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sums:
    """What was added up."""

    site: _Ints  # [n]
    address: _Ints  # [n], numbers
    values: NDArray[np.float64]  # [n, columns]


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
        within[order] = np.arange(len(cells)) - np.searchsorted(cells[order], cells[order])
        self.cell = np.append(self.cell, cells)
        self.place = np.append(self.place, count[cells] + within)
        self.count = count + np.bincount(cells, minlength=len(count))


class Tally:
    """Columns of sums."""

    def __init__(self, columns: int) -> None:
        """All sums are 0."""
        self._sums = np.zeros((columns, 0))
        self._used = 0
        # Cells and sites in one number, ascending, the last of which is none; and the numbers of their blocks.
        self._known, self._number = np.array([_NONE]), np.zeros(1, np.int64)
        self._base, self._room = np.zeros(1, np.int64), np.zeros(1, np.int64)  # of each block

    def blocks(self, cells: _Ints, sites: _Ints, count: _Ints) -> _Ints:
        """Where the block of each cell and site begins: int64[n].

        Args:
            cells: int64[n].
            sites: int64[n].
            count: int64[n], how many addresses each cell has by now.
        """
        keys = cells << _SITE_BITS | sites
        index = np.searchsorted(self._known, keys)
        missing = np.flatnonzero(self._known[np.minimum(index, len(self._known) - 1)] != keys)
        if len(missing):
            self._meet(keys[missing])
            index = np.searchsorted(self._known, keys)
        numbers = self._number[index]
        small = np.flatnonzero(self._room[numbers] < count)
        for number, needed in dict(zip(numbers[small].tolist(), count[small].tolist(), strict=True)).items():
            self._move(number, needed)
        return self._base[numbers]

    def _meet(self, keys: _Ints) -> None:
        """Numbers new blocks, which have no room yet."""
        keys = np.unique(keys)
        known = np.concatenate([self._known, keys])
        number = np.concatenate([self._number, len(self._base) + np.arange(len(keys))])
        order = np.argsort(known)
        self._known, self._number = known[order], number[order]
        self._base, self._room = (np.append(each, np.zeros(len(keys), np.int64)) for each in (self._base, self._room))

    def _move(self, block: int, needed: int) -> None:
        """Gives a block more room, at the end of all others."""
        base, room = int(self._base[block]), int(self._room[block])
        new_room = max(_SMALLEST_BLOCK, needed, 2 * room if room else 0)
        if self._used + new_room > self._sums.shape[1]:
            more = np.zeros((len(self._sums), max(self._used + new_room, 3 * self._sums.shape[1] // 2)))
            more[:, : self._used] = self._sums[:, : self._used]
            self._sums = more
        new = self._used
        self._sums[:, new : new + room] = self._sums[:, base : base + room]
        self._sums[:, base : base + room] = 0
        self._base[block], self._room[block] = new, new_room
        self._used += new_room

    def add(self, column: int, places: _Ints, values: NDArray[np.float64]) -> None:
        """Adds values to sums: `places` are the beginning of a block plus an address's place in its cell."""
        np.add.at(self._sums[column], places, values)

    def take(self, addresses: CellAddresses) -> Sums:
        """The sums that are not 0; from then on all are 0."""
        used = np.flatnonzero(self._sums[:, : self._used].any(axis=0))
        keys = np.empty((len(self._base), 2), np.int64)
        keys[self._number] = np.stack([self._known >> _SITE_BITS, self._known & ((1 << _SITE_BITS) - 1)], axis=1)
        order = np.lexsort((self._room, self._base))  # behind those without room that begin there too
        block = order[np.searchsorted(self._base[order], used, side="right") - 1]
        # Addresses by cell and place in it.
        by_cell = np.lexsort((addresses.place, addresses.cell))
        first = np.searchsorted(addresses.cell[by_cell], keys[:, 0])
        number = by_cell[first[block] + used - self._base[block]]
        sums = Sums(keys[block, 1], number, self._sums[:, used].T.copy())
        self._sums[:, : self._used] = 0
        return sums
