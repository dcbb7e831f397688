"""The device's counters TS1 to TS5: their wraps, and the times of slices by them.

An operation has up to four slices, all with the same five counters. The end of a slice's name
tells its window, which is a phase of the operation: `k_1 Cmpt Exec` is between TS3 and TS4. The host measures the end
of a window more exactly than its start, so ends stay and starts move.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.quantities import counted
from iaprof.timelines.columns import chunks
from iaprof.timelines.device_clock import counter_offsets, whole
from iaprof.timelines.dialects import windows
from iaprof.timelines.intervals import FARTHEST
from iaprof.timelines.options import Options
from iaprof.timelines.placeholders import placed
from iaprof.timelines.trace import ABSENT, MADE, NO_TEXT, Slices, Trace

WRAP = 1 << 32
"""The counters have 32 bits."""
_SEPARATION_NS = 1e3 / 560
"""A slice that -s makes is longer than this, and shorter than its window by half of it, so that slices do not touch."""


def are_rising(slices: Slices) -> NDArray[np.bool_]:
    """Tells which slices have all five counters, none less than the one before."""
    counters, of_slice = slices.distinct_counters()
    return _of(of_slice, rising(counters))


def _of(of_slice: NDArray[Any] | None, values: NDArray[Any]) -> NDArray[Any]:
    """Returns the value of each slice, from the values of its distinct counters (Slices.distinct_counters)."""
    return values if of_slice is None else values[of_slice]


def rising(counters: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tells which rows have all five counters, none less than the one before: bool[n] of int64[n, 5]."""
    return np.asarray((counters != ABSENT).all(1) & (counters[:, 1:] >= counters[:, :-1]).all(1), bool)


def unwrap(trace: Trace) -> None:
    """Adds 2^32 to counters that wrapped since the one before, and sets `TSxOF` to the first of a slice."""
    counters, of_slice = trace.slices.distinct_counters()
    counters = counters.copy()
    negative = (counters < 0) & (counters != ABSENT)
    if count := int(_of(of_slice, negative.any(1)).sum()):
        counters[negative] = ABSENT
        trace.messages.warn("OVC", f"Left out counters below 0 of {counted(count, 'slice')}")
    used = np.ones(len(counters), bool)
    if of_slice is not None:
        used[:] = False
        used[of_slice] = True
    first = np.full(len(counters), NO_TEXT, np.int32)
    before = np.full(len(counters), ABSENT, np.int64)
    before_as_read = before.copy()
    for index in range(5):
        now = counters[:, index].copy()
        known = now != ABSENT
        # Counters with more than 32 bits do not wrap at 32.
        wrapped = used & known & (now < before) & (now >= 0) & (before_as_read <= WRAP)
        counters[wrapped, index] += WRAP
        if wrapped.any():
            first[wrapped & (first == NO_TEXT)] = trace.texts.code(f"TS{index + 1}")
        before = np.where(known, counters[:, index], before)
        before_as_read = np.where(known, now, before_as_read)
    trace.slices.set_distinct_counters(counters)
    if (first != NO_TEXT).any():
        trace.slices.extra["TSxOF"] = _of(of_slice, first)


def event_sanity_checks(trace: Trace, _: Options) -> None:
    """Removes counters that cannot be right: then each slice has five ascending counters, or none."""
    counters, of_slice = trace.slices.distinct_counters()
    some = (counters != ABSENT).any(1)
    missing = some & (counters == ABSENT).any(1)
    falling = some & ~missing & ~rising(counters)
    for mask, what in ((missing, "that lacked some of TS1 to TS5"), (falling, "in which TS1 to TS5 fell")):
        if count := int(_of(of_slice, mask).sum()):
            text = f"Left out the counters of {counted(count, 'slice')} {what}; their times are the host's"
            trace.messages.warn("OVC", text)
    if missing.any() or falling.any():
        trace.slices.set_distinct_counters(np.where((missing | falling)[:, None], ABSENT, counters))


def cycle_count_to_wallclock(trace: Trace, options: Options) -> None:
    """Makes slices as long as from TS1 to the last counter of their window; their ends stay."""
    _, last = windows(trace.texts, trace.slices.name)
    _set_durations(trace.slices, np.zeros_like(last), last, options.soc_mhz)


def tighten_hts_by_instr_type(trace: Trace, options: Options) -> None:
    """Makes slices as long as their window; their ends stay."""
    _set_durations(trace.slices, *windows(trace.texts, trace.slices.name), options.soc_mhz)


def _set_durations(slices: Slices, first: NDArray[np.int8], last: NDArray[np.int8], soc_mhz: float) -> None:
    begins, ends = slices.counters_by(first), slices.counters_by(last)
    starts, durations = slices.start.copy(), slices.duration.copy()
    for chunk in chunks(len(slices)):
        begin, end, start, before = begins[chunk], ends[chunk], starts[chunk], durations[chunk]
        usable = (begin != ABSENT) & (end >= begin)
        duration = np.minimum(np.where(usable, end - begin, 0) * (1e3 / soc_mhz), FARTHEST)
        starts[chunk] = np.where(usable, start + whole(before - duration), start)
        durations[chunk] = np.where(usable, duration, before)
    slices.start, slices.duration = starts, durations


def tripple_phased_events(trace: Trace, options: Options) -> None:
    """Cuts slices with counters into the phases DmaI, Cmpt and DmaO, and removes preparations.

    A slice of one phase remains, a little shorter. A slice of a whole operation becomes three, whose names end in the
    phase.
    """
    texts = trace.texts
    trace.keep(~(trace.slices.has_counters & texts.matches(trace.slices.name, " Prep")), "preparations, by -s")
    slices = trace.slices
    offsets = counter_offsets(texts, slices, options.soc_mhz)
    cut_up = slices.has_counters & placed(trace)
    whole_operations = cut_up
    phases = []
    for pattern, ending, first, last in ((" DmaI", "_DmaI", 0, 1), (" Cmpt", "_Cmpt", 2, 3), (" DmaO", "_DmaO", 3, 4)):
        in_phase = cut_up & texts.matches(slices.name, pattern)
        whole_operations = whole_operations & ~in_phase
        phases.append((in_phase, ending, first, last))
    pieces = [slices.take(~cut_up)]
    become = np.zeros(len(slices), np.int64)
    for in_phase, ending, first, last in phases:
        length = offsets[:, last] - offsets[:, first]
        rows = np.flatnonzero((in_phase | whole_operations) & (length >= _SEPARATION_NS))
        piece = slices.take(rows)
        piece.unpack("name", "row")
        piece.start = piece.start + whole(offsets[rows, first])
        piece.duration = whole(length[rows] - _SEPARATION_NS / 2).astype(np.float64)
        cut = whole_operations[rows]
        piece.name[cut] = texts.replaced(piece.name[cut], "$", ending)
        piece.row[become[rows] > 0] = MADE
        become[rows] += 1
        pieces.append(piece)
    if short := int((cut_up & (become == 0)).sum()):
        trace.dropped["parts too short for -s"] += short
    if more := int(np.maximum(become - 1, 0).sum()):
        trace.made["parts of operations, by -s"] += more
    trace.slices = pieces[0].joined(pieces[1]).joined(pieces[2]).joined(pieces[3])
