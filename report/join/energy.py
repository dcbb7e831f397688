"""The energy of GPUs over time, from a capture's metrics, and how much of it each read of stalls stands for.

A read's samples are of the time since the read before it, and share the energy of that time. How much of it the GPU was
busy is known from the utilization of its engines; the rest is idle. Where the capture says when each kernel ran, that
tells it more exactly: reads share the energy of the times in which kernels ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import number_texts, rows_where
from iaprof.formats.capture.limits import SENSORS
from iaprof.formats.capture.metrics import is_busy
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import READ_COLUMNS
from iaprof.formats.energy import MOST_J, NJ_PER_J, Energy
from iaprof.formats.ranges import groups
from iaprof.gpu.vendors import SAMPLE_ROWS
from iaprof.report.join.attribution import RowFilter
from iaprof.report.join.streams import Stream

_ENERGY, _POWER = ("energy-", "-J"), ("power-", "-W")
_PLACES = ("card", "pkg")  # what a card uses includes its package; these come first
_LONGEST_NS = 100_000_000  # before a read, that its samples stand for if nothing tells how busy the GPU was
_MOST_NS = 1 << 62
_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Meter:
    """A stream's share of the energy of its GPU: joules since the first measurement, straight between the times."""

    times: _Ints  # [n], ns, ascending
    used: _Floats  # [n], J
    busy: _Floats | None  # [n], of these while the GPU was busy; None if nothing tells
    running: tuple[_Ints, _Floats] | None = (
        None  # times and joules as above, but only while kernels ran, if that is known
    )

    @property
    def tells_busy(self) -> bool:
        """Whether it is known when the GPU was busy."""
        return self.busy is not None or self.running is not None

    def used_until(self, times: _Ints) -> _Floats:
        """Returns what was used until each time: float64[m], J."""
        return np.interp(times, self.times, self.used)

    def busy_until(self, times: _Ints) -> _Floats:
        """Returns what was used while busy, or all if nothing tells."""
        if self.busy is None and self.running is not None:
            return np.interp(times, *self.running)
        return np.interp(times, self.times, self.used if self.busy is None else self.busy)


@dataclass(frozen=True)
class StreamReads:
    """The reads of a stream: when, and the joules of each."""

    times: _Ints  # [n], ns, ascending, each once
    joules: _Floats  # [n], of a read; reads of the same time share


@dataclass(frozen=True)
class ReadEnergy:
    """The energy of a capture's reads."""

    reads: Mapping[int, StreamReads]  # by stream
    total: float  # J, in the time of the report
    busy: float | None  # J, of these while the GPUs were busy; None if nothing tells

    def of_reads(self, stream: int, times: NDArray[np.uint64]) -> _Floats:
        """Returns the joules of reads: float64[n]; 0 where nothing was measured."""
        own = self.reads.get(stream)
        if own is None:
            return np.zeros(len(times))
        place = np.searchsorted(own.times, np.minimum(times, np.uint64(_MOST_NS)).astype(np.int64))
        return own.joules[np.minimum(place, len(own.times) - 1)]

    def shared(self, sampled: float, selected: float) -> Energy:
        """Says what became of all; all reads with samples have `sampled` J, what is selected of them `selected`."""
        busy = sampled if self.busy is None else max(self.busy, sampled)
        total = max(round(self.total * NJ_PER_J), 0)
        kinds = [
            round(selected * NJ_PER_J),
            round((sampled - selected) * NJ_PER_J),
            round((busy - sampled) * NJ_PER_J),
        ]
        own: list[int] = []
        for kind in kinds:
            own.append(max(min(kind, total - sum(own)), 0))
        return Energy(own[0], own[1], own[2], total - sum(own))


def read_energy(capture: CaptureReader, known: Sequence[Stream], row_filter: RowFilter) -> ReadEnergy | None:
    """Reads the energy of a capture's GPUs; None if it has no such metric.

    Args:
        capture: an open capture, or a part of a merged one.
        known: its streams.
        row_filter: the times and streams that the report is about.

    Raises:
        CaptureError: the capture is damaged.
    """
    metrics = _read_metrics(capture)
    chosen = [stream for stream in known if row_filter.streams is None or stream.index in row_filter.streams]
    meters = {stream.index: meter for stream in chosen if (meter := _meter(metrics, stream, known)) is not None}
    if not meters:
        return None
    begin, end = min(row_filter.begin_ns, _MOST_NS), min(row_filter.end_ns, _MOST_NS - 1) + 1
    edges = np.array([begin, end])
    meters = _with_runs(capture, meters)
    busy = [float(np.diff(meter.busy_until(edges))[0]) for meter in meters.values() if meter.tells_busy]
    times = _read_times(capture, set(meters))
    reads = {stream: _reads(*times[stream], meters[stream], begin, end) for stream in times}
    return ReadEnergy(
        reads,
        sum(float(np.diff(meter.used_until(edges))[0]) for meter in meters.values()),
        sum(busy) if len(busy) == len(meters) else None,
    )


_Series = dict[tuple[int, str], tuple[_Ints, _Floats]]
"""By stream and name of a metric: times in ns, ascending, and values."""


def _read_metrics(capture: CaptureReader) -> _Series:
    found: dict[tuple[int, str], list[tuple[_Ints, _Floats]]] = {}
    for table in capture.tables("metric", ("time_ns", "stream", "name", "value")):
        keep = rows_where(table["name"], lambda name: name is not None and (_is_of_energy(name) or is_busy(name)))
        keep &= table["stream"].is_valid().to_numpy() & np.isfinite(table["value"].to_numpy())
        table = table.filter(pa.array(keep))
        texts: dict[str | None, int] = {}
        name = number_texts(table["name"], texts)
        stream = table["stream"].to_numpy().astype(np.int64)
        times, values = np.minimum(table["time_ns"].to_numpy(), np.uint64(_MOST_NS)), table["value"].to_numpy()
        names = list(texts)
        for key, own in groups(stream * len(names) + name):
            series = times[own].astype(np.int64), values[own]
            found.setdefault((key // len(names), names[key % len(names)] or ""), []).append(series)
        capture.check(len(found), SENSORS)
    return {key: _sorted(batches) for key, batches in found.items()}


def _is_of_energy(name: str) -> bool:
    return any(name.startswith(begin) and name.endswith(end) for begin, end in (_ENERGY, _POWER))


def _sorted(batches: list[tuple[_Ints, _Floats]]) -> tuple[_Ints, _Floats]:
    times, values = (np.concatenate(column) for column in zip(*batches, strict=True))
    times, first = np.unique(times, return_index=True)
    return times, values[first]


def _meter(metrics: _Series, stream: Stream, known: Sequence[Stream]) -> Meter | None:
    """Returns the meter of a stream; the streams of a GPU have equal shares of what its sensor says."""
    of_device = {each.index for each in known if each.device == stream.device}
    names = {key[1]: key for key in metrics if key[0] in of_device and _is_of_energy(key[1])}
    for begin, end in (_ENERGY, _POWER):
        places = sorted(name for name in names if name.startswith(begin))
        preferred = [f"{begin}{place}{end}" for place in _PLACES]
        found = next((metrics[names[each]] for each in [*preferred, *places] if each in names), None)
        if found is None or len(found[0]) < 2:
            continue
        times, values = found
        # Power is the mean since the row before. A counter that fell was reset.
        steps = np.diff(values) if begin == _ENERGY[0] else values[1:] * np.diff(times) / 1e9
        steps = np.where((steps > 0) & (steps <= MOST_J), steps, 0.0) / len(of_device)
        used = np.append(0.0, np.cumsum(steps))
        if used[-1] > MOST_J:
            return None
        return _with_busy(times, used, [metrics[key] for key in metrics if key[0] == stream.index and is_busy(key[1])])
    return None


def _with_busy(times: _Ints, used: _Floats, classes: list[tuple[_Ints, _Floats]]) -> Meter:
    """Adds how busy the GPU was, as its busiest class of engines: each value is of the time since the one before."""
    if not classes:
        return Meter(times, used, None)
    moments = np.unique(np.concatenate([moments for moments, _ in classes]))
    share = np.zeros(len(moments))
    for own, percent in classes:
        place = np.searchsorted(moments, own)
        share[place] = np.maximum(share[place], np.clip(percent, 0, 100) / 100)
    inside = moments[(moments > times[0]) & (moments < times[-1])]
    both = np.union1d(times, inside)
    until = np.interp(both, times, used)
    after = np.minimum(np.searchsorted(moments, both[1:]), len(moments) - 1)
    return Meter(both, until, np.append(0.0, np.cumsum(np.diff(until) * share[after])))


def _with_runs(capture: CaptureReader, meters: dict[int, Meter]) -> dict[int, Meter]:
    """Adds the energy of the times in which kernels ran, to meters of streams whose executions have times."""
    found: dict[int, list[tuple[_Ints, _Ints]]] = {}
    for table in capture.tables("execution", ("time_ns", "end_ns", "stream")):
        begins, ends = (
            np.minimum(table[name].to_numpy(), np.uint64(_MOST_NS)).astype(np.int64) for name in ("time_ns", "end_ns")
        )
        for stream, own in groups(table["stream"].to_numpy()):
            if stream in meters:
                found.setdefault(stream, []).append((begins[own], ends[own]))
    return meters | {
        stream: replace(meters[stream], running=_running(meters[stream], *map(np.concatenate, zip(*runs, strict=True))))
        for stream, runs in found.items()
    }


def _running(meter: Meter, begins: _Ints, ends: _Ints) -> tuple[_Ints, _Floats]:
    """Returns the energy that was used while at least one of these executions ran."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(np.maximum(begins, ends)[order])
    is_first = np.append(True, begins[1:] > ends[:-1])  # after a time in which nothing ran
    edges = np.stack([begins[is_first], ends[np.append(is_first[1:], True)]], axis=1).reshape(-1)
    times = np.sort(np.concatenate([edges, meter.times]), kind="stable")  # which is quick, as both are in order
    runs = np.searchsorted(edges, times[:-1], side="right") % 2 == 1
    return times, np.append(0.0, np.cumsum(np.diff(meter.used_until(times)) * runs))


def _read_times(capture: CaptureReader, streams: set[int]) -> dict[int, tuple[_Ints, _Ints]]:
    """Returns the times of all reads of these streams, and since when their samples can be, ns."""
    found: dict[int, list[tuple[_Ints, _Ints]]] = {}
    for table in (table for rows in SAMPLE_ROWS for table in capture.tables(rows.kind, READ_COLUMNS)):
        times, begins = (np.minimum(table[name].to_numpy(), np.uint64(_MOST_NS)) for name in ("time_ns", "begin_ns"))
        stream_of = table["stream"].to_numpy()
        for stream, own in groups(stream_of):
            if stream not in streams:
                continue
            found.setdefault(stream, []).append((times[own].astype(np.int64), begins[own].astype(np.int64)))
    return {
        stream: (np.concatenate([times for times, _ in each]), np.concatenate([begins for _, begins in each]))
        for stream, each in found.items()
    }


def _reads(times: _Ints, begins: _Ints, meter: Meter, begin_ns: int, end_ns: int) -> StreamReads:
    if meter.running is not None:
        return _overlapping_reads(times, begins, meter.running, begin_ns, end_ns)
    order = np.argsort(times, kind="stable")
    moments, first, count = np.unique(times[order], return_index=True, return_counts=True)
    before = np.append(begins[order][first][:1], moments[:-1])
    if meter.busy is None:
        before = np.maximum(before, moments - _LONGEST_NS)
    edges = np.clip(np.stack([before, moments]), begin_ns, end_ns)
    joules = meter.busy_until(edges[1]) - meter.busy_until(edges[0])
    return StreamReads(moments, np.maximum(joules, 0) / count)


def _overlapping_reads(
    times: _Ints, begins: _Ints, running: tuple[_Ints, _Floats], begin_ns: int, end_ns: int
) -> StreamReads:
    """Divides the energy of each time among the reads whose samples can be of it: samples may come late."""
    bounds, place = np.unique(np.concatenate([np.minimum(begins, times), times]), return_inverse=True)
    first, last = place[: len(times)], place[len(times) :]
    reads = np.cumsum(np.bincount(first, minlength=len(bounds)) - np.bincount(last, minlength=len(bounds)))[:-1]
    joules = np.maximum(np.diff(np.interp(np.clip(bounds, begin_ns, end_ns), *running)), 0)
    until = np.append(0.0, np.cumsum(joules / np.maximum(reads, 1) * (reads > 0)))
    own = np.maximum(until[last] - until[first], 0)
    moments, moment, count = np.unique(times, return_inverse=True, return_counts=True)
    return StreamReads(moments, np.bincount(moment, own) / count)
