"""The metrics of a capture as series over time: frequencies, busy engines, powers, what processes used of the CPUs."""

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
from iaprof.formats.distinct import distinct, summed
from iaprof.formats.export import Series
from iaprof.report.join.streams import streams
from iaprof.report.parts import host_of, starts_ns
from iaprof.report.profile import ReportOptions
from iaprof.report.views.cpu_profile import process_names

MOST_SERIES = 64
MOST_PROCESSES = 8
MOST_POINTS = 100_000
_MOST_VALUE = 1e15  # no GPU says so much of anything, and sums of it stay finite
_LATEST_NS = (1 << 62) - 1  # so that differences fit into 63 bits
_COLUMNS = ("time_ns", "stream", "pid", "name", "value")
_NO_STREAM, _NO_PID = 1 << 16, 1 << 32
_ORDER = ("frequency-actual", "busy-", "power-", "frequency-", "temperature-", "fan-")
_OF_GT = ("frequency-", "busy-")  # everything else is the whole card's
_ROWS_AT_ONCE = 1 << 20

_Key = tuple[str, str]  # name and place
_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


@dataclass
class _Found:
    """What there is of one series; times in ns since time 0."""

    count: int = 0
    total: float = 0.0
    first: int = _LATEST_NS
    last: int = -_LATEST_NS

    def width(self, most: int) -> int:
        """The length of the spans of which each is a point, ns: 1 where there are few enough values."""
        return 1 if self.count <= most else -(-(self.last - self.first + 1) // most)


def series(capture: CaptureReader, options: ReportOptions, most_points: int = MOST_POINTS) -> list[Series]:
    """The metrics of the wanted times and devices, those of GPUs first; of processes, those that used the CPUs most.

    There are MOST_SERIES at most, MOST_PROCESSES of these of processes. Where one has more than `most_points`, its time
    is cut into so many equal spans, each of which is one point: the mean of its times and values. Energy is left out
    where there is the power that follows from it: it only ever grows.

    Args:
        capture: the open capture.
        wanted: which part of it.
        most_points: of a series.

    Raises:
        CaptureError: the capture is damaged.
        UsageError: it has no such time.
    """
    parts = [_Part(part, start, options) for part, start in zip(capture.parts, starts_ns(capture), strict=True)]
    several = len({gpu for part in parts for gpu in part.gpus}) > 1
    for part in parts:
        part.says_host, part.says_gpu = len(parts) > 1, several
    found: dict[_Key, _Found] = {}
    for part in parts:
        for keys, kind, since, values in part.rows():
            for index, key in enumerate(keys):
                own = kind == index
                each = found.setdefault(key, _Found())
                each.count += int(own.sum())
                each.total += float(values[own].sum())
                each.first = min(each.first, int(since[own].min()))
                each.last = max(each.last, int(since[own].max()))
    chosen = _chosen(found)
    number, first, sums = _points(parts, chosen, [found[key] for key in chosen], most_points)
    seconds = (first[number] + sums[:, 1] / sums[:, 0]) / 1e9
    means = sums[:, 2] / sums[:, 0]
    ends = np.searchsorted(number, np.arange(len(chosen) + 1))
    return [Series(*key, seconds[ends[n] : ends[n + 1]], means[ends[n] : ends[n + 1]]) for n, key in enumerate(chosen)]


class _Part:
    """One of the recordings in a capture."""

    says_host = says_gpu = False  # whether that is needed to tell one place from others

    def __init__(self, capture: CaptureReader, start_ns: int, options: ReportOptions) -> None:
        self._capture, self._start_ns = capture, start_ns
        self._host = host_of(capture.header)
        self._row_filter = options.selection.row_filter(capture.header, start_ns)
        self._processes = process_names(capture.table("process", ("time_ns", "pid", "tid", "comm")))
        self._pids: _Ints | None = None  # None: of all processes
        if options.selection.by_process:
            pids = options.selection.matching_pids(capture, self._processes)
            self._pids = np.array([_NO_PID, *sorted(pids)], np.int64)
        self._streams = _streams(capture.header)

    @property
    def gpus(self) -> set[_Key]:
        """Host and name of each GPU."""
        return {(self._host, gpu) for gpu, _ in self._streams}

    def rows(self) -> Iterator[tuple[list[_Key], _Ints, _Ints, _Floats]]:
        """The `metric` rows that are wanted: series, and of each row which series, ns since time 0, and value."""
        for table in self._capture.tables("metric", _COLUMNS):
            times, values = table["time_ns"].to_numpy(), table["value"].to_numpy()
            stream, pid = (
                table[name].fill_null(pa.scalar(0, table[name].type)).to_numpy().astype(np.int64)
                for name in ("stream", "pid")
            )
            stream[_nulls(table["stream"])] = _NO_STREAM
            pid[_nulls(table["pid"])] = _NO_PID
            keep = (times >= np.uint64(self._row_filter.begin_ns)) & (times <= np.uint64(self._row_filter.end_ns))
            keep &= np.abs(values) <= _MOST_VALUE
            if self._row_filter.streams is not None:
                keep &= np.isin(stream, [_NO_STREAM, *self._row_filter.streams])
            if self._pids is not None:
                keep &= np.isin(pid, self._pids)
            since = np.minimum(times, np.uint64(_LATEST_NS)).astype(np.int64) - self._start_ns
            names = table["name"].unify_dictionaries().combine_chunks()
            columns = [column[keep] for column in (stream, pid, names.indices.to_numpy())]
            first, kind = distinct(*columns)
            texts = names.dictionary.to_pylist()
            kinds = zip(*(column[first].tolist() for column in columns), strict=True)
            keys = [self._key(of_stream, of_pid, texts[name]) for of_stream, of_pid, name in kinds]
            yield keys, kind, since[keep], values[keep]

    def _key(self, stream: int, pid: int, name: str) -> _Key:
        words = [self._host if self.says_host else ""]
        if pid != _NO_PID:
            words += [self._processes.get(pid, ""), str(pid)]
        elif stream < len(self._streams):
            gpu, gt = self._streams[stream]
            words += [gpu if self.says_gpu else "", gt if name.startswith(_OF_GT) else ""]
        elif stream != _NO_STREAM:
            words.append(f"stream {stream}")
        return name, " ".join(word for word in words if word)


def _nulls(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = column.is_null().to_numpy()
    return found


def _streams(header: dict[str, Any]) -> list[_Key]:
    """Of each stream its GPU; and where that has several, tile and GT."""
    names = [stream.device for stream in streams(header)]
    several = Counter(names)
    found = []
    for name, entry in zip(names, header.get("streams", ()), strict=False):
        numbers = [(what, entry.get(key)) for what, key in (("tile", "tile"), ("GT", "gt"))]
        gt = " ".join(f"{what} {number}" for what, number in numbers if type(number) is int)
        found.append((name, gt if several[name] > 1 else ""))
    return found


def _chosen(found: dict[_Key, _Found]) -> list[_Key]:
    """The series that there is room for, in their order."""

    def order(key: _Key) -> tuple[int, _Key]:
        return next((place for place, start in enumerate(_ORDER) if key[0].startswith(start)), len(_ORDER)), key

    processes = sorted((key for key in found if key[0] == CPU_USE), key=lambda key: (-found[key].total, key))
    gpus = sorted((key for key in found if key[0] != CPU_USE and not _is_in_power(key, found)), key=order)
    return gpus[: MOST_SERIES - MOST_PROCESSES] + processes[:MOST_PROCESSES]


def _is_in_power(key: _Key, found: dict[_Key, _Found]) -> bool:
    """Whether it is an energy of which there is the power."""
    name, place = key
    whose = name.removeprefix("energy-").removesuffix("-J")
    return name == f"energy-{whose}-J" and (f"power-{whose}-W", place) in found


def _points(parts: Sequence[_Part], chosen: list[_Key], found: list[_Found], most: int) -> tuple[_Ints, _Ints, _Floats]:
    """The points of the chosen series, in order: which series, where times count from, and sums of ones, times, values.

    Returns:
        int64[n], int64[series] in ns, float64[n, 3].
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
                waiting, rows = [_added_up(waiting)], 0
    number, _, sums = _added_up(waiting)
    return number, begins, sums


def _added_up(parts: Sequence[tuple[_Ints, _Ints, _Floats]]) -> tuple[_Ints, _Ints, _Floats]:
    """Series, span and sums, each series and span once, in order."""
    number, span, sums = (np.concatenate(column) for column in zip(*parts, strict=True))
    first, point = distinct(number, span)
    return number[first], span[first], summed(sums, point)
