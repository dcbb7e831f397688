"""Ranges of addresses that lie over each other, and which of them was last put on top of an address.

A segment tree holds each range in at most two nodes per level, so that thousands of ranges that all overlap, as those
of many processes or of a hostile capture do, cost little more than ranges that do not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.ranges import ranges


class Layers:
    """Events, each of which puts one range on top of the others."""

    def __init__(
        self,
        starts: NDArray[np.uint64],
        ends: NDArray[np.uint64],
        times: NDArray[np.uint64],
        range_of: NDArray[np.int64],
    ) -> None:
        """Builds the tree.

        Args:
            starts: uint64[ranges], first addresses.
            ends: uint64[ranges], the addresses behind the last; a range without bytes is nowhere.
            times: uint64[events].
            range_of: int64[events], which range it puts on top. Of events at one time the last one wins.
        """
        self._bounds = np.unique(np.concatenate([starts, ends]))
        self._pieces = 1 << len(self._bounds).bit_length()
        # An event's rank is its place in time.
        self._event_at = np.argsort(times, kind="stable")
        self._times = times[self._event_at]
        nodes, owners = self._cover(np.searchsorted(self._bounds, starts), np.searchsorted(self._bounds, ends))
        # Each node has the events of its ranges: as node and rank in one number, sorted.
        range_at = range_of[self._event_at]
        ranks = np.argsort(range_at, kind="stable")
        first, stop = (np.searchsorted(range_at[ranks], owners, side=side) for side in ("left", "right"))
        count = stop - first
        self._keys = np.sort(np.repeat(nodes, count) * (len(times) + 1) + ranks[ranges(first, count)])

    def _cover(self, low: NDArray[np.int64], high: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The nodes that together make up each range of pieces [low, high): nodes, and whose they are."""
        low, high, index = low + self._pieces, high + self._pieces, np.arange(len(low))
        nodes, owners = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        while len(index):
            left = (low < high) & (low & 1 == 1)
            nodes.append(low[left])
            owners.append(index[left])
            low = low + left
            right = (low < high) & (high & 1 == 1)
            high = high - right
            nodes.append(high[right])
            owners.append(index[right])
            low, high = low >> 1, high >> 1
            go_on = low < high
            low, high, index = low[go_on], high[go_on], index[go_on]
        return np.concatenate(nodes), np.concatenate(owners)

    def pieces(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The piece between neighbouring starts and ends that each address is in: int64[n], for `last`."""
        return np.searchsorted(self._bounds, addresses, side="right") - 1

    def last(self, pieces: NDArray[np.int64], times: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The last event up to `times`, inclusive, whose range contains each of `pieces`: int64[n]; -1 for none."""
        best = np.full(len(pieces), -1, np.int64)
        if not len(self._keys):
            return best
        width = len(self._times) + 1
        ranks = np.searchsorted(self._times, times, side="right")
        nodes = np.where(pieces >= 0, pieces + self._pieces, 0)
        while nodes.any():
            index = np.searchsorted(self._keys, nodes * width + ranks) - 1
            found, rank = np.divmod(self._keys[np.maximum(index, 0)], width)
            best = np.where((index >= 0) & (found == nodes), np.maximum(best, rank), best)
            nodes = nodes >> 1
        return np.where(best >= 0, self._event_at[best], -1)
