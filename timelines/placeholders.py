"""Which events have a placeholder for a time: runtimes write 0, -1 or the largest integer for an unknown one.

Such a time means nothing, so no span may begin or end there. The events stay in the trace and in sums.
timelines/reading/extent.py defines which times are placeholders; here, each file has its own clock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.quantities import counted
from iaprof.timelines.reading.extent import FAR_NS, FAR_SPANS, LATEST_NS
from iaprof.timelines.trace import Points, Slices, Trace

STAGE = "TIME"


def placed(trace: Trace) -> NDArray[np.bool_]:
    """Tells which slices have times that are not placeholders: bool[slices]."""
    return (
        _others(trace.slices.row, trace.slices_without_time) if len(trace.slices_without_time) else _all(trace.slices)
    )


def placed_points(trace: Trace, points: Points) -> NDArray[np.bool_]:
    """Tells which values of counters have times that are not placeholders: bool[n]."""
    return _others(points.row, trace.points_without_time) if len(trace.points_without_time) else _all(points)


def find_placeholders(trace: Trace) -> None:
    """Finds the slices and values of counters that have a placeholder for a time, and reports how many there are.

    Stages move times, so this is done once, before them.
    """
    slices, points = trace.slices, trace.points
    odd = _placeholders(slices.file, slices.start, slices.duration)
    trace.slices_without_time = slices.row[odd]
    odd = _placeholders(points.file, points.time, np.zeros(len(points)))
    trace.points_without_time = points.row[odd]
    kinds = ((len(trace.slices_without_time), "slice"), (len(trace.points_without_time), "counter value"))
    if found := " and ".join(counted(count, kind) for count, kind in kinds if count):
        text = f"Found {found} with a placeholder for the time, such as 0 or -1: no span of time includes their times"
        trace.messages.warn(STAGE, text)


def _all(columns: Slices | Points) -> NDArray[np.bool_]:
    return np.ones(len(columns), bool)


def _others(rows: NDArray[np.int64], without_time: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.asarray(np.isin(rows, without_time, invert=True), bool)


def _placeholders(
    file: NDArray[np.int32], start: NDArray[np.int64], duration: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Returns the rows of events with a placeholder for a time, in files that also have other times."""
    if not len(start) or (start.min() > 0 and start.max() + duration.max() < LATEST_NS):
        return np.empty(0, np.int64)
    end = start + np.maximum(np.nan_to_num(duration), 0)
    real = (start > 0) & (end < LATEST_NS)
    odd = np.flatnonzero(~real)
    first, last = np.full(int(file.max()) + 1, np.inf), np.full(int(file.max()) + 1, -np.inf)
    np.minimum.at(first, file[real], start[real].astype(float))
    np.maximum.at(last, file[real], end[real])
    far = np.maximum(FAR_NS, FAR_SPANS * (last - first))
    file, start, end = file[odd], start[odd], end[odd]
    away = np.maximum(first[file] - start, end - last[file])
    return np.asarray(odd[np.isfinite(first[file]) & (away > far[file])], np.int64)
