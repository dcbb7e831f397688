"""Makes time series of a capture's metrics: frequency, engine utilization, power, and processes' CPU usage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.metrics import CPU_USE
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct_rows, sum_groups
from iaprof.formats.export import Series
from iaprof.report.join.streams import streams
from iaprof.report.parts import host_of, starts_ns
from iaprof.report.profile import ReportOptions
from iaprof.report.views.cpu_profile import process_names

MAX_SERIES = 64
MAX_PROCESSES = 8
MAX_POINTS = 100_000
_MAX_VALUE = 1e15  # higher values are damage; sums of lower ones stay finite
_MAX_NS = (1 << 62) - 1  # of times, so that differences fit into 63 bits
_COLUMNS = ("time_ns", "stream", "pid", "name", "value")
_NO_STREAM, _NO_PID = 1 << 16, 1 << 32
_ORDER = ("frequency-actual", "busy-", "power-", "frequency-", "temperature-", "fan-")
_GT_METRICS = ("frequency-", "busy-")  # other metrics are of the whole card
_ROWS_AT_ONCE = 1 << 20

_Key = tuple[str, str]  # the metric's name; the GPU or process
_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass
class _Summary:
    """Number, sum and time range of a series' values; times in ns since time 0."""

    count: int = 0
    total: float = 0.0
    first: int = _MAX_NS
    last: int = -_MAX_NS

    def width(self, most: int) -> int:
        """Returns the length of the time slices that become a point each, ns: 1 if there are at most `most` values."""
        return 1 if self.count <= most else -(-(self.last - self.first + 1) // most)


def series(capture: CaptureReader, options: ReportOptions, max_points: int = MAX_POINTS) -> list[Series]:
    """Makes time series of the selected times and devices: GPUs first, then the processes with the highest CPU usage.

    There are at most MAX_SERIES series, MAX_PROCESSES of these for processes. If a series has more than `max_points`
    values, its time is divided into that many equal slices, and a point is the mean time and value of a slice. Energy,
    which only ever grows, is left out if there is the power that follows from it.

    Args:
        capture: the open capture.
        options: the report's options.
        max_points: the limit on the points of a series.

    Raises:
        CaptureError: the capture is damaged.
        UsageError: the time range is in shares, and the recording's length is unknown.
    """
    parts = [_Part(part, start, options) for part, start in zip(capture.parts, starts_ns(capture), strict=True)]
    several = len({gpu for part in parts for gpu in part.gpus}) > 1
    for part in parts:
        part.shows_host, part.shows_gpu = len(parts) > 1, several
    found: dict[_Key, _Summary] = {}
    for part in parts:
        for keys, kind, since, values in part.rows():
            if not keys:
                continue
            order = np.argsort(kind, kind="stable")
            starts = np.searchsorted(kind[order], np.arange(len(keys)))
            sums = np.add.reduceat(values[order], starts).tolist()
            earliest, latest = (bound.reduceat(since[order], starts).tolist() for bound in (np.minimum, np.maximum))
            counts = np.diff(starts, append=len(kind)).tolist()
            for key, count, total, first, last in zip(keys, counts, sums, earliest, latest, strict=True):
                each = found.setdefault(key, _Summary())
                each.count += count
                each.total += total
                each.first, each.last = min(each.first, first), max(each.last, last)
    chosen = _select(found)
    number, begins, sums = _points(parts, chosen, [found[key] for key in chosen], max_points)
    seconds = (begins[number] + sums[:, 1] / sums[:, 0]) / 1e9
    means = sums[:, 2] / sums[:, 0]
    ends = np.searchsorted(number, np.arange(len(chosen) + 1))
    return [Series(*key, seconds[ends[n] : ends[n + 1]], means[ends[n] : ends[n + 1]]) for n, key in enumerate(chosen)]


class _Part:
    """The metrics of a part."""

    shows_host = shows_gpu = False  # whether series need the host's or the GPU's name to differ

    def __init__(self, capture: CaptureReader, start_ns: int, options: ReportOptions) -> None:
        self._capture, self._start_ns = capture, start_ns
        self._host = host_of(capture.header)
        self._row_filter = options.selection.row_filter(capture.header, start_ns)
        self._processes = process_names(capture.table("process", ("time_ns", "pid", "tid", "comm")))
        self._pids: _Ints | None = None  # None: all processes
        if options.selection.by_process:
            pids = options.selection.matching_pids(capture, self._processes)
            self._pids = np.array([_NO_PID, *sorted(pids)], np.int64)
        self._streams = _streams(capture.header)

    @property
    def gpus(self) -> set[_Key]:
        """The host and name of each GPU."""
        return {(self._host, gpu) for gpu, _ in self._streams}

    def rows(self) -> Iterator[tuple[list[_Key], _Ints, _Ints, _Floats]]:
        """Yields selected `metric` rows: keys of series, and by row the index of the key, ns since time 0, value."""
        for table in self._capture.tables("metric", _COLUMNS):
            times, values = table["time_ns"].to_numpy(), table["value"].to_numpy()
            stream, pid = (
                table[name].fill_null(pa.scalar(0, table[name].type)).to_numpy().astype(np.int64)
                for name in ("stream", "pid")
            )
            stream[_nulls(table["stream"])] = _NO_STREAM
            pid[_nulls(table["pid"])] = _NO_PID
            keep = (times >= np.uint64(self._row_filter.begin_ns)) & (times <= np.uint64(self._row_filter.end_ns))
            keep &= np.abs(values) <= _MAX_VALUE
            if self._row_filter.streams is not None:
                keep &= np.isin(stream, [_NO_STREAM, *self._row_filter.streams])
            if self._pids is not None:
                keep &= np.isin(pid, self._pids)
            since = np.minimum(times, np.uint64(_MAX_NS)).astype(np.int64) - self._start_ns
            names = table["name"].unify_dictionaries().combine_chunks()
            columns = [column[keep] for column in (stream, pid, names.indices.to_numpy())]
            first, kind = distinct_rows(*columns)
            texts = names.dictionary.to_pylist()
            kinds = zip(*(column[first].tolist() for column in columns), strict=True)
            keys = [self._key(of_stream, of_pid, texts[name]) for of_stream, of_pid, name in kinds]
            yield keys, kind, since[keep], values[keep]

    def _key(self, stream: int, pid: int, name: str) -> _Key:
        words = [self._host if self.shows_host else ""]
        if pid != _NO_PID:
            words += [self._processes.get(pid, ""), str(pid)]
        elif stream < len(self._streams):
            gpu, gt = self._streams[stream]
            words += [gpu if self.shows_gpu else "", gt if name.startswith(_GT_METRICS) else ""]
        elif stream != _NO_STREAM:
            words.append(f"stream {stream}")
        return name, " ".join(word for word in words if word)


def _nulls(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = column.is_null().to_numpy()
    return found


def _streams(header: dict[str, Any]) -> list[_Key]:
    """Returns each stream's GPU, and its tile and GT if the GPU has several streams."""
    names = [stream.device for stream in streams(header)]
    several = Counter(names)
    found = []
    for name, entry in zip(names, header.get("streams", ()), strict=False):
        numbers = [(what, entry.get(key)) for what, key in (("tile", "tile"), ("GT", "gt"))]
        gt = " ".join(f"{what} {number}" for what, number in numbers if type(number) is int)
        found.append((name, gt if several[name] > 1 else ""))
    return found


def _select(found: dict[_Key, _Summary]) -> list[_Key]:
    """Selects at most MAX_SERIES series, in the order in which they are shown."""

    def order(key: _Key) -> tuple[int, _Key]:
        return next((place for place, start in enumerate(_ORDER) if key[0].startswith(start)), len(_ORDER)), key

    processes = sorted((key for key in found if key[0] == CPU_USE), key=lambda key: (-found[key].total, key))
    gpus = sorted((key for key in found if key[0] != CPU_USE and not _is_in_power(key, found)), key=order)
    return gpus[: MAX_SERIES - MAX_PROCESSES] + processes[:MAX_PROCESSES]


def _is_in_power(key: _Key, found: dict[_Key, _Summary]) -> bool:
    """Whether this is an energy whose power is a series, too."""
    name, place = key
    subject = name.removeprefix("energy-").removesuffix("-J")
    return name == f"energy-{subject}-J" and (f"power-{subject}-W", place) in found


def _points(
    parts: Sequence[_Part], chosen: list[_Key], found: list[_Summary], most: int
) -> tuple[_Ints, _Ints, _Floats]:
    """Adds up the values of the selected series by time slice.

    Returns:
        The points' series, ascending: int64[n]; when each series begins: int64[series], ns; and for each point the
        number of values and the sums of times, ns since the series' begin, and of values: float64[n, 3].
    """
    numbers = {key: number for number, key in enumerate(chosen)}
    begins = np.array([each.first for each in found], np.int64)
    widths = np.array([each.width(most) for each in found], np.int64)
    waiting = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 3)))]
    rows = 0
    for part in parts:
        for keys, kind, since, values in part.rows():
            number = np.array([numbers.get(key, -1) for key in keys], np.int64)[kind]
            own = number >= 0
            number = number[own]
            time = since[own] - begins[number]
            waiting.append((number, time // widths[number], np.column_stack([np.ones(len(time)), time, values[own]])))
            rows += len(time)
            if rows > max(_ROWS_AT_ONCE, len(waiting[0][0])):
                waiting, rows = [_merge(waiting)], 0
    number, _, sums = _merge(waiting)
    return number, begins, sums


def _merge(batches: Sequence[tuple[_Ints, _Ints, _Floats]]) -> tuple[_Ints, _Ints, _Floats]:
    """Adds up rows of equal series and time slice, and sorts by these."""
    number, slice_, sums = (np.concatenate(column) for column in zip(*batches, strict=True))
    first, point = distinct_rows(number, slice_)
    return number[first], slice_[first], sum_groups(sums, point)
