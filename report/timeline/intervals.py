"""Sets of intervals of time: unions, and how long they cover others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.report.timeline.trace import Slices

FARTHEST = 2**62
"""No time or duration of ours is farther from 0 than this many ns, so that sums stay integers of 64 bits."""


def ends(slices: Slices) -> NDArray[np.int64]:
    """Returns when slices end, in ns; a negative duration, or none, counts as 0."""
    durations = np.clip(np.nan_to_num(slices.duration), 0, FARTHEST)
    return np.clip(slices.start, -FARTHEST, FARTHEST) + np.rint(durations).astype(np.int64)


@dataclass(frozen=True)
class Union:
    """Times that at least one of some intervals covers: intervals that neither overlap nor touch, in order."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Union:
        """Returns the union of intervals in any order; empty ones do not count."""
        some = ends > starts
        order = np.argsort(starts[some], kind="stable")
        starts, ends = starts[some][order], ends[some][order]
        if not len(starts):
            return cls(starts, ends)
        reached = np.maximum.accumulate(ends)
        new = np.append(True, starts[1:] > reached[:-1])
        return cls(starts[new], reached[np.append(np.flatnonzero(new)[1:] - 1, len(starts) - 1)])

    @property
    def length(self) -> int:
        """Its ns."""
        return int((self.ends - self.starts).sum())

    def before(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many ns of it are before each of some times."""
        if not len(self.starts):
            return np.zeros(len(times), np.int64)
        lengths = np.append(0, np.cumsum(self.ends - self.starts))
        place = np.searchsorted(self.starts, times, side="right")
        last = np.maximum(place - 1, 0)
        inside = np.minimum(times, self.ends[last]) - self.starts[last]
        return np.asarray(np.where(place > 0, lengths[last] + inside, 0), np.int64)

    def within(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many ns of it are in each of some intervals."""
        return self.before(ends) - self.before(starts)
