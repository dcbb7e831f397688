"""A map of ids in columns: stacks come in millions, and a dict takes hundreds of bytes for each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MOST_APART = 64  # calls of `add` whose entries are kept apart


class IdMap:
    """Maps ids to numbers, both uint64: 16 bytes an entry. What is added first for an id stays."""

    def __init__(self) -> None:
        self._sorted: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]] = []  # each half as long as the one before
        self._added: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]] = []  # since then

    def add(self, ids: NDArray[np.uint64], numbers: NDArray[np.uint64]) -> None:
        """Adds uint64[n] ids and their numbers, of which an id that is there already gets none."""
        if len(ids):
            self._added.append((ids.copy(), numbers.astype(np.uint64)))
        if len(self._added) >= _MOST_APART:
            self._sort()

    def get(self, ids: NDArray[np.uint64], others: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Returns the numbers of uint64[n] ids; for ids that are not there, those of `others`, uint64[n]."""
        self._sort()
        found = others.copy()
        for known, numbers in reversed(self._sorted):  # the earliest at last: its numbers stay
            at, has = _find(known, ids)
            found[has] = numbers[at[has]]
        return found

    def has(self, ids: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Returns whether uint64[n] ids are there: bool[n]."""
        self._sort()
        found = np.zeros(len(ids), bool)
        for known, _ in self._sorted:
            found |= _find(known, ids)[1]
        return found

    def _sort(self) -> None:
        """Sorts what was added; then entries are sorted again as often as their number has doubled."""
        if not self._added:
            return
        self._sorted.append(_merged(self._added))
        self._added = []
        while len(self._sorted) > 1 and len(self._sorted[-2][0]) < 2 * len(self._sorted[-1][0]):
            self._sorted[-2:] = [_merged(self._sorted[-2:])]


def _find(known: NDArray[np.uint64], ids: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Returns where ids are among sorted ones, of which there are some, and whether they are there at all."""
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    return at, known[at] == ids


def _merged(
    parts: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]],
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns the entries of several parts, sorted by id, of each id the first one."""
    ids, numbers = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    is_first = np.append(True, ids[1:] != ids[:-1])
    return ids[is_first], numbers[order[is_first]]
