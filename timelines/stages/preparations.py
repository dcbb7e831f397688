"""How many preparations of operations are open at a time."""

from __future__ import annotations

import numpy as np

from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.intervals import ends
from iaprof.timelines.options import Options
from iaprof.timelines.trace import Trace
from iaprof.timelines.tracks import Spans, Track, add_sums

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
