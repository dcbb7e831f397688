"""How many launches and CPU samples have all their frames of Python, for the capture's header."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.header.python_counts import NOUNS, Completeness, PythonCounts
from iaprof.record.stacks.python_stacks import PythonStacks


class PythonCounting:
    """Counts what the stacks of launches and samples tell of Python."""

    def __init__(self, python: PythonStacks) -> None:
        """Begins with none; `python` knows the stacks."""
        self._python = python
        self._states: dict[str, Counter[int]] = {kind: Counter() for kind in NOUNS}  # how many have each Completeness
        self._none: Counter[str] = Counter()  # without one, of processes with an interpreter; by kind

    def add(self, kind: str, stacks: NDArray[np.uint64], pids: NDArray[np.uint32]) -> None:
        """Counts launches or samples.

        Args:
            kind: of KINDS.
            stacks: uint64[n], the ids of their stacks in the capture; 0 for none.
            pids: uint32[n], whose they are.
        """
        distinct, which = np.unique(stacks, return_inverse=True)
        states = self._python.states(distinct)[which]
        counts = np.bincount(states)
        self._states[kind].update({state: int(counts[state]) for state in np.flatnonzero(counts).tolist()})
        without = (states == Completeness.NONE) & (stacks != 0)
        self._none[kind] += int(np.isin(pids[without], self._python.pids).sum())

    def header(self) -> dict[str, dict[str, int]]:
        """For the capture's header: by kind, see PythonCounts.to_json."""
        return {kind: PythonCounts.from_counts(self._states[kind], self._none[kind]).to_json() for kind in NOUNS}
