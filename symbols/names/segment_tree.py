"""A segment tree: finds which of several overlapping address ranges was put on top of an address last.

The tree holds each range in at most two nodes per level. So thousands of ranges that all overlap, as those of many
processes or of a hostile capture do, cost little more than ranges that do not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import distinct
from iaprof.formats.ranges import ranges


class SegmentTree:
    """Events, each of which puts one address range on top of the others.

    A segment is what lies between two neighbouring bounds (starts or ends) of ranges: a leaf of the tree.
    """

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
            ends: uint64[ranges], the addresses after the last ones; an empty range covers nothing.
            times: uint64[events].
            range_of: int64[events], the range that the event puts on top. Of simultaneous events the last one wins.
        """
        self._bounds = distinct(np.concatenate([starts, ends]))
        self._leaves = 1 << len(self._bounds).bit_length()
        # An event's rank is its position in the order of time.
        self._event_of_rank = np.argsort(times, kind="stable")
        self._times = times[self._event_of_rank]
        nodes, range_ids = self._cover(np.searchsorted(self._bounds, starts), np.searchsorted(self._bounds, ends))
        # A node has the events of its ranges. A key is node and rank in one number; keys are sorted.
        range_of_rank = range_of[self._event_of_rank]
        ranks = np.argsort(range_of_rank, kind="stable")
        first, stop = (np.searchsorted(range_of_rank[ranks], range_ids, side=side) for side in ("left", "right"))
        count = stop - first
        self._keys = np.sort(np.repeat(nodes, count) * (len(times) + 1) + ranks[ranges(first, count)])

    def _cover(self, low: NDArray[np.int64], high: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Finds the nodes that together make up each range of segments [low, high).

        Returns:
            int64[n], nodes; int64[n], the index of each node's range.
        """
        low, high, index = low + self._leaves, high + self._leaves, np.arange(len(low))
        nodes, range_ids = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        while len(index):
            left = (low < high) & (low & 1 == 1)
            nodes.append(low[left])
            range_ids.append(index[left])
            low = low + left
            right = (low < high) & (high & 1 == 1)
            high = high - right
            nodes.append(high[right])
            range_ids.append(index[right])
            low, high = low >> 1, high >> 1
            go_on = low < high
            low, high, index = low[go_on], high[go_on], index[go_on]
        return np.concatenate(nodes), np.concatenate(range_ids)

    def segments(self, addresses: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the segment of each address, for `last`: int64[n]."""
        return np.searchsorted(self._bounds, addresses, side="right") - 1

    def last(self, segments: NDArray[np.int64], times: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the last event up to each time, inclusive, whose range has the segment: int64[n]; -1 for none."""
        best = np.full(len(segments), -1, np.int64)
        if not len(self._keys):
            return best
        width = len(self._times) + 1
        ranks = np.searchsorted(self._times, times, side="right")
        nodes = np.where(segments >= 0, segments + self._leaves, 0)
        while nodes.any():
            index = np.searchsorted(self._keys, nodes * width + ranks) - 1
            node_of_key, rank = np.divmod(self._keys[np.maximum(index, 0)], width)
            best = np.where((index >= 0) & (node_of_key == nodes), np.maximum(best, rank), best)
            nodes = nodes >> 1
        return np.where(best >= 0, self._event_of_rank[best], -1)
