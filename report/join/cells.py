"""Finds the kernels that an address can belong to: those that contain it at some time and begin an instruction there.

A *cell* is a set of placements, together with the addresses that can belong to any of them. The placements of one
process in a cell are *versions*: they follow one another in time, as the process reuses the memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import distinct
from iaprof.formats.ranges import ranges
from iaprof.report.join.placements import Placed

_MOST_MEMBERS = 1 << 22  # placements, summed over all cells: honest captures have a few for each address
_FEWER = (256, 64, 16, 4)  # about how many a cell has at most where that would be more
_MIXER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: multiples in a row are spread evenly over 64 bits
NOWHERE = 0
"""The cell of addresses that are in no kernel."""


class Cells:
    """The cells of a capture. A cell is made when an address in it first appears."""

    def __init__(self, placed: Placed, mask: int, starts: Mapping[int, NDArray[np.uint64]] | None = None) -> None:
        """Prepares the search.

        Args:
            placed: the placements.
            mask: the address bits that records hold.
            starts: by placement: the offsets in bytes at which its instructions start; only for placements that
                overlap another process's.
        """
        self._placed, self._starts = placed, starts or {}
        self._mask = np.uint64(mask)
        placements = placed.placements
        self.pids = np.array([placement.pid for placement in placements], np.int64)
        self.since = np.array([placement.since for placement in placements], np.uint64)
        self.first = np.array([placement.address & mask for placement in placements], np.uint64)
        ends = self.first + np.array([max(placement.size, 1) for placement in placements], np.uint64)
        self._bounds = distinct(np.concatenate([self.first, ends]))
        self._low, self._high = np.searchsorted(self._bounds, self.first), np.searchsorted(self._bounds, ends)
        codes: dict[object, int] = {}
        self.code = np.array(
            [codes.setdefault((p.fingerprint or (p.name, p.size), p.address), len(codes)) for p in placements],
            np.int64,
        )
        """int64[placements]: equal for placements with the same code at the same address."""
        self._range_cell = np.full(len(self._bounds) + 1, -1, np.int64)  # by address range; -1: not made yet
        self._range_cell[0] = NOWHERE  # before the first bound
        self._narrowed: dict[tuple[int, ...], int] = {}
        self._mixed_ranges: set[int] = set()  # ranges where each address needs a look at its instructions
        self.members: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        """By cell: its placements, sorted by pid and time of compilation."""
        self._left = _MOST_MEMBERS
        self.cut: set[int] = set()
        """The cells that lack some of their placements."""
        begun, ended = (np.bincount(each + 1, minlength=len(self._bounds) + 2) for each in (self._low, self._high))
        self._depth = np.cumsum(begun - ended)  # by address range: how many placements contain it
        # Half of the placements have level 1 or more, a quarter 2 or more, and so on.
        mixed = np.maximum(np.arange(len(placements), dtype=np.uint64) * _MIXER, np.uint64(1)).astype(np.float64)
        self._level = np.maximum(63 - np.floor(np.log2(mixed)).astype(np.int64), 0)

    def cells_of(self, ips: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the cell of each address: int64[n].

        Args:
            ips: uint64[n], bytes, masked.
        """
        range_ids = np.searchsorted(self._bounds, ips, side="right")  # range i ends at bound i
        self._make_cells(np.unique(range_ids[self._range_cell[range_ids] < 0]))
        cells = self._range_cell[range_ids]
        if self._mixed_ranges:
            mixed = np.flatnonzero(np.isin(range_ids, list(self._mixed_ranges)))
            cells[mixed] = self._narrow(ips[mixed], cells[mixed])
        return cells

    def _make_cells(self, range_ids: NDArray[np.int64]) -> None:
        """Makes the cells of these address ranges, which are given in ascending order."""
        level = self._levels(self._depth[range_ids])
        placement, index = self._placements_of(range_ids, level)
        while len(empty := np.flatnonzero((np.bincount(index, minlength=len(range_ids)) == 0) & (level > 0))):
            level[empty] -= 1
            more, where = self._placements_of(range_ids[empty], level[empty])
            placement, index = np.append(placement, more), np.append(index, empty[where])
        self._left -= len(placement)
        order = np.lexsort((self.since[placement], self.pids[placement], index))
        ends = np.searchsorted(index[order], np.arange(len(range_ids) + 1))
        for at, number in enumerate(range_ids.tolist()):
            members = placement[order[ends[at] : ends[at + 1]]]
            self._range_cell[number] = cell = self._add(members)
            if level[at]:
                self.cut.add(cell)
            several = len(members) > 1 and self.pids[members[0]] != self.pids[members[-1]]
            if several and self._starts and (self.code[members] != self.code[members[0]]).any():
                self._mixed_ranges.add(number)

    def _levels(self, depth: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns which level a placement must have to be in each new cell: 0, unless they would be too many.

        Args:
            depth: int64[ranges], how many placements there are.
        """
        if depth.sum() <= self._left:
            return np.zeros(len(depth), np.int64)
        fits = (most for most in _FEWER if np.minimum(depth, most).sum() <= self._left // 2)
        return np.ceil(np.log2(np.maximum(depth / next(fits, _FEWER[-1]), 1))).astype(np.int64)

    def _placements_of(
        self, range_ids: NDArray[np.int64], level: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the placements of address ranges, of at least such a level, and the index of each one's range."""
        found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for least in np.unique(level).tolist():
            here, placements = np.flatnonzero(level == least), np.flatnonzero(self._level >= least)
            low, high = (np.searchsorted(range_ids[here], each[placements] + 1) for each in (self._low, self._high))
            found.append((np.repeat(placements, high - low), here[ranges(low, high - low)]))
        placement, index = (np.concatenate(each) for each in zip(*found, strict=True))
        return placement, index

    def _add(self, members: NDArray[np.int64]) -> int:
        if not len(members):
            return NOWHERE
        self.members.append(members)
        return len(self.members) - 1

    def _narrow(self, ips: NDArray[np.uint64], cells: NDArray[np.int64]) -> NDArray[np.int64]:
        """Replaces cells of several processes by those of the placements that begin an instruction at each address."""
        found = cells.copy()
        for cell in np.unique(cells).tolist():
            members = self.members[cell]
            here = np.flatnonzero(cells == cell)
            fits = np.ones((len(here), len(members)), bool)
            for column, placement in enumerate(members.tolist()):
                starts = self._starts.get(placement)
                if starts is not None:
                    fits[:, column] = np.isin((ips[here] - self.first[placement]) & self._mask, starts)
            fits[~fits.any(axis=1)] = True  # no instruction begins there: do not exclude any placement
            subsets, subset_of = np.unique(fits, axis=0, return_inverse=True)
            numbers = np.array([self._cell_of_subset(cell, members, subset) for subset in subsets], np.int64)
            found[here] = numbers[subset_of.reshape(-1)]
        return found

    def _cell_of_subset(self, cell: int, members: NDArray[np.int64], fits: NDArray[np.bool_]) -> int:
        if fits.all():
            return cell
        key = (cell, *np.flatnonzero(fits).tolist())
        if key not in self._narrowed:
            self._narrowed[key] = self._add(members[fits])
        return self._narrowed[key]
