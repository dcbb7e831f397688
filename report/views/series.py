"""Makes time series of a capture's metrics: frequency, engine utilization, power, and processes' CPU usage."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats.capture.metrics import CPU_USE
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct_rows, sum_groups
from iaprof.formats.export import Series
from iaprof.report.join.streams import streams
from iaprof.report.parts import host_of, starts_ns
from iaprof.report.profile import ReportOptions
from iaprof.report.views.process_names import COLUMNS as NAMED_BY, process_names

MAX_SERIES = 64
MAX_PROCESSES = 8
MAX_POINTS = 100_000
_MAX_VALUE = 1e15  # higher values are damage; sums of lower ones stay finite
_MAX_NS = (1 << 62) - 1  # of times, so that differences fit into 63 bits
_COLUMNS = ("time_ns", "stream", "pid", "name", "value")
_NO_STREAM, _NO_PID = 1 << 16, 1 << 32
_ORDER = ("frequency-actual", "busy-", "power-", "frequency-", "temperature-", "fan-")
_GT_METRICS = ("frequency-", "busy-")  # other metrics are of the whole card
_ENERGY = re.compile(r"energy-(.*)-J", re.DOTALL)
_ROWS_AT_ONCE = 1 << 20

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


_SUMS = pa.schema(
    {"name": pa.string(), "place": pa.string(), "count": pa.int64(), "total": pa.float64()}
    | dict.fromkeys(("first", "last"), pa.int64())
)
"""A series' name, GPU or process, and the number, sum and time range of its values; times in ns since time 0."""


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
    tables = [_sums(*rows) for part in parts for rows in part.rows()]
    found = pa.concat_tables([_SUMS.empty_table(), *tables]).group_by(["name", "place"], use_threads=False)
    sums = [("count", "sum"), ("total", "sum"), ("first", "min"), ("last", "max")]
    chosen = _select(found.aggregate(sums).select(["name", "place", *map("_".join, sums)]).rename_columns(_SUMS.names))
    del tables, found
    number, begins, points = _points(parts, chosen, max_points)
    seconds = (begins[number] + points[:, 1] / points[:, 0]) / 1e9
    means = points[:, 2] / points[:, 0]
    ends = np.searchsorted(number, np.arange(len(chosen) + 1))
    return [
        Series(*key, seconds[ends[n] : ends[n + 1]], means[ends[n] : ends[n + 1]])
        for n, key in enumerate(_pairs(chosen))
    ]


def _sums(keys: pa.Table, kind: _Ints, since: _Ints, values: _Floats) -> pa.Table:
    """Summarizes the rows of each key, as _SUMS."""
    order = np.argsort(kind, kind="stable")
    starts = np.searchsorted(kind[order], np.arange(len(keys)))
    columns = [np.diff(starts, append=len(kind)), values[:0], since[:0], since[:0]]
    if len(keys):
        adding = ((np.add, values), (np.minimum, since), (np.maximum, since))
        columns[1:] = [function.reduceat(column[order], starts) for function, column in adding]
    return pa.Table.from_arrays([*keys.columns, *map(pa.array, columns)], schema=_SUMS)


class _Part:
    """The metrics of a part."""

    shows_host = shows_gpu = False  # whether series need the host's or the GPU's name to differ

    def __init__(self, capture: CaptureReader, start_ns: int, options: ReportOptions) -> None:
        self._capture, self._start_ns = capture, start_ns
        self._host = clean(host_of(capture.header))
        self._row_filter = options.selection.row_filter(capture.header, start_ns)
        self._processes = process_names(capture.table("process", NAMED_BY))
        self._pids: _Ints | None = None  # None: all processes
        if options.selection.by_process:
            pids = options.selection.matching_pids(capture, self._processes)
            self._pids = np.array([_NO_PID, *sorted(pids)], np.int64)
        self._streams = _streams(capture.header)
        self._named_pids = pa.array(list(self._processes), pa.int64())
        self._names = pa.array([f"{name} " for name in self._processes.values()], pa.string())

    @property
    def gpus(self) -> set[tuple[str, str]]:
        """The host and name of each GPU."""
        return {(self._host, gpu) for gpu, _ in self._streams}

    def rows(self) -> Iterator[tuple[pa.Table, _Ints, _Ints, _Floats]]:
        """Yields selected `metric` rows: names and places of series, and by row their index, ns since time 0, value."""
        for table in self._capture.tables("metric", _COLUMNS):
            times, values = table["time_ns"].to_numpy(), table["value"].to_numpy()
            stream, pid = (
                table[name].fill_null(pa.scalar(0, table[name].type)).to_numpy().astype(np.int64)
                for name in ("stream", "pid")
            )
            stream[_bools(table["stream"].is_null())] = _NO_STREAM
            pid[_bools(table["pid"].is_null())] = _NO_PID
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
            of_stream, of_pid, name = (column[first] for column in columns)
            texts = names.dictionary.take(pa.array(name))
            keys = pa.table({"name": texts, "place": self._places(of_stream, of_pid, texts)})
            yield keys, kind, since[keep], values[keep]

    def _places(self, stream: _Ints, pid: _Ints, names: pa.Array) -> pa.Array:
        """Returns the texts of processes, or of GPUs and GTs, at which metrics of these names were measured."""
        is_of_gt = np.logical_or(*(_bools(pc.starts_with(names, start)) for start in _GT_METRICS))
        pairs, pair_of = np.unique(stream * 2 + is_of_gt, return_inverse=True)
        gpus = pa.array([self._gpu(*divmod(pair, 2)) for pair in pairs.tolist()], pa.string())
        known = self._names.take(pc.index_in(pa.array(pid), self._named_pids)).fill_null("")
        host = pa.scalar(f"{self._host} " if self.shows_host and self._host else "")
        processes = pc.binary_join_element_wise(host, known, pa.array(pid).cast(pa.string()), "")
        return pc.if_else(pa.array(pid == _NO_PID), gpus.take(pa.array(pair_of)), processes)

    def _gpu(self, stream: int, is_of_gt: int) -> str:
        words = [self._host if self.shows_host else ""]
        if stream < len(self._streams):
            gpu, gt = self._streams[stream]
            words += [gpu if self.shows_gpu else "", gt if is_of_gt else ""]
        elif stream != _NO_STREAM:
            words.append(f"stream {stream}")
        return " ".join(word for word in words if word)


def _bools(column: pa.Array | pa.ChunkedArray) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.asarray(column, bool)
    return found


def _streams(header: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns each stream's GPU, and its tile and GT if the GPU has several streams."""
    names = [clean(stream.device) for stream in streams(header)]
    several = Counter(names)
    found = []
    for name, entry in zip(names, header.get("streams", ()), strict=False):
        numbers = [(what, entry.get(key)) for what, key in (("tile", "tile"), ("GT", "gt"))]
        gt = " ".join(f"{what} {number}" for what, number in numbers if type(number) is int)
        found.append((name, gt if several[name] > 1 else ""))
    return found


def _select(found: pa.Table) -> pa.Table:
    """Selects at most MAX_SERIES series, in the order in which they are shown."""
    is_of_process = pc.equal(found["name"], CPU_USE)
    highest = [("total", "descending"), ("place", "ascending")]
    processes = _first(found.filter(is_of_process), MAX_PROCESSES, highest)
    gpus = found.filter(pc.invert(is_of_process))
    names, name_of = _numbered(gpus["name"])
    ranks = [next((at for at, start in enumerate(_ORDER) if name.startswith(start)), len(_ORDER)) for name in names]
    gpus = gpus.append_column("rank", pa.array(np.array(ranks, np.int64)[name_of]))
    gpus = gpus.filter(pa.array(~_in_power(names, name_of, _numbered(gpus["place"])[1])))
    in_order = [(name, "ascending") for name in ("rank", "name", "place")]
    return pa.concat_tables([_first(gpus, MAX_SERIES - MAX_PROCESSES, in_order).select(_SUMS.names), processes])


def _first(table: pa.Table, most: int, keys: list[tuple[str, str]]) -> pa.Table:
    """Returns the first rows in the order of some columns."""
    return table.take(pc.select_k_unstable(table, most, keys))


def _numbered(texts: pa.ChunkedArray) -> tuple[list[str], _Ints]:
    """Returns the distinct texts, and the number of each row's text."""
    encoded = pa.array(texts.combine_chunks()).dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def _in_power(names: list[str], name: _Ints, place: _Ints) -> NDArray[np.bool_]:
    """Whether each series is an energy whose power is a series, too. `name` and `place` are numbers."""
    numbers = {text: number for number, text in enumerate(names)}
    energies = map(_ENERGY.fullmatch, names)
    powers = [-1 if energy is None else numbers.get(f"power-{energy[1]}-W", -1) for energy in energies]
    power = np.array(powers, np.int64)[name]
    places = int(place.max(initial=0)) + 1
    return (power >= 0) & np.isin(power * places + place, name * places + place)


def _points(parts: Sequence[_Part], chosen: pa.Table, most: int) -> tuple[_Ints, _Ints, _Floats]:
    """Adds up the values of the selected series by time slice.

    Returns:
        The points' series, ascending: int64[n]; when each series begins: int64[series], ns; and for each point the
        number of values and the sums of times, ns since the series' begin, and of values: float64[n, 3].
    """
    counts, begins, ends = (chosen[name].to_numpy() for name in ("count", "first", "last"))
    # The length of the time slices that become a point each, ns: 1 if there are at most `most` values.
    widths = np.where(counts <= most, 1, -(-(ends - begins + 1) // most))
    waiting = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 3)))]
    rows = 0
    for part in parts:
        for keys, kind, since, values in part.rows():
            number = _numbers(keys, chosen)[kind]
            own = number >= 0
            number = number[own]
            time = since[own] - begins[number]
            waiting.append((number, time // widths[number], np.column_stack([np.ones(len(time)), time, values[own]])))
            rows += len(time)
            if rows > max(_ROWS_AT_ONCE, len(waiting[0][0])):
                waiting, rows = [_merge(waiting)], 0
    number, _, sums = _merge(waiting)
    return number, begins, sums


def _numbers(keys: pa.Table, chosen: pa.Table) -> _Ints:
    """Returns the place of each key among the chosen ones; -1: it is none of them."""
    found = np.full(len(keys), -1, np.int64)
    likely = np.flatnonzero(np.logical_and(*(_bools(pc.is_in(keys[each], chosen[each])) for each in ("name", "place"))))
    numbers = {key: number for number, key in enumerate(_pairs(chosen))}
    found[likely] = [numbers.get(key, -1) for key in _pairs(keys.take(pa.array(likely)))]
    return found


def _pairs(keys: pa.Table) -> list[tuple[str, str]]:
    """Returns the names and places of series."""
    return list(zip(keys["name"].to_pylist(), keys["place"].to_pylist(), strict=True))


def _merge(batches: Sequence[tuple[_Ints, _Ints, _Floats]]) -> tuple[_Ints, _Ints, _Floats]:
    """Adds up rows of equal series and time slice, and sorts by these."""
    number, slice_, sums = (np.concatenate(column) for column in zip(*batches, strict=True))
    first, point = distinct_rows(number, slice_)
    return number[first], slice_[first], sum_groups(sums, point)
