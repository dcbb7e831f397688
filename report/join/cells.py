"""Which kernels an address can belong to: what lies there in some process at some time, and has an instruction there.

A *cell* is a set of placements that the addresses in it cannot tell apart. Within a cell, the placements of one
process are *versions*: one after the other, as memory is given to another kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.ranges import ranges
from iaprof.report.join.placements import Placed
from iaprof.symbols.names.layers import Layers

_MOST_ENTRIES = 1 << 24  # placements of cells, added up: honest captures have a few at an address
NOWHERE = 0
"""The cell of addresses that are in no kernel."""


class Cells:
    """The cells of a capture, made as addresses come that are in them."""

    def __init__(self, placed: Placed, mask: int, starts: Mapping[int, NDArray[np.uint64]] | None = None) -> None:
        """Prepares the search.

        Args:
            placed: the placements.
            mask: the bits of an address that records hold.
            starts: by placement: the offsets in bytes at which its instructions start, of those that lie over others.
        """
        self._placed, self._starts = placed, starts or {}
        self._mask = np.uint64(mask)
        placements = placed.placements
        self.pids = np.array([placement.pid for placement in placements], np.int64)
        self.since = np.array([placement.since for placement in placements], np.uint64)
        self.first = np.array([placement.address & mask for placement in placements], np.uint64)
        behind = self.first + np.array([max(placement.size, 1) for placement in placements], np.uint64)
        self._bounds = np.unique(np.concatenate([self.first, behind]))
        self._low, self._high = np.searchsorted(self._bounds, self.first), np.searchsorted(self._bounds, behind)
        codes: dict[object, int] = {}
        self.code = np.array(
            [codes.setdefault((p.fingerprint or (p.name, p.size), p.address), len(codes)) for p in placements],
            np.int64,
        )
        """Of each placement: a number that those have in common which are the same code at the same address."""
        self._piece_cell = np.full(len(self._bounds) + 1, -1, np.int64)  # the cell of a whole piece; -1: not made yet
        self._piece_cell[0] = NOWHERE  # before the first bound
        self._told_apart: dict[tuple[int, ...], int] = {}
        self._mixed: set[int] = set()  # pieces whose addresses are looked at one by one
        self.members: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        self._entries = 0

    def of(self, ips: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The cell of each address: int64[n]."""
        pieces = np.searchsorted(self._bounds, ips, side="right")  # piece p ends at bound p
        self._make(np.unique(pieces[self._piece_cell[pieces] < 0]))
        cells = self._piece_cell[pieces]
        if self._mixed:
            mixed = np.flatnonzero(np.isin(pieces, list(self._mixed)))
            cells[mixed] = self._tell_apart(ips[mixed], cells[mixed])
        return cells

    def _make(self, pieces: NDArray[np.int64]) -> None:
        """Makes the cells of these pieces, in ascending order."""
        low, high = np.searchsorted(pieces, self._low + 1), np.searchsorted(pieces, self._high + 1)
        count = high - low
        self._entries += int(count.sum())
        if self._entries > _MOST_ENTRIES:
            self._make_of_one_each(pieces)
            return
        placement = np.repeat(np.arange(len(count)), count)
        piece = ranges(low, count)
        order = np.lexsort((self.since[placement], self.pids[placement], piece))
        ends = np.searchsorted(piece[order], np.arange(len(pieces) + 1))
        for index, number in enumerate(pieces.tolist()):
            members = placement[order[ends[index] : ends[index + 1]]]
            self._piece_cell[number] = self._add(members)
            several = len(members) > 1 and self.pids[members[0]] != self.pids[members[-1]]
            if several and self._starts and (self.code[members] != self.code[members[0]]).any():
                self._mixed.add(number)

    def _make_of_one_each(self, pieces: NDArray[np.int64]) -> None:
        """Makes cells of absurdly many kernels that lie over each other: of the one that begins last, in each."""
        behind = np.append(self._bounds, 0)[self._high]
        by_start = np.argsort(self.first, kind="stable")
        layers = Layers(self.first, behind, np.arange(len(by_start), dtype=np.uint64), by_start)
        starts = layers.pieces(self._bounds[pieces - 1])
        last = by_start[layers.last(starts, np.full(len(pieces), len(by_start), np.uint64))]
        for number, placement in zip(pieces.tolist(), last.tolist(), strict=True):
            inside = self._low[placement] < number <= self._high[placement]
            self._piece_cell[number] = self._add(np.array([placement])) if inside else NOWHERE

    def _add(self, members: NDArray[np.int64]) -> int:
        if not len(members):
            return NOWHERE
        self.members.append(members)
        return len(self.members) - 1

    def _tell_apart(self, ips: NDArray[np.uint64], cells: NDArray[np.int64]) -> NDArray[np.int64]:
        """The cells of addresses in several processes' kernels: of those alone that have an instruction there."""
        found = cells.copy()
        for cell in np.unique(cells).tolist():
            members = self.members[cell]
            here = np.flatnonzero(cells == cell)
            fits = np.ones((len(here), len(members)), bool)
            for column, placement in enumerate(members.tolist()):
                starts = self._starts.get(placement)
                if starts is not None:
                    fits[:, column] = np.isin((ips[here] - self.first[placement]) & self._mask, starts)
            fits[~fits.any(axis=1)] = True  # nobody's instruction: then anybody's
            patterns, pattern_of = np.unique(fits, axis=0, return_inverse=True)
            numbers = np.array([self._pattern(cell, members, pattern) for pattern in patterns], np.int64)
            found[here] = numbers[pattern_of.reshape(-1)]
        return found

    def _pattern(self, cell: int, members: NDArray[np.int64], fits: NDArray[np.bool_]) -> int:
        if fits.all():
            return cell
        key = (cell, *np.flatnonzero(fits).tolist())
        if key not in self._told_apart:
            self._told_apart[key] = self._add(members[fits])
        return self._told_apart[key]
