"""The device's counters as times of the host, after the stages that put slices on the host's clock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.report.timeline.dialects import windows
from iaprof.report.timeline.intervals import FARTHEST, ends
from iaprof.report.timeline.trace import ABSENT, Slices, Trace


def counter_times(trace: Trace, soc_mhz: float, slices: Slices | None = None) -> NDArray[np.int64]:
    """Returns when the counters TS1 to TS5 of slices were read, as ns of the host's clock, [n, 5]; or ABSENT.

    A slice ends with the last counter of its window, so the others are as far from its end as their cycles say. These
    are integers: as float64, times since 1970 would be exact to 0.2 us only.

    Args:
        trace: whose slices they are.
        soc_mhz: the frequency of the counters.
        slices: some of them; None: all.
    """
    slices = trace.slices if slices is None else slices
    counters = slices.counters
    last = np.take_along_axis(counters, windows(trace, slices)[:, 1:], axis=1)
    away = (counters - last) * (1000 / soc_mhz)
    times = ends(slices)[:, None] + np.rint(np.clip(away, -FARTHEST, FARTHEST)).astype(np.int64)
    return np.where((counters == ABSENT) | (last == ABSENT), ABSENT, times)
