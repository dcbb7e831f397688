"""The bandwidth of copies: of the bytes that slices name in the time that their counters give."""

from __future__ import annotations

import numpy as np

from iaprof.timelines.device_clock import counter_times
from iaprof.timelines.options import Options
from iaprof.timelines.trace import ABSENT, Trace
from iaprof.timelines.tracks import Spans, Track, add_sums

STAGE = "DTC"

# Copies, and the counters between which their data move: TS1 and TS2, TS4 and TS5.
DIRECTIONS = ((" DmaI", Track("BW DmaI", "Bytes"), (0, 1)), (" DmaO", Track("BW DmaO", "Bytes"), (3, 4)))


def compute_bandwidth(trace: Trace, options: Options) -> None:
    """Adds counters of the MB/s that move into and out of each rank's device."""
    slices = trace.slices
    without = 0
    for pattern, track, (first, last) in DIRECTIONS:
        copies = slices.take(trace.texts.matches(slices.name, pattern) & (slices.bytes != ABSENT))
        times = counter_times(trace.texts, copies, options.soc_mhz)
        cycles = copies.counters[:, last] - copies.counters[:, first]
        good = (times[:, first] != ABSENT) & (times[:, last] > times[:, first]) & (cycles > 0)
        without += int((~good).sum())
        copies, times, cycles = copies.take(good), times[good], cycles[good]
        rates = np.round(copies.bytes * options.soc_mhz / cycles, 3)
        add_sums(trace, track, Spans(copies.file, copies.pid, times[:, first], times[:, last], rates))
    if without:
        trace.messages.warn(
            STAGE, f"{without} copies have no time by their counters, so no bandwidth is shown for them"
        )
