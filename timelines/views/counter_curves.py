"""Counters over time, as curves of bounded size: power, PT active, preparations, bandwidths, and imported ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import distinct_values
from iaprof.timelines.grouped import Groups
from iaprof.timelines.made_events import EVERYWHERE
from iaprof.timelines.trace import NO_TEXT, Trace
from iaprof.timelines.views import labels
from iaprof.timelines.views.busy import span

ALL_RANKS = "all ranks"
_MOST_CURVES = 64
_MOST_POINTS = 1000  # of a curve


@dataclass(frozen=True, eq=False)
class Curve:
    """A counter of a process: each value holds until the next one."""

    owner: str  # a rank, a process, or ALL_RANKS
    name: str
    unit: str
    time: NDArray[np.int64]  # [n], ns from the first slice's start on, ascending
    value: NDArray[np.float64]  # [n]


def curves(trace: Trace) -> tuple[list[Curve], int]:
    """Returns the curves of a trace's counters, those of all ranks first, and how many more there are.

    Of a curve with more than 1,000 values, each span of time has its largest value.
    """
    points = trace.points.take(np.isfinite(trace.points.value))
    begin, end = span(trace)
    time = np.clip(points.time, begin, end) - begin
    value, texts = points.value, trace.texts
    ranks = set(distinct_values(labels.ranks(trace)).tolist())
    of_curve = Groups(points.pid, points.name, points.series)
    found = []
    for first, count in zip(of_curve.firsts[:_MOST_CURVES].tolist(), of_curve.counts.tolist(), strict=False):
        rows = of_curve.order[first : first + count]
        rows = rows[np.argsort(time[rows], kind="stable")]
        if count > _MOST_POINTS:
            spans = Groups(time[rows] * _MOST_POINTS // (end - begin + 1))
            is_largest = value[rows] == spans.max(value[rows])[spans.numbers]
            _, largest = np.unique(spans.numbers[is_largest], return_index=True)
            rows = rows[is_largest][largest]
        pid, name, unit = (int(each[rows[0]]) for each in (points.pid, points.name, points.series))
        owner = ALL_RANKS if pid == EVERYWHERE else f"{'rank' if pid in ranks else 'process'} {pid}"
        name_, unit_ = (texts[code] if code != NO_TEXT else "" for code in (name, unit))
        found.append(Curve(owner, name_, unit_, time[rows], value[rows]))
    return found, len(of_curve) - len(found)
