"""Sets of intervals of time: unions, and how long they cover others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.trace import Slices

FARTHEST = 2**62
"""Times and durations are limited to this many ns from 0, so that sums fit into 64 bits."""


def ends(slices: Slices) -> NDArray[np.int64]:
    """Returns when slices end, in ns; a negative or absent duration counts as 0."""
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
        """The length in ns."""
        return int((self.ends - self.starts).sum())

    def before(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many ns of the union are before each time."""
        if not len(self.starts):
            return np.zeros(len(times), np.int64)
        lengths = np.append(0, np.cumsum(self.ends - self.starts))
        place = np.searchsorted(self.starts, times, side="right")
        last = np.maximum(place - 1, 0)
        inside = np.minimum(times, self.ends[last]) - self.starts[last]
        return np.asarray(np.where(place > 0, lengths[last] + inside, 0), np.int64)

    def within(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many ns of the union are in each interval."""
        return self.before(ends) - self.before(starts)


def lengths_of_unions(
    starts: NDArray[np.int64], ends: NDArray[np.int64], groups: NDArray[np.integer], count: int
) -> NDArray[np.int64]:
    """Returns the length of the union of each group's intervals, in ns: int64[count].

    There is no Python loop over groups: an untrusted trace can have as many groups as intervals.

    Args:
        starts: int64[n].
        ends: int64[n].
        groups: the group of each interval, 0 to count - 1.
        count: the number of groups.
    """
    some = ends > starts
    starts, ends, groups = starts[some], ends[some], groups[some]
    # One union of all intervals, in which each group has a range of numbers of its own.
    times = None
    low, high = (int(starts.min()), int(ends.max())) if len(starts) else (0, 0)
    if (high - low + 1) * count > FARTHEST:  # the ranges do not fit into 64 bits: use the ranks of times instead
        times, numbers = np.unique(np.concatenate([starts, ends]), return_inverse=True)
        starts, ends = numbers[: len(starts)], numbers[len(starts) :]
        low, high = 0, len(times)
    width = high - low + 1
    moved = groups.astype(np.int64) * width - low
    union = Union.of(starts + moved, ends + moved)
    group = union.starts // width
    found = np.zeros(count, np.int64)
    if times is None:
        np.add.at(found, group, union.ends - union.starts)
    else:
        np.add.at(found, group, times[union.ends - group * width] - times[union.starts - group * width])
    return found
