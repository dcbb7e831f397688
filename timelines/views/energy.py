"""Energy of kernels over time, for the page: the table `energy` for equal spans of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.energy import NJ_PER_J
from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.intervals import FARTHEST, ends
from iaprof.timelines.options import Options
from iaprof.timelines.placeholders import placed
from iaprof.timelines.stages.energy import IDLE, Spent, device_powers
from iaprof.timelines.stages.summaries import NUMBER, PLACEHOLDER
from iaprof.timelines.trace import Trace
from iaprof.timelines.views.busy import span

_BINS = 400


@dataclass(frozen=True, eq=False)
class Energy:
    """Energy in equal spans of the time of all slices."""

    bins: int
    nanojoules: NDArray[np.int64]  # [rows, bins]
    calls: NDArray[np.int64]  # [rows, bins], slices that begin in a span
    ranks: list[int]
    totals: NDArray[np.int64]  # [ranks, bins], nJ of all kernels and copies of a rank, and of the idle device


def over_time(trace: Trace, rows: Sequence[tuple[int, str]]) -> Energy:
    """Returns the energy over time of some rows of the table `energy`: pids and names."""
    begin, end = span(trace)
    edges = begin + np.rint((end - begin) * (np.arange(_BINS + 1) / _BINS)).astype(np.int64)
    wanted = {row: number for number, row in enumerate(rows)}
    ranks = sorted({pid for pid, _ in rows})
    joules, calls = np.zeros((len(rows), _BINS)), np.zeros((len(rows), _BINS), np.int64)
    totals = np.zeros((len(ranks), _BINS))
    powers = device_powers(trace, Options())  # power from charge counters was computed by the stage
    running = np.flatnonzero(find(trace, Kind.DEVICE) & ~find(trace, Kind.PREPARATION) & placed(trace))
    ran = trace.slices.take(running, ("pid", "name", "start", "duration"))
    names = trace.texts.replaced(ran.name, NUMBER, PLACEHOLDER)
    starts, until = np.clip(ran.start, -FARTHEST, FARTHEST), ends(ran)
    for place, pid in enumerate(ranks):
        if pid not in powers:
            continue
        own = np.flatnonzero(ran.pid == pid)
        spent = Spent.of(powers[pid], starts[own], until[own])
        codes, name = np.unique(names[own], return_inverse=True)
        found, begun = _by_span(spent, starts[own], until[own], name, len(codes), edges)
        idle = np.diff(spent.at(spent.idle, edges))
        totals[place] = found.sum(axis=0) + idle
        for number, text in enumerate(trace.texts.taken(codes).to_pylist()):
            if (row := wanted.get((pid, text))) is not None:
                joules[row], calls[row] = found[number], begun[number]
        if (row := wanted.get((pid, IDLE))) is not None:
            joules[row] = idle
    return Energy(_BINS, _nanojoules(joules), calls, ranks, _nanojoules(totals))


def _nanojoules(joules: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns whole nanojoules of spans, such that their sums are the rounded sums."""
    reached = np.rint(np.cumsum(np.maximum(joules, 0) * NJ_PER_J, axis=1))
    return np.asarray(np.diff(reached, axis=1, prepend=0), np.int64)


def _by_span(
    spent: Spent,
    starts: NDArray[np.int64],
    until: NDArray[np.int64],
    name: NDArray[np.intp],
    count: int,
    edges: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns the joules of each of `count` names in each span, and how many slices begin in it."""
    bins = len(edges) - 1
    first = np.clip(np.searchsorted(edges, starts, "right") - 1, 0, bins - 1)
    last = np.maximum(np.clip(np.searchsorted(edges, until, "left") - 1, 0, bins - 1), first)
    at_start, at_end, at_edge = (spent.at(spent.each, each) for each in (starts, until, edges))

    def added(rows: NDArray[np.intp], place: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
        summed = np.bincount(name[rows] * bins + place, values, count * bins)
        return np.asarray(summed, np.float64).reshape(count, bins)

    inside, across = np.flatnonzero(first == last), np.flatnonzero(first != last)
    found = added(inside, first[inside], (at_end - at_start)[inside])
    found += added(across, first[across], at_edge[first[across] + 1] - at_start[across])
    found += added(across, last[across], at_end[across] - at_edge[last[across]])
    # Slices run during all of the spans in between.
    ones = np.ones(len(across))
    through = np.zeros((count, bins + 1))
    through[:, 1:] += added(across, first[across], ones)
    through[:, :bins] -= added(across, last[across], ones)
    found += np.cumsum(through[:, :bins], axis=1) * np.diff(at_edge)
    begun = added(np.arange(len(name)), first, np.ones(len(name)))
    return found, np.asarray(begun, np.int64)
