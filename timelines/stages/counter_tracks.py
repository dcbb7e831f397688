"""Counters over time that slices make: open preparations of operations, and the bandwidth of copies.

Bandwidth is the bytes in the arguments of slices divided by the time between their counters.
"""

from __future__ import annotations

import numpy as np

from iaprof.timelines.device_clock import counter_times
from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.intervals import ends
from iaprof.timelines.made_events import Spans, Track, add_sums
from iaprof.timelines.options import Options
from iaprof.timelines.trace import ABSENT, Trace

TRACK = Track("ConcurrentPreps", "Concurrency", "Pending Prep Events")


def queueing_counter(trace: Trace, options: Options) -> None:
    """Adds a counter of open preparations, and drops their slices unless they are to be kept."""
    are = find(trace, Kind.PREPARATION)
    preparations = trace.slices.take(are, ("file", "pid", "start", "duration"))
    spans = Spans(
        preparations.file, preparations.pid, preparations.start, ends(preparations), np.ones(len(preparations))
    )
    add_sums(trace, TRACK, spans)
    if not options.keep_preparations:
        trace.keep(~are, "preparations, shown as a counter")


STAGE = "DTC"

# Copies, and the counters between which data are moved: TS1 and TS2, TS4 and TS5.
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
