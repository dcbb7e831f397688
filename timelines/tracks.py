"""Counters that stages make: points of tracks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.texts import NO_TEXT
from iaprof.timelines.trace import MADE, Points, Trace

EVERYWHERE = -1
"""The pid of counters that are of all ranks."""
DECIMALS = 9
"""Sums of rates are rounded to this, so that what cancels out is 0."""


@dataclass(frozen=True)
class Track:
    """A counter."""

    name: str
    series: str  # the member of args, its unit
    category: str = ""


def add_points(
    trace: Trace,
    track: Track,
    file: NDArray[np.int32],
    pid: NDArray[np.int64],
    time: NDArray[np.int64],
    value: NDArray[np.float64],
) -> None:
    """Adds points of a track, and counts them."""
    count = len(time)
    if not count:
        return
    texts = trace.texts
    category = texts.code(track.category) if track.category else NO_TEXT
    made = Points(
        file=file.astype(np.int32),
        pid=pid.astype(np.int64),
        tid=np.zeros(count, np.int64),
        name=np.full(count, texts.code(track.name), np.int32),
        category=np.full(count, category, np.int32),
        series=np.full(count, texts.code(track.series), np.int32),
        time=time.astype(np.int64),
        value=value.astype(float),
        row=np.full(count, MADE, np.int64),
    )
    trace.points = trace.points.joined(made)
    trace.made[f"points of the counter {track.name}"] += count


@dataclass(frozen=True)
class Spans:
    """Values that hold for some time, in n rows."""

    file: NDArray[np.int32]
    pid: NDArray[np.int64]
    start: NDArray[np.int64]  # ns
    end: NDArray[np.int64]  # ns
    value: NDArray[np.float64]


def add_sums(trace: Trace, track: Track, spans: Spans, most: float | None = None) -> int:
    """Adds the sum of the values that hold at a time, for each pid: a point whenever one begins or ends.

    Args:
        trace: to which they are added.
        track: of the points.
        spans: what is added up.
        most: what is shown while a value above 100 holds, which percentages have by mistake only; the sum of others
            is then at most 100.

    Returns:
        how many sums of others were more.
    """
    times = np.concatenate([spans.start, spans.end])
    pids = np.concatenate([spans.pid, spans.pid])
    files = np.concatenate([spans.file, spans.file])
    steps = np.concatenate([spans.value, -spans.value])
    open_ = np.repeat(np.array([1, -1]), len(spans.start))
    order = np.lexsort((times, pids))
    times, pids, files = times[order], pids[order], files[order]
    last = np.append((times[1:] != times[:-1]) | (pids[1:] != pids[:-1]), True)[: len(times)]  # of an instant
    values = np.round(np.cumsum(steps[order])[last], DECIMALS)
    values[np.cumsum(open_[order])[last] == 0] = 0.0
    above = np.zeros(0, bool)
    if most is not None:
        wrong = np.cumsum((open_ * np.tile(spans.value > 100, 2))[order])[last] > 0
        above = ~wrong & (values > 100)
        values = np.where(wrong, most, np.minimum(values, 100))
    add_points(trace, track, files[last], pids[last], times[last], values)
    return int(above.sum())
