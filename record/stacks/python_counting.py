"""How many launches and CPU samples have complete Python frames, for the capture's header."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.header.stack_counts import NOUNS, Completeness, PythonCounts
from iaprof.record.stacks.python_stacks import PythonStacks


class PythonCounting:
    """Counts launches and CPU samples by the completeness of their stacks' Python frames."""

    def __init__(self, python: PythonStacks) -> None:
        """Begins without counts; `python` knows the stacks."""
        self._python = python
        self._states: dict[str, Counter[int]] = {kind: Counter() for kind in NOUNS}  # counts by Completeness, by kind
        self._none: Counter[str] = Counter()  # by kind: without Python frames, though their process has an interpreter

    def add(self, kind: str, stacks: NDArray[np.uint64], pids: NDArray[np.uint32]) -> None:
        """Counts launches or samples.

        Args:
            kind: `launches` or `cpu_samples`.
            stacks: uint64[n], the ids of their stacks in the capture; 0 for none.
            pids: uint32[n], their processes.
        """
        distinct, which = np.unique(stacks, return_inverse=True)
        states = self._python.states(distinct)[which]
        counts = np.bincount(states)
        self._states[kind].update({state: int(counts[state]) for state in np.flatnonzero(counts).tolist()})
        without = (states == Completeness.NONE) & (stacks != 0)
        self._none[kind] += int(np.isin(pids[without], self._python.pids).sum())

    def header(self) -> dict[str, dict[str, int]]:
        """Returns the member of the header: by kind, see PythonCounts.to_json."""
        return {kind: PythonCounts.from_counts(self._states[kind], self._none[kind]).to_json() for kind in NOUNS}
