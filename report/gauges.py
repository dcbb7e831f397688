"""Reads the GPUs' frequency and utilization in each interval from a capture's metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from iaprof.formats.capture.dictionaries import number_texts, rows_where
from iaprof.formats.capture.metrics import FREQUENCY_ACTUAL, is_busy
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.profile import Gauges

_KEYS = ["interval", "stream", "name"]
_MAX_VALUE = 1e6  # MHz, or percent; higher values are damage


def gauges(capture: CaptureReader, start_ns: int, interval_ns: int, intervals: int) -> dict[int, Gauges]:
    """Returns the gauges by interval, for intervals with metrics.

    Args:
        capture: the open capture.
        start_ns: when interval 0 starts, CLOCK_MONOTONIC ns.
        interval_ns: the length of an interval.
        intervals: the number of intervals; later metrics are ignored.

    Raises:
        CaptureError: the capture is damaged.
    """
    max_time = (1 << 64) - 1
    bounds = (start_ns + interval_ns * number for number in range(intervals + 1))
    return gauges_between(capture, [min(max(bound, 0), max_time) for bound in bounds])


def gauges_between(capture: CaptureReader, bounds: Sequence[int]) -> dict[int, Gauges]:
    """Returns the gauges by interval, for intervals of any length that have metrics.

    Args:
        capture: the open capture.
        bounds: when each interval starts, and when the last one ends, CLOCK_MONOTONIC ns. Earlier metrics count in the
            first interval; later ones are ignored.

    Raises:
        CaptureError: the capture is damaged.
    """
    sums_of_groups = []
    names: dict[str | None, int] = {}
    begins = np.array(bounds, np.uint64)
    for rows in capture.tables("metric", ("time_ns", "stream", "name", "value")):
        is_selected = pa.array(rows_where(rows["name"], lambda name: name == FREQUENCY_ACTUAL or is_busy(name or "")))
        rows = rows.set_column(2, "name", pa.array(number_texts(rows["name"], names))).filter(is_selected)
        times, values = rows["time_ns"].to_numpy(), rows["value"].to_numpy()
        interval = np.maximum(np.searchsorted(begins, times, "right") - 1, 0)
        rows = rows.append_column("interval", pa.array(interval))
        rows = rows.filter(pa.array((interval < len(bounds) - 1) & (values >= 0) & (values <= _MAX_VALUE)))
        sums_of_groups.append(rows.group_by(_KEYS).aggregate([("value", "sum"), ("value", "count")]))
    if not sums_of_groups:
        return {}
    sums = pa.concat_tables(sums_of_groups).group_by(_KEYS).aggregate([("value_sum", "sum"), ("value_count", "sum")])
    means = sums.append_column(
        "value", pc.divide(sums["value_sum_sum"], pc.cast(sums["value_count_sum"], pa.float64()))
    )
    is_frequency = pc.equal(means["name"], names.get(FREQUENCY_ACTUAL, -1))
    frequency = _by_interval(means.filter(is_frequency))
    busiest = means.filter(pc.invert(is_frequency)).group_by(_KEYS[:2]).aggregate([("value", "max")])
    busy = _by_interval(busiest.rename_columns({"value_max": "value"}))
    return {i: Gauges(frequency.get(i, 0.0), busy.get(i, 0.0)) for i in {*frequency, *busy}}


def _by_interval(rows: pa.Table) -> dict[int, float]:
    means = rows.group_by("interval").aggregate([("value", "mean")])
    return dict(zip(means["interval"].to_pylist(), means["value_mean"].to_pylist(), strict=True))
