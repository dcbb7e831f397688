"""A profile from `sample` rows: what was joined and named before it became a capture, as an imported text was."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct, summed
from iaprof.formats.profile import UNKNOWN_KERNEL, UNKNOWN_PROCESS, Code, Kernel, Launch, Profile
from iaprof.formats.writers.iaprof_text import UNKNOWN_FILE
from iaprof.gpu.intel.reasons import REASONS
from iaprof.report.join.attribution import MAX_INTERVALS
from iaprof.report.views.gauges import gauges_between

_ALIKE = 20  # intervals that differ by less than the 20th part are the same: Intel's are as exact as a timer's signal
_MOST_SAMPLES = 1 << 62
_END = (1 << 64) - 1  # of time
_LATEST = 1 << 62  # of times since the start, ns: a hundred years
_ROWS_AT_ONCE = 1 << 18
_WHERE = ("comm", "pid", "stack", "address", "kernel", "file", "mnemonic")


def profile_of(capture: CaptureReader, interval_ns: int, span: tuple[int, int] = (0, _END)) -> Profile:
    """The profile of a capture with `sample` rows, which are read group by group.

    Args:
        capture: the open capture.
        interval_ns: length of an interval; 0 for everything in one. When it is that of the imported intervals, these
            begin as they did.
        span: only samples of these times, ns, both inclusive.

    Raises:
        CaptureError: the capture is damaged.
    """
    start = _whole_number(capture.header.get("clock"), "monotonic_ns")
    imported = _whole_number(capture.header.get("imported"), "interval_ns")
    as_imported = interval_ns > 0 and abs(interval_ns - imported) * _ALIKE < imported
    rows = _Rows(start, 1 if as_imported else interval_ns)
    for table in capture.tables("sample"):
        times = table["time_ns"].to_numpy()
        within = (times >= np.uint64(span[0])) & (times <= np.uint64(span[1]))
        rows.add(table if within.all() else table.filter(pa.array(within)))
    if rows.samples > _MOST_SAMPLES:
        raise CaptureError(f"{capture.path} is damaged in its sample rows: their counts are absurdly high")
    (interval, launch, kernel, code, offset), counts = rows.result()
    since = interval.astype(np.int64)
    begins = _begins(capture, start, since) if as_imported else np.empty(0, np.int64)
    if as_imported:
        since = np.searchsorted(begins, since)
    intervals = int(since.max(initial=-1)) + 1
    if intervals > MAX_INTERVALS:
        raise CaptureError(f"the capture's samples span {intervals:,} intervals: choose longer ones with --interval")
    bounds = [start + begin for begin in begins[: intervals + 1].tolist()]
    if not as_imported:
        bounds = [start + interval_ns * number for number in range(intervals + 1)]
    elif len(bounds) == intervals:
        bounds.append(bounds[-1] + interval_ns)
    return Profile(
        list(rows.launches),
        list(rows.kernels),
        list(rows.codes),
        since,
        launch.astype(np.int64),
        kernel.astype(np.int64),
        code.astype(np.int64),
        offset,
        counts,
        np.zeros(len(counts), np.int64),
        REASONS,
        [begin / 1e9 for begin in bounds[:intervals]],
        ("",),
        gauges_between(capture, bounds) if interval_ns and intervals else {},
    )


class _Rows:
    """The distinct rows so far, in numbers, and what the numbers stand for."""

    def __init__(self, start: int, unit_ns: int) -> None:
        """Begins with none; times are counted in units from the start on, all as one where that is 0."""
        self.launches: dict[Launch | None, int] = {}
        self.kernels: dict[Kernel | None, int] = {}
        self.codes: dict[Code, int] = {}
        self.samples = 0.0
        self._start = start
        self._unit_ns = unit_ns or _LATEST + 1
        self._parts: list[NDArray[np.uint64]] = []  # [n, 15]: time, launch, kernel, code, offset, ten counts
        self._added_up = 0  # how many rows the first part has

    def add(self, table: pa.Table) -> None:
        """Takes one row group."""
        where, which = self._places(table)
        times = _since(table["time_ns"].to_numpy(), self._start) // self._unit_ns
        counts = np.stack([table[reason].to_numpy() for reason in REASONS], axis=1)
        self.samples += float(counts.sum(dtype=np.float64))
        keys = np.column_stack([times.astype(np.uint64), where[which], table["offset"].to_numpy()])
        self._parts.append(np.column_stack([keys, counts]))
        waiting = sum(map(len, self._parts)) - self._added_up
        if waiting > max(_ROWS_AT_ONCE, self._added_up):
            self._add_up()

    def result(self) -> tuple[list[NDArray[np.uint64]], NDArray[np.uint64]]:
        """Interval, launch, kernel, code and offset, in that order sorted [5][n]; and the counts [n, 10]."""
        self._add_up()
        return list(self._parts[0][:, :5].T.copy()), self._parts[0][:, 5:]

    def _add_up(self) -> None:
        rows = np.concatenate([np.empty((0, 5 + len(REASONS)), np.uint64), *self._parts])
        self._parts.clear()
        first, number = distinct(*rows[:, :5].T)
        rows = np.column_stack([rows[first, :5], summed(rows[:, 5:], number)])
        self._parts.append(rows)
        self._added_up = len(rows)

    def _places(self, table: pa.Table) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """The distinct launches, kernels and codes of a row group [k, 3], and which of them each row has [n]."""
        columns = []
        texts: dict[str, list[str]] = {}
        for name in _WHERE:
            column = table[name].combine_chunks()
            if pa.types.is_dictionary(column.type):
                texts[name] = column.dictionary.to_pylist()
                column = column.indices
            columns.append(column.to_numpy())
        first, which = distinct(*columns)
        found = []
        for comm, pid, stack, address, symbol, file, mnemonic in zip(
            *(c[first].tolist() for c in columns), strict=True
        ):
            launch = _launch(texts["comm"][comm], pid, texts["stack"][stack])
            name = texts["kernel"][symbol]
            kernel = _kernel(address, name, texts["file"][file])
            functions = (name,) if kernel or name != UNKNOWN_KERNEL else ()
            code = Code(texts["mnemonic"][mnemonic], functions, (0,) * len(functions))
            found.append(
                (
                    self.launches.setdefault(launch, len(self.launches)),
                    self.kernels.setdefault(kernel, len(self.kernels)),
                    self.codes.setdefault(code, len(self.codes)),
                )
            )
        return np.array(found, np.uint64).reshape(-1, 3), which


def _launch(comm: str, pid: int, stack: str) -> Launch | None:
    comm = "" if comm == UNKNOWN_PROCESS else comm
    frames = [] if stack in ("", UNKNOWN_PROCESS) else stack.split(";")
    if not (comm or pid or frames):
        return None
    users = len(frames)
    while users and frames[users - 1].endswith("_[k]"):
        users -= 1
    return Launch(comm, pid, tuple(frames[:users]), tuple(frame.removesuffix("_[k]") for frame in frames[users:]))


def _kernel(address: int, symbol: str, file: str) -> Kernel | None:
    file = "" if file == UNKNOWN_FILE else file
    # What is in brackets says what is not known, such as which of several processes' kernels it is.
    if not address and not file and symbol.startswith("[") and symbol.endswith("]"):
        return None
    return Kernel(address, symbol, file)


def _begins(capture: CaptureReader, start: int, sampled: NDArray[np.int64]) -> NDArray[np.int64]:
    """When the imported intervals began, ns since the start; metrics tell of those without stalls."""
    begins = np.unique(np.append(sampled, 0))
    for table in capture.tables("metric", ("time_ns",)):
        begins = np.union1d(begins, _since(table["time_ns"].to_numpy(), start))
    return begins


def _since(times: NDArray[np.uint64], start: int) -> NDArray[np.int64]:
    """How long after the start, ns; what is said to be before it was at the start."""
    since = np.maximum(times, np.uint64(start)) - np.uint64(start)
    return np.minimum(since, np.uint64(_LATEST)).astype(np.int64)


def _whole_number(entry: object, name: str) -> int:
    value = entry.get(name) if isinstance(entry, dict) else None
    return value if type(value) is int and 0 <= value < 1 << 63 else 0
