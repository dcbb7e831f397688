"""Flows: events that name the same flow are its start, its steps and its end."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_MOST_OPEN = 1 << 19
START, STEP, END = "stf"
PHASES = START + STEP + END


@dataclass
class Flows:
    """The flows of a trace that have begun and not ended."""

    left_out: int = 0  # of which there were too many to remember: their next step is a start
    _open: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))  # ids, ascending

    def phases(
        self, ids: NDArray[np.uint64], times: NDArray[np.int64], is_last: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Returns for each time that an event names a flow an index into PHASES.

        Args:
            ids: uint64[n], in the order of the file.
            times: int64[n], ns.
            is_last: bool[n], whether the event ends the flow.
        """
        order = np.lexsort((times, ids))
        sorted_ids, ends = ids[order], is_last[order]
        first = np.append(True, sorted_ids[1:] != sorted_ids[:-1])[: len(ids)]
        last = np.append(first[1:], True)[: len(ids)]
        starts = first & ~np.isin(sorted_ids, self._open)
        starts[1:] |= ~first[1:] & ends[:-1]
        found = np.empty(len(ids), np.int64)
        found[order] = np.where(ends, PHASES.index(END), np.where(starts, PHASES.index(START), PHASES.index(STEP)))
        still_open = np.setdiff1d(self._open, sorted_ids[last & ends], assume_unique=True)
        self._open = np.union1d(still_open, sorted_ids[last & ~ends])
        if len(self._open) > _MOST_OPEN:
            self.left_out += len(self._open) - _MOST_OPEN
            self._open = self._open[:_MOST_OPEN]
        return found
