"""Makes the report of a capture imported from another tool's text.

Its `sample` rows are stalls that the other tool has joined and symbolized.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.errors import UsageError
from iaprof.formats.capture.limits import IMPORTED, CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct_rows, sum_groups
from iaprof.formats.profile import UNKNOWN_KERNEL, UNKNOWN_PROCESS, Code, Kernel, Launch, Profile
from iaprof.formats.writers.iaprof_text import UNKNOWN_FILE
from iaprof.gpu.vendors import FIRST_REASONS as REASONS
from iaprof.report.facts import Facts, Matched, Report
from iaprof.report.gauges import gauges_between
from iaprof.report.join.attribution import MAX_INTERVALS
from iaprof.report.join.selection import Selection
from iaprof.report.profile import NO_INSTRUCTIONS

_TOLERANCE_DIVISOR = 20  # lengths within 5 % are the same interval: Intel's tool times intervals by a signal
_MAX_SAMPLES = 1 << 62
_MAX_NS = (1 << 64) - 1
_MAX_SINCE_NS = 1 << 62  # of times since the start: a hundred years
_ROWS_AT_ONCE = 1 << 18
_KEY_COLUMNS = ("comm", "pid", "stack", "address", "kernel", "file", "mnemonic")


def profile_of(capture: CaptureReader, interval_ns: int, bounds_ns: tuple[int, int] = (0, _MAX_NS)) -> Profile:
    """Makes the profile of a capture with `sample` rows, one row group at a time.

    Args:
        capture: the open capture.
        interval_ns: the length of an interval; 0: a single interval. If it is the imported intervals' length, these
            keep their boundaries.
        bounds_ns: the first and last time of samples to read, CLOCK_MONOTONIC ns, both inclusive.

    Raises:
        CaptureError: the capture is damaged.
    """
    start = _whole_number(capture.header.get("clock"), "monotonic_ns")
    imported = _whole_number(capture.header.get("imported"), "interval_ns")
    as_imported = interval_ns > 0 and abs(interval_ns - imported) * _TOLERANCE_DIVISOR < imported
    rows = _Rows(capture, start, 1 if as_imported else interval_ns)
    for table in capture.tables("sample"):
        times = table["time_ns"].to_numpy()
        within = (times >= np.uint64(bounds_ns[0])) & (times <= np.uint64(bounds_ns[1]))
        rows.add(table if within.all() else table.filter(pa.array(within)))
    if rows.samples > _MAX_SAMPLES:
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
    """Sums of samples by key. A key has numbers of launches, kernels and codes."""

    def __init__(self, capture: CaptureReader, start: int, unit_ns: int) -> None:
        """Starts without rows.

        Args:
            capture: whose samples these are.
            start: time 0, CLOCK_MONOTONIC ns.
            unit_ns: the unit of times in keys; 0: all times are one.
        """
        self.launches: dict[Launch | None, int] = {}
        self.kernels: dict[Kernel | None, int] = {}
        self.codes: dict[Code, int] = {}
        self.samples = 0.0
        self._frames: dict[str, str] = {}  # of stacks, which share them
        self._capture = capture
        self._start = start
        self._unit_ns = unit_ns or _MAX_SINCE_NS + 1
        self._pending: list[NDArray[np.uint64]] = []  # [n, 5 + reasons]: time, launch, kernel, code, offset, counts
        self._merged_rows = 0  # the number of rows in the first array, which has each key once

    def add(self, table: pa.Table) -> None:
        """Adds a row group."""
        where, which = self._number_keys(table)
        times = _since(table["time_ns"].to_numpy(), self._start) // self._unit_ns
        counts = np.stack([table[reason].to_numpy() for reason in REASONS], axis=1)
        self.samples += float(counts.sum(dtype=np.float64))
        keys = np.column_stack([times.astype(np.uint64), where[which], table["offset"].to_numpy()])
        self._pending.append(np.column_stack([keys, counts]))
        unmerged = sum(map(len, self._pending)) - self._merged_rows
        if unmerged > max(_ROWS_AT_ONCE, self._merged_rows):
            self._merge()

    def result(self) -> tuple[list[NDArray[np.uint64]], NDArray[np.uint64]]:
        """Returns the keys, sorted: interval, launch, kernel, code and offset [5][n]; and the counts [n, reasons]."""
        self._merge()
        return list(self._pending[0][:, :5].T.copy()), self._pending[0][:, 5:]

    def _merge(self) -> None:
        rows = np.concatenate([np.empty((0, 5 + len(REASONS)), np.uint64), *self._pending])
        self._pending.clear()
        first, number = distinct_rows(*rows[:, :5].T)
        rows = np.column_stack([rows[first, :5], sum_groups(rows[:, 5:], number)])
        self._pending.append(rows)
        self._merged_rows = len(rows)

    def _number_keys(self, table: pa.Table) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Numbers launches, kernels and codes: returns the distinct combinations [k, 3], and each row's index [n]."""
        columns = []
        texts: dict[str, list[str]] = {}
        for name in _KEY_COLUMNS:
            column = table[name].combine_chunks()
            if pa.types.is_dictionary(column.type):
                texts[name] = column.dictionary.to_pylist()
                column = column.indices
            columns.append(column.to_numpy())
        first, which = distinct_rows(*columns)
        self._capture.check(max(len(first), len(self.launches), len(self.codes)), IMPORTED)
        found = []
        for comm, pid, stack, address, symbol, file, mnemonic in zip(
            *(c[first].tolist() for c in columns), strict=True
        ):
            launch = self._launch(texts["comm"][comm], pid, texts["stack"][stack])
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

    def _launch(self, comm: str, pid: int, stack: str) -> Launch | None:
        comm = "" if comm == UNKNOWN_PROCESS else comm
        frames = [] if stack in ("", UNKNOWN_PROCESS) else stack.split(";")
        if not (comm or pid or frames):
            return None
        users = len(frames)
        while users and frames[users - 1].endswith("_[k]"):
            users -= 1
        kernel = [frame.removesuffix("_[k]") for frame in frames[users:]]
        return Launch(comm, pid, self._shared(frames[:users]), self._shared(kernel))

    def _shared(self, frames: list[str]) -> tuple[str, ...]:
        """Returns the frames as objects that all stacks share: those of other objects would fill the memory."""
        return tuple(map(self._frames.setdefault, frames, frames))


def _kernel(address: int, symbol: str, file: str) -> Kernel | None:
    file = "" if file == UNKNOWN_FILE else file
    # Names in brackets are labels, such as `[ambiguous kernel]`.
    if not address and not file and symbol.startswith("[") and symbol.endswith("]"):
        return None
    return Kernel(address, symbol, file)


def _begins(capture: CaptureReader, start: int, sampled: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns when the imported intervals began, ns since the start. Intervals without stalls still have metrics."""
    begins = np.unique(np.append(sampled, 0))
    for table in capture.tables("metric", ("time_ns",)):
        begins = np.union1d(begins, _since(table["time_ns"].to_numpy(), start))
    return begins


def _since(times: NDArray[np.uint64], start: int) -> NDArray[np.int64]:
    """Returns times as ns since the start; earlier times become 0."""
    since = np.maximum(times, np.uint64(start)) - np.uint64(start)
    return np.minimum(since, np.uint64(_MAX_SINCE_NS)).astype(np.int64)


def _whole_number(entry: object, name: str) -> int:
    value = entry.get(name) if isinstance(entry, dict) else None
    return value if type(value) is int and 0 <= value < 1 << 63 else 0


def can_select(selection: Selection) -> bool:
    """Whether imported captures have what the selection filters by."""
    return not (selection.tids or selection.cgroups or selection.devices)


def build_imported(
    capture: CaptureReader, selection: Selection, interval_ns: int, start_ns: int | None = None
) -> Report:
    """Reads the `sample` rows of a capture.

    Args:
        capture: the open capture.
        selection: the filters.
        interval_ns: the length of an interval; 0: a single interval.
        start_ns: what the selection's time range is relative to; None: the capture's start.

    Raises:
        CaptureError: the capture is damaged.
        UsageError: the selection filters by something that imported captures lack.
    """
    if not can_select(selection):
        raise UsageError("--tid, --cgroup and --device find nothing here: an imported text does not contain them")
    row_filter = selection.row_filter(capture.header, start_ns)
    profile = _selected(profile_of(capture, interval_ns, (row_filter.begin_ns, row_filter.end_ns)), selection)
    totals = profile.counts.sum(axis=1).astype(np.int64)
    known_kernel = np.array([kernel is not None for kernel in profile.kernels], bool)[profile.kernel]
    known_launch = np.array([launch is not None for launch in profile.launches], bool)[profile.launch]
    decoded = np.array([code.mnemonic not in NO_INSTRUCTIONS for code in profile.codes], bool)[profile.code]
    samples = int(totals.sum())
    matched = Matched(
        samples,
        int(totals[known_kernel].sum()),
        int(totals[decoded].sum()),
        0,  # the text does not say which other stacks can have launched a kernel
    )
    facts = Facts(
        stalls=samples,
        active=profile.active,
        unknown_kernel=samples - matched.kernel,
        no_launch=int(totals[known_kernel & ~known_launch].sum()),
        matched=matched,
    )
    return Report(replace(profile, matched=matched.shares()), facts, capture.header, [None] * len(profile.kernels))


def _selected(profile: Profile, selection: Selection) -> Profile:
    counts = profile.counts * selection.reason_mask(profile.reasons).astype(np.uint64)
    launches = [
        (not selection.pids or (launch is not None and launch.pid in selection.pids))
        and (not selection.comms or (launch is not None and launch.comm in selection.comms))
        and selection.matches_stack(launch.stack if launch is not None else ())
        for launch in profile.launches
    ]
    pattern = selection.kernel
    kernels = [pattern is None or (k is not None and pattern.search(k.symbol) is not None) for k in profile.kernels]
    launched, of_kernel = np.array(launches, bool)[profile.launch], np.array(kernels, bool)[profile.kernel]
    return replace(profile, counts=counts).only(np.any(counts, axis=1) & launched & of_kernel)
