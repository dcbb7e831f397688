"""Samples that were divided among the stacks that launched a kernel at about the same time: whose share is an estimate.

How many samples a frame has is certain where all stacks among which they were divided run through it, as through
`main`. docs/attribution.md says how samples are divided.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.stacks.trees import Tree

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


def divided_nodes(tree: Tree) -> _Ints:
    """Samples of each node that were divided between it and nodes beside it: int64[nodes]."""
    if tree.divided is None or not tree.divided.any():
        return np.zeros(len(tree.parent), np.int64)
    found = np.zeros(len(tree.parent))
    rows = np.flatnonzero(tree.divided)
    node, place, divided = tree.node[rows], tree.place[rows], tree.divided[rows]
    # Where the stacks of a place meet, and above, nothing of its samples is estimated.
    places, number = np.unique(place, return_inverse=True)
    np.add.at(found, node, divided)
    np.subtract.at(found, _meetings(tree, number, node, len(places)), np.bincount(number, divided, len(places)))
    sums: _Floats = tree.with_callees(found)
    return np.rint(np.maximum(sums, 0)).astype(np.int64)


def _meetings(tree: Tree, place: _Ints, node: _Ints, places: int) -> _Ints:
    """The innermost node that is above or at all nodes of each place: int64[places]."""
    depth = tree.depth()
    meeting = np.zeros(places, np.int64)
    while len(place):
        place, node = np.divmod(np.unique(place * len(depth) + node), len(depth))
        single = np.bincount(place, minlength=places)[place] == 1
        meeting[place[single]] = node[single]
        place, node = place[~single], node[~single]
        deepest = np.zeros(places, np.int64)
        np.maximum.at(deepest, place, depth[node])
        node = np.where(depth[node] == deepest[place], tree.parent[node], node)
    return meeting


def divided_rows(number: _Ints, place: _Ints, divided: NDArray[np.uint64]) -> _Ints:
    """What is an estimate of rows that are added up by numbers, which depend on the launch only: int64[n].

    Where a number has all divided samples of a place, it has them for certain.

    Args:
        number: int64[n].
        place: int64[n]: divided samples of one place are divided among its numbers.
        divided: uint64[n], samples.
    """
    both, both_of = np.unique(number * (int(place.max(initial=0)) + 1) + place, return_inverse=True)
    of_both = np.bincount(both_of, divided, len(both))[both_of]
    of_place = np.bincount(place, divided)[place] if len(place) else of_both
    return np.where(of_both < of_place, divided, 0).astype(np.int64)
