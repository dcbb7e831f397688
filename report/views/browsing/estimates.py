"""Samples of a node that are an estimate: divided between stacks in the node and others (docs/attribution.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import distinct_rows
from iaprof.formats.profile import Profile

_OF_LAUNCHES = frozenset(("process", "operator", "cpu", "callers"))
_OF_OFFSETS = frozenset(("instruction", "place"))
_REASON = "reason"
_Ints = NDArray[np.int64]


class Estimates:
    """The divided entries of a tree, by place: entries of one place are divided among their stacks."""

    def __init__(self, profile: Profile, row: _Ints, reason: NDArray[np.int8], names: Sequence[str]) -> None:
        """Numbers the places.

        Args:
            profile: the stalls.
            row: [entries], the row of each entry.
            reason: [entries], its reason.
            names: the levels of the tree, from its root.
        """
        before = names[: max((at for at, name in enumerate(names) if name in _OF_LAUNCHES), default=0)]
        self._share: NDArray[np.float64] | None = None
        if profile.divided is None or not profile.divided.any() or not _OF_LAUNCHES.intersection(names):
            return
        columns: list[NDArray[Any]] = [profile.places[row]]
        # What is nearer to the root than the stacks is certain: only within it, samples are divided.
        if any(name not in _OF_LAUNCHES and name != _REASON for name in before):
            columns.append(profile.code[row])
        if _OF_OFFSETS.intersection(before):
            columns.append(profile.offset[row])
        if _REASON in before:
            columns.append(reason)
        self._place = distinct_rows(*columns)[1]
        self._share = (profile.divided / np.maximum(profile.counts.sum(axis=1), 1))[row]
        self.select(np.ones(len(row), bool))

    def select(self, is_selected: NDArray[np.bool_]) -> None:
        """Leaves out entries of some reasons and times, but not of some stacks: bool[entries]."""
        if self._share is not None:
            divided = self._place[(self._share > 0) & is_selected]
            self._in_place = np.bincount(divided, minlength=int(self._place.max(initial=0)) + 1)

    def of(self, entries: _Ints, weight: _Ints) -> int:
        """Samples of a node that are an estimate.

        Args:
            entries: [n], those of the node.
            weight: [entries of the tree], samples that are counted.
        """
        if self._share is None:
            return 0
        entries = entries[(self._share[entries] > 0) & (weight[entries] > 0)]
        places, place_of, here = np.unique(self._place[entries], return_inverse=True, return_counts=True)
        # A node with all entries of a place has their samples for certain.
        is_part = (here < self._in_place[places])[place_of]
        return round(float((self._share[entries] * weight[entries])[is_part].sum()))
