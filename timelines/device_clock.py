"""When the device's counters TS1 to TS5 were read, by the host's clock.

A slice ends when the last counter of its window was read. The other counters were read earlier or later by the
difference of their cycles.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.columns import chunks
from iaprof.timelines.dialects import windows
from iaprof.timelines.intervals import FARTHEST
from iaprof.timelines.trace import ABSENT, Slices, Texts


def read(counters: NDArray[np.int64], indexes: NDArray[np.int8]) -> NDArray[np.int64]:
    """Returns one counter of each row: int64[n] of int64[n, 5]."""
    return np.asarray(counters[np.arange(len(counters)), indexes])


def whole(ns: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns times as whole ns. Halves go up: two times with the same fraction are rounded the same way."""
    return np.asarray(np.clip(np.nan_to_num(np.floor(ns + 0.5)), -FARTHEST, FARTHEST), np.int64)


def counter_offsets(texts: Texts, slices: Slices, soc_mhz: float) -> NDArray[np.float64]:
    """Returns when each counter was read, in ns after the slice's start: float64[n, 5]; NaN for absent counters.

    It is exact where float64 times are not: these resolve 256 ns at today's time since 1970.
    """
    last = read(slices.counters, windows(texts, slices.name)[1])[:, None]
    absent = (slices.counters == ABSENT) | (last == ABSENT)
    cycles = np.where(absent, 0, slices.counters) - np.where(absent, 0, last)
    return np.where(absent, np.nan, slices.duration[:, None] + cycles * (1e3 / soc_mhz))


def counter_time(texts: Texts, slices: Slices, counter: int, soc_mhz: float) -> NDArray[np.int64]:
    """Returns when one counter of each slice was read, in ns: int64[n]; ABSENT for absent counters."""
    last_of = windows(texts, slices.name)[1]
    last, this = slices.counters_by(last_of), slices.counter(counter)
    found = np.empty(len(slices), np.int64)
    start, duration = slices.start, slices.duration
    for chunk in chunks(len(slices)):
        absent = (this[chunk] == ABSENT) | (last[chunk] == ABSENT)
        cycles = np.where(absent, 0, this[chunk]) - np.where(absent, 0, last[chunk])
        offsets = np.where(absent, np.nan, duration[chunk] + cycles * (1e3 / soc_mhz))
        starts = np.clip(start[chunk], -FARTHEST, FARTHEST)
        found[chunk] = np.where(np.isnan(offsets), ABSENT, starts + whole(offsets))
    return found


def counter_times(texts: Texts, slices: Slices, soc_mhz: float) -> NDArray[np.int64]:
    """Returns when each counter was read, in ns: int64[n, 5]; ABSENT for absent counters."""
    offsets = counter_offsets(texts, slices, soc_mhz)
    starts = np.clip(slices.start, -FARTHEST, FARTHEST)
    return np.where(np.isnan(offsets), ABSENT, starts[:, None] + whole(offsets))
