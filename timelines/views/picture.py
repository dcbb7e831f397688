"""The slices of each row over time, as boxes of bounded number: slices too short to be seen are drawn as one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.grouped import Groups
from iaprof.timelines.placeholders import placed
from iaprof.timelines.trace import Trace
from iaprof.timelines.views import labels, nesting
from iaprof.timelines.views.busy import classes, span

SEVERAL = -1  # the name of a box of several slices
_BINS = 4000  # over the whole time: a slice as long as one bin is a box of its own
_FEWEST_BINS = 125
_MOST_BOXES = 100_000
_MOST_ROWS = 200
_DEEPEST = 6  # slices around a slice that is drawn


@dataclass(frozen=True)
class Row:
    """A row of the picture."""

    rank: int
    is_device: bool
    pid: int
    tid: int
    depth: int


@dataclass(frozen=True, eq=False)
class Picture:
    """Boxes by row and time."""

    rows: list[Row]
    more: int  # rows that are not drawn
    hidden: int  # slices in rows that are not drawn, deeper than those, or without a time
    bin_ns: int  # ns: shorter slices are drawn together with others
    row: NDArray[np.int64]  # [boxes], index into rows, ascending
    start: NDArray[np.int64]  # [boxes], ns from the first slice's start on, ascending in a row
    length: NDArray[np.int64]  # [boxes], ns
    busy: NDArray[np.int64]  # [boxes], ns of slices
    name: NDArray[np.int64]  # [boxes], codes, or SEVERAL
    slices: NDArray[np.int64]  # [boxes], how many
    kind: NDArray[np.int64]  # [boxes], index into busy.CLASSES; -1 for those of hosts


def picture(trace: Trace, most: int = _MOST_BOXES) -> Picture:
    """Returns boxes for a trace's slices.

    Args:
        trace: after its stages.
        most: boxes, as far as rows allow.
    """
    slices = trace.slices
    device, ranks = labels.on_devices(trace), labels.ranks(trace)
    tracks = nesting.tracks(slices, ranks, device)
    start, until = nesting.times(slices)
    depth = nesting.depths(tracks.numbers, start, until)
    # By rank, a device's rows before a host's.
    rows = Groups(ranks, ~device, slices.pid, slices.tid, depth)
    keys = [rows.key(each).tolist() for each in (ranks, device, slices.pid, slices.tid, depth)]
    drawn = np.flatnonzero(rows.key(depth) <= _DEEPEST)[:_MOST_ROWS]
    place = np.full(len(rows), -1, np.int64)
    place[drawn] = np.arange(len(drawn))
    row = place[rows.numbers]
    kept = np.flatnonzero((row >= 0) & placed(trace))
    row, names = row[kept], labels.names(trace)[kept].astype(np.int64)
    begin, whole = span(trace)
    start, until, kind = start[kept] - begin, until[kept] - begin, classes(trace)[kept]
    bins = _BINS
    while True:
        width = max((whole - begin) // bins, 1)
        place_in = start // width
        alone = until - start >= width
        # Slices that are long enough are boxes of their own; of the others, those of a row that begin in one bin.
        number = np.where(alone, np.arange(len(row)) + 1, 0)
        boxes = Groups(row, place_in, number)
        if len(boxes) <= most or bins <= _FEWEST_BINS:
            break
        bins //= 2
    low, high = boxes.min(start), boxes.max(until)
    same = boxes.min(names) == boxes.max(names)
    order = np.lexsort((low, boxes.key(row)))
    busy = np.minimum(boxes.sum((until - start).astype(float)), high - low).astype(np.int64)
    name = np.where(same, boxes.key(names), SEVERAL)
    columns = (boxes.key(row), low, high - low, busy, name, boxes.counts, boxes.max(kind))
    shown = [Row(*(each[at] for each in keys)) for at in drawn.tolist()]
    hidden = len(slices) - len(kept)
    return Picture(shown, len(rows) - len(drawn), hidden, width, *(each[order] for each in columns))
