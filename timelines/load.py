"""Makes a Trace of a capture: whole columns. The args of rows stay in the capture until a writer asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.basics.heap import keep_freed_blocks, return_free_memory, return_large_blocks_when_freed
from iaprof.formats.capture.dictionaries import combined
from iaprof.formats.capture.limits import RANKS
from iaprof.formats.capture.reader import CaptureReader
from iaprof.timelines.arguments import Arguments
from iaprof.timelines.columns import Column, Extra, joined, pack, unpacked
from iaprof.timelines.dialects import Kind, categorize_device_slices, find
from iaprof.timelines.own_output import restore
from iaprof.timelines.placeholders import find_placeholders
from iaprof.timelines.stages.energy import OF_POWER
from iaprof.timelines.stages.torch_ranks import place_on_ranks
from iaprof.timelines.trace import (
    ABSENT,
    MOST_RANK,
    Dialect,
    Marks,
    Points,
    Slices,
    Texts,
    Trace,
    TraceFile,
    dialect_of,
)

_LEAST_PACKED = 1 << 12  # rows of a row group
_READ_AT_ONCE = 16
"""Row groups after which free memory is returned to the kernel: what is kept lies between what was freed."""
_MANY = 3 << 20  # rows, whose columns are large blocks
_LARGE = 4 << 20  # bytes of half a million rows: with less, memory would be returned and zeroed again too often
_Item = TypeVar("_Item")


def load(capture: CaptureReader) -> Trace:
    """Reads a capture's time lines.

    Files of all parts of a merged capture are numbered one after the other, and so are the rows of each kind.

    Raises:
        CaptureError: the capture is damaged.
        IaprofError: some of its traces, but not all, were written by iaprof.
    """
    if sum(part.count(kind) for part in capture.parts for kind in _FIELDS) < _MANY:
        keep_freed_blocks()
    else:
        return_large_blocks_when_freed(_LARGE)
    texts = Texts()
    parts = capture.parts
    files: list[TraceFile] = []
    firsts = []
    for part in parts:
        firsts.append(len(files))
        files += _files(part)
    columns = {kind: _Columns(kind, texts) for kind in ("slice", "counter", "flow", "instant")}
    for part, first in zip(parts, firsts, strict=True):
        for each in columns.values():
            each.read(part, first)
    used = max((each.files for each in columns.values()), default=0)
    files += [TraceFile("", Dialect.FLEX, 0) for _ in range(used - len(files))]  # of a damaged header
    trace = Trace(
        files, texts, columns["slice"].slices(), columns["counter"].points(), columns["flow"].marks(),
        columns["instant"].marks(),
    )  # fmt: skip
    capture.check(_ranks(trace), RANKS)
    find_placeholders(trace)
    trace.pack()
    restore(trace, lambda kind: arguments(capture, kind))
    categorize_device_slices(trace, lambda kind: arguments(capture, kind))
    place_on_ranks(trace, lambda: arguments(capture, "instant"))
    return_free_memory()
    return trace


def arguments(capture: CaptureReader, kind: str) -> Arguments:
    """Returns the arguments of all rows of a kind: `slice`, `flow` or `instant`. The caller closes them."""
    tables = (table for part in capture.parts for table in part.tables(kind, ("args",)))
    return Arguments(combined(table["args"]) for table in tables)


def _ranks(trace: Trace) -> int:
    """Counts the processes for which stages run Python: those with kernels, collectives, or power."""
    slices = trace.slices
    of_slices = slices.pid[find(trace, Kind.KERNEL) | find(trace, Kind.COLLECTIVE)]
    of_points = trace.points.pid[trace.texts.matches(trace.points.series, OF_POWER)]
    found: int = pc.count_distinct(pa.array(np.concatenate([of_slices, of_points]))).as_py()
    return found


def _ahead(items: Iterator[_Item]) -> Iterator[_Item]:
    """Yields items; a thread makes the next one while the caller uses the last one. Arrow releases the GIL."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, None)
        while (item := following.result()) is not None:
            following = thread.submit(next, items, None)
            yield item


def _files(part: CaptureReader) -> list[TraceFile]:
    """Returns the files of a part. Its header is untrusted."""
    found = part.header.get("traces")
    return [_file(each if isinstance(each, dict) else {}) for each in (found if isinstance(found, list) else [])]


def _file(described: dict[str, Any]) -> TraceFile:
    name, rank, members = (described.get(key) for key in ("name", "rank", "members"))
    members = members if isinstance(members, dict) else {}
    devices = members.get("deviceProperties")
    return TraceFile(
        clean(name) if isinstance(name, str) else "",
        dialect_of(described.get("dialect")),
        rank if type(rank) is int and 0 <= rank < MOST_RANK else 0,
        tuple(each for each in devices if isinstance(each, dict)) if isinstance(devices, list) else (),
        {key: value for key, value in members.items() if key != "deviceProperties"},
    )


@dataclass
class _Columns:
    """The columns of a kind of rows, collected from row groups."""

    kind: str
    texts: Texts
    rows: int = 0
    files: int = 0
    found: dict[str, list[Column]] = field(default_factory=dict)

    def read(self, part: CaptureReader, first_file: int) -> None:
        """Reads the rows of a part, whose first file has this number."""
        names = _FIELDS[self.kind]
        for number, table in enumerate(_ahead(part.tables(self.kind, names)), 1):
            for name in names:
                if name not in _COUNTERS:
                    self._add(name, self._column(name, table[name], first_file))
            if self.kind == "slice":
                counters = np.empty((len(table), len(_COUNTERS)), np.int64)
                for number, name in enumerate(_COUNTERS):
                    counters[:, number] = self._column(name, table[name], first_file)
                self._add("counters", counters)
            self.rows += len(table)
            if number % _READ_AT_ONCE == 0:
                return_free_memory()

    def _add(self, name: str, values: NDArray[Any]) -> None:
        """Adds the values of a row group, packed: unpacked, all row groups together would need much memory."""
        self.found.setdefault(name, []).append(pack(values) if len(values) >= _LEAST_PACKED else values)

    def _column(self, name: str, column: pa.ChunkedArray, first_file: int) -> NDArray[Any]:
        if pa.types.is_dictionary(column.type):
            return self.texts.codes(column)
        if name == "file":
            files = np.asarray(column.to_numpy().astype(np.int32) + np.int32(first_file))
            self.files = max(self.files, int(files.max(initial=-1)) + 1)
            return files
        if pa.types.is_floating(column.type):
            return np.asarray(column.to_numpy(zero_copy_only=False))  # nulls become NaN
        return np.asarray((column.fill_null(ABSENT) if column.null_count else column).to_numpy())

    def column(self, name: str, type_: Any) -> NDArray[Any]:
        """Returns a whole column, which can be packed."""
        pieces = self.found.pop(name, [])
        whole: Any = joined(pieces) if pieces else np.empty(0, type_)
        return whole.astype(type_, copy=False) if isinstance(whole, np.ndarray) else whole

    def _common(self) -> dict[str, Any]:
        return {
            "file": self.column("file", np.int32),
            "pid": self.column("pid", np.int64),
            "tid": self.column("tid", np.int64),
            "name": self.column("name", np.int32),
            "category": self.column("category", np.int32),
            "row": np.arange(self.rows, dtype=np.int64),
        }

    def slices(self) -> Slices:
        """Returns the rows as slices."""
        none = np.empty((0, len(_COUNTERS)), np.int64)
        counters = self.column("counters", np.int64) if self.rows else none
        numbers = {name: self.column(name, np.int64) for name in ("power", "bytes", "correlation", "device")}
        codes = {name: self.column(name, np.int32) for name in ("group", "type", "peers")}
        ids = {
            label: values
            for name, label in (("external_id", "External id"), ("python_id", "Python id"))
            if len(values := self.column(name, np.int64)) and (unpacked(values) != ABSENT).any()
        }
        return Slices(
            **self._common(),
            start=self.column("time_ns", np.int64),
            duration=self.column("duration_ns", np.float64),
            counters=counters,
            bandwidth=self.column("bandwidth", np.float64),
            **numbers,
            **codes,
            extra=Extra.of(ids),
        )

    def points(self) -> Points:
        """Returns the rows as values of counters."""
        return Points(
            **self._common(),
            series=self.column("series", np.int32),
            time=self.column("time_ns", np.int64),
            value=self.column("value", np.float64),
        )

    def marks(self) -> Marks:
        """Returns the rows as events without a duration."""
        return Marks(
            **self._common(),
            phase=self.column("phase", np.int32),
            id=self.column("id", np.int64),
            time=self.column("time_ns", np.int64),
        )


_COUNTERS = ("ts1", "ts2", "ts3", "ts4", "ts5")
_COMMON = ("time_ns", "file", "pid", "tid", "name", "category")
_FIELDS = {
    "slice": (
        *_COMMON, "duration_ns", *_COUNTERS, "power", "bytes", "correlation", "device",
        "external_id", "python_id", "bandwidth", "group", "type", "peers",
    ),
    "counter": (*_COMMON, "series", "value"),
    "flow": (*_COMMON, "phase", "id"),
    "instant": (*_COMMON, "phase", "id"),
}  # fmt: skip
