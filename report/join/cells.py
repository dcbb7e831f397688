"""Finds the kernels that an address can belong to: those that contain it at some time and begin an instruction there.

A *cell* is a set of placements, together with the addresses that can belong to any of them. The placements of one
process in a cell are *versions*: they follow one another in time, as the process reuses the memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.ranges import ranges
from iaprof.report.join.placements import Placed
from iaprof.symbols.names.segment_tree import SegmentTree

_MAX_ENTRIES = 1 << 24  # placements, summed over all cells: honest captures have a few for each address
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
        self._bounds = np.unique(np.concatenate([self.first, ends]))
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
        self._entries = 0

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
        low, high = np.searchsorted(range_ids, self._low + 1), np.searchsorted(range_ids, self._high + 1)
        count = high - low
        self._entries += int(count.sum())
        if self._entries > _MAX_ENTRIES:
            self._make_cells_of_one(range_ids)
            return
        placement = np.repeat(np.arange(len(count)), count)
        range_id = ranges(low, count)
        order = np.lexsort((self.since[placement], self.pids[placement], range_id))
        ends = np.searchsorted(range_id[order], np.arange(len(range_ids) + 1))
        for index, number in enumerate(range_ids.tolist()):
            members = placement[order[ends[index] : ends[index + 1]]]
            self._range_cell[number] = self._add(members)
            several = len(members) > 1 and self.pids[members[0]] != self.pids[members[-1]]
            if several and self._starts and (self.code[members] != self.code[members[0]]).any():
                self._mixed_ranges.add(number)

    def _make_cells_of_one(self, range_ids: NDArray[np.int64]) -> None:
        """Makes cells of one placement each, the one that begins last: for captures with absurdly many overlaps."""
        ends = np.append(self._bounds, 0)[self._high]
        by_start = np.argsort(self.first, kind="stable")
        tree = SegmentTree(self.first, ends, np.arange(len(by_start), dtype=np.uint64), by_start)
        segments = tree.segments(self._bounds[range_ids - 1])
        last = by_start[tree.last(segments, np.full(len(range_ids), len(by_start), np.uint64))]
        for number, placement in zip(range_ids.tolist(), last.tolist(), strict=True):
            inside = self._low[placement] < number <= self._high[placement]
            self._range_cell[number] = self._add(np.array([placement])) if inside else NOWHERE

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
