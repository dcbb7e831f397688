"""What time-line viewers are shown of an export: what happened in each interval, and launches in rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.export import Export, Launches

_SHORTEST_S = 1e-6  # of a run, so that a single launch can be seen; runs of a row are farther apart than that


@dataclass(frozen=True, eq=False)
class Intervals:
    """Counts by interval: of those with any, and of those behind them, so that a viewer's curve goes back to 0."""

    place: str  # which GPU; "" when there is only one
    seconds: NDArray[np.float64]  # [n], when each begins, since time 0
    counts: NDArray[np.int64]  # [n, m]
    names: Sequence[str]  # [m], of what is counted


def stalls(export: Export) -> list[Intervals]:
    """Samples by reason of each GPU that has any."""
    profile = export.profile if export.by_time is None else export.by_time
    counts = profile.counts.astype(np.int64)
    found = []
    for number, device in enumerate(profile.devices):
        own = profile.device == number
        if own.any():
            place = device if len(profile.devices) > 1 else ""
            found.append(_by_interval(export, place, profile.interval[own], counts[own], profile.reasons))
    return found or [_by_interval(export, "", profile.interval, counts, profile.reasons)]


def cpu_samples(export: Export) -> Intervals | None:
    """CPU samples (m = 1); None where there are none."""
    cpu = export.cpu
    if cpu is None or not len(cpu.count):
        return None
    return _by_interval(export, "", cpu.interval, cpu.count.reshape(-1, 1), ("samples",))


def _by_interval(
    export: Export, place: str, interval: NDArray[np.int64], counts: NDArray[np.int64], names: Sequence[str]
) -> Intervals:
    numbers = np.unique(np.concatenate([interval, interval + 1]))
    found = np.zeros((len(numbers), counts.shape[1]), np.int64)
    np.add.at(found, np.searchsorted(numbers, interval), counts)
    return Intervals(place, numbers * export.interval_s, found, names)


def per_interval(export: Export, what: str) -> str:
    """What a curve is called: `stalls per 0.1 s`."""
    return f"{what} per {export.interval_s:g} s" if export.interval_s else what


def unit(metric: str) -> tuple[str, str]:
    """A metric's name without its unit, and the unit as people write it."""
    name, _, end = metric.rpartition("-")
    return (name, {"percent": "%", "C": "°C"}.get(end, end)) if name else (metric, "")


@dataclass(frozen=True, eq=False)
class Row:
    """The runs of one kernel by one thread; none overlaps another."""

    thread: int  # index into the threads of the launches
    kernel: int  # index into their kernels
    begins: list[float]  # seconds
    ends: list[float]  # seconds; at least a microsecond later
    counts: list[int]


def rows(launches: Launches) -> Iterator[Row]:
    """Launches in rows, thread by thread. Those of one thread can overlap: what ran meanwhile is in another row."""
    order = np.lexsort((launches.begin, launches.kernel, launches.thread))
    thread, kernel, begin, count = (getattr(launches, name)[order] for name in ("thread", "kernel", "begin", "count"))
    end = np.maximum(launches.end[order], begin + _SHORTEST_S)
    first = np.flatnonzero((np.diff(thread, prepend=-1) != 0) | (np.diff(kernel, prepend=-1) != 0))
    for start, stop in pairwise([*first.tolist(), len(order)]):
        own = slice(start, stop)
        yield Row(int(thread[start]), int(kernel[start]), begin[own].tolist(), end[own].tolist(), count[own].tolist())


def run_name(kernel: str, count: int) -> str:
    """What a run is called."""
    return kernel if count == 1 else f"{kernel} ×{count:,}"  # noqa: RUF001 (it is the sign of multiplication)
