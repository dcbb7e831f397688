"""Adds up shares of samples by (interval, cell, site, address) while row groups of stalls stream by.

Each distinct (interval, cell, site) has a *block* of slots: one for each address of the cell. So adding is one indexed
addition for each column, without sorting or hashing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import order_by
from iaprof.formats.ranges import ranges

_MIN_CAPACITY = 16
_LINE_BYTES = 64
_BITS = 31  # of a cell's or a site's number in a key
_LOW = (1 << _BITS) - 1
_NO_KEY = (1 << 63) - 1
_RECENT_BITS = 16
_MIXER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sums:
    """Sums by (interval, site, address)."""

    interval: _Ints  # [n]
    site: _Ints  # [n]
    address: _Ints  # [n], the address's number
    values: NDArray[Any]  # [n, columns]


class Growing:
    """A column to which values are appended, often."""

    def __init__(self, type_: type[np.generic]) -> None:
        """Starts without values, which are of a type of NumPy."""
        self._room, self._length = np.empty(0, type_), 0

    @property
    def values(self) -> NDArray[Any]:
        """Returns all values: [length]."""
        return self._room[: self._length]

    def extend(self, values: NDArray[Any]) -> None:
        """Appends values."""
        length = self._length + len(values)
        if length > len(self._room):
            room = np.empty(2 * length, self._room.dtype)
            room[: self._length] = self.values
            self._room = room
        self._room[self._length : length] = values
        self._length = length


class CellAddresses:
    """The addresses of each cell, numbered within the cell in the order in which they first appear."""

    def __init__(self) -> None:
        """Starts without addresses."""
        self._cell, self._place = Growing(np.int64), Growing(np.int64)
        self.count = np.zeros(0, np.int64)
        """[cells]: the number of addresses in the cell."""

    def add(self, cells: _Ints, known_cells: int) -> _Ints:
        """Adds the next addresses; returns the place of each within its cell: int64[n].

        Args:
            cells: int64[n], the address's cell.
            known_cells: the number of cells made so far.
        """
        count = np.append(self.count, np.zeros(known_cells - len(self.count), np.int64))
        order = order_by(cells)
        within = np.empty(len(cells), np.int64)
        added = np.bincount(cells, minlength=len(count))
        within[order] = ranges(0, added)
        places = count[cells] + within
        self._cell.extend(cells)
        self._place.extend(places)
        self.count = count + added
        return np.asarray(places)

    def numbers(self, cells: _Ints, places: _Ints) -> _Ints:
        """Returns the number of the address that each cell has at each place: int64[n]."""
        cell = self._cell.values
        by_cell = order_by(cell, self._place.values)
        found: _Ints = by_cell[np.searchsorted(cell[by_cell], cells) + places]
        return found


class _Numbers:
    """Numbers keys 0, 1, 2, ... in the order in which they first appear."""

    def __init__(self) -> None:
        # The keys, ascending, and their numbers. A sentinel comes last.
        self._keys, self._numbers = np.array([_NO_KEY]), np.array([-1])
        # Some keys, each at the place that it has in a table, and their numbers: the same ones are asked for often.
        self._recent = np.full(1 << _RECENT_BITS, _NO_KEY)
        self._numbers_of_recent = np.empty(1 << _RECENT_BITS, np.int64)

    def __len__(self) -> int:
        return len(self._keys) - 1

    def number(self, keys: _Ints) -> _Ints:
        """Returns the number of each key: int64[n]. New keys get the next free numbers."""
        place = (keys.view(np.uint64) * _MIXER >> np.uint64(64 - _RECENT_BITS)).view(np.int64)
        numbers = self._numbers_of_recent[place]
        other = np.flatnonzero(self._recent[place] != keys)
        if len(other):
            keys, place = keys[other], place[other]
            numbers[other] = found = self._look_up(keys)
            self._recent[place], self._numbers_of_recent[place] = keys, found
        return numbers

    def _look_up(self, keys: _Ints) -> _Ints:
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
        """Returns the key that has each number: int64[numbers]."""
        keys = np.empty(len(self), np.int64)
        keys[self._numbers[:-1]] = self._keys[:-1]
        return keys


class Tally:
    """Sums in blocks of slots, with the same number of columns for each slot."""

    def __init__(self, columns: int, type_: type[np.generic] = np.float64) -> None:
        """Starts without blocks; sums are of a type of NumPy."""
        self._columns, self._type = columns, type_
        self._reset()

    def _reset(self) -> None:
        self._sums = self._zeros(0)  # [slots, columns]
        self.slots = 0
        """The number of slots, in use or not."""
        self._groups = _Numbers()  # of (interval, cell)
        self._blocks = _Numbers()  # of (group, site)
        self._first_slot, self._capacity = np.empty(0, np.int64), np.empty(0, np.int64)  # of each block

    def blocks(self, intervals: _Ints, cells: _Ints, sites: _Ints, count: _Ints) -> _Ints:
        """Returns the first slot of the block of each (interval, cell, site): int64[n]. Makes and grows blocks.

        Args:
            intervals: int64[n].
            cells: int64[n].
            sites: int64[n].
            count: int64[n], the current number of addresses in the cell.
        """
        blocks = self._blocks.number(self._groups.number(intervals << _BITS | cells) << _BITS | sites)
        new = np.zeros(len(self._blocks) - len(self._first_slot), np.int64)
        self._first_slot, self._capacity = np.append(self._first_slot, new), np.append(self._capacity, new)
        small = np.flatnonzero(self._capacity[blocks] < count)
        if len(small):
            self._grow(blocks[small], count[small])
        return self._first_slot[blocks]

    def _grow(self, blocks: _Ints, needed: _Ints) -> None:
        """Moves blocks behind all others, with more capacity than they need now."""
        blocks, first = np.unique(blocks, return_index=True)
        first_slot, capacity = self._first_slot[blocks], self._capacity[blocks]
        new_capacity = np.maximum(needed[first] + (needed[first] >> 2), _MIN_CAPACITY)
        before = self.slots
        new_first = before + np.cumsum(new_capacity) - new_capacity
        self.slots += int(new_capacity.sum())
        old, new = ranges(first_slot, capacity), ranges(new_first, capacity)
        self._reserve(self.slots, before)
        self._sums[new] = self._sums[old]
        self._sums[old] = 0
        self._first_slot[blocks], self._capacity[blocks] = new_first, new_capacity
        if self.slots > 2 * self._capacity.sum():
            self._compact()

    def _zeros(self, slots: int) -> NDArray[Any]:
        """Returns zeros, [slots, columns], that begin where a line of the CPU's caches does."""
        size = slots * self._columns * np.dtype(self._type).itemsize
        memory = np.zeros(size + _LINE_BYTES, np.uint8)
        begin = -memory.ctypes.data % _LINE_BYTES
        return memory[begin : begin + size].view(self._type).reshape(slots, self._columns)

    def _reserve(self, slots: int, used: int) -> None:
        """Makes room for so many slots, of which `used` have sums."""
        if slots > len(self._sums):
            more = self._zeros(slots + slots // 2)  # memory that is not used yet costs nothing
            more[:used] = self._sums[:used]
            self._sums = more

    def with_spare(self, slots: int) -> NDArray[Any]:
        """Returns the sums of all slots, and of so many behind them, which are 0: [self.slots + slots, columns].

        What is added to these, `take_spare` has to take before the next block is made.
        """
        self._reserve(self.slots + slots, self.slots)
        return self._sums[: self.slots + slots]

    def take_spare(self, slots: int) -> tuple[_Ints, NDArray[Any]]:
        """Returns which slots of those that `with_spare` gave are used, int64[n], and their sums, [n, columns].

        All are 0 then.
        """
        spare = self._sums[self.slots : self.slots + slots]
        used = _nonzero(spare)
        found = spare[used]
        spare[used] = 0
        return used, found

    def largest(self) -> int:
        """Returns the largest sum."""
        return int(self._sums.max(initial=0))

    def _compact(self) -> None:
        """Removes unused slots between blocks."""
        old = ranges(self._first_slot, self._capacity)
        self._first_slot = np.cumsum(self._capacity) - self._capacity
        self.slots = len(old)
        self._sums = self._sums[old]

    def add(self, column: int, slots: _Ints, values: NDArray[Any]) -> None:
        """Adds values to a column. A slot is a block's first slot plus the address's number within its cell."""
        np.add.at(self._sums[:, column], slots, values)

    def take(self, addresses: CellAddresses) -> Sums:
        """Returns the sums of slots that are not all 0, and empties the tally."""
        used = _nonzero(self._sums)
        order = np.lexsort(
            (self._capacity, self._first_slot)
        )  # of blocks with the same first slot, the one with slots is last
        block = order[np.searchsorted(self._first_slot[order], used, side="right") - 1]
        keys = self._blocks.keys()[block]
        group = self._groups.keys()[keys >> _BITS]
        number = addresses.numbers(group & _LOW, used - self._first_slot[block])
        values = self._sums[used]
        self._reset()
        return Sums(group >> _BITS, keys & _LOW, number, values)


def _nonzero(rows: NDArray[Any]) -> _Ints:
    """Returns the rows that are not all 0: int64[k]."""
    some = np.zeros(len(rows), bool)
    for column in range(rows.shape[1]):
        some |= rows[:, column] != 0
    return np.flatnonzero(some)
