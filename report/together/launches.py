"""The launches of a trace and of a capture, in a form in which they can be compared: time, thread, kernel's name."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import number_texts, rows_where
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct_rows
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.symbols.names.demangle import demangled

_KERNEL = "kernel"  # the category of kernels in PyTorch's traces
_HOST_SIDE = ("_runtime", "_driver")  # how categories of calls of runtimes end: cuda_runtime, xpu_driver
_CUT = "…"
_COLUMNS = ("time_ns", "duration_ns", "file", "pid", "tid", "name", "category", "correlation")
_MAX_NS = 1 << 62
_Ints = NDArray[np.int64]


class KernelTexts:
    """Numbers the names of kernels, however they are written: mangled or not, with or without blanks."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._of_text: dict[str, int] = {}

    def number(self, texts: list[str | None]) -> _Ints:
        """Returns the number of each name: int64[n]; -1: none."""
        return np.array([-1 if text is None else self._number(text) for text in texts], np.int64)

    def _number(self, text: str) -> int:
        if text not in self._of_text:
            name = demangled(text).replace(" ", "")
            self._of_text[text] = self._numbers.setdefault(name, len(self._numbers)) if name else -1
        return self._of_text[text]

    def whole(self) -> _Ints:
        """Returns, for each number, that of the only longer name that begins so if the name was cut, else its own."""
        names = list(self._numbers)
        found = np.arange(len(names))
        ordered = sorted(name for name in names if not name.endswith(_CUT))
        for name, number in self._numbers.items():
            if not name.endswith(_CUT):
                continue
            start = name.removesuffix(_CUT)
            place = bisect_left(ordered, start)
            longer = [each for each in ordered[place : place + 2] if each.startswith(start)]
            if len(longer) == 1:
                found[number] = self._numbers[longer[0]]
        return found


@dataclass(frozen=True)
class SeenLaunches:
    """Launches in the order of time."""

    time: _Ints  # [n], ns
    thread: _Ints  # [n], index into threads
    name: _Ints  # [n], number of the kernel's name
    threads: list[tuple[int, int]]  # process and thread

    def __len__(self) -> int:
        return len(self.time)

    @classmethod
    def of(cls, time: _Ints, pid: _Ints, tid: _Ints, name: _Ints) -> SeenLaunches:
        """Makes them of columns in any order, int64[n] each; launches without a name, -1, are left out."""
        order = np.argsort(time, kind="stable")
        order = order[name[order] >= 0]
        time, pid, tid, name = time[order], pid[order], tid[order], name[order]
        first, thread = distinct_rows(pid, tid)
        return cls(time, thread, name, list(zip(pid[first].tolist(), tid[first].tolist(), strict=True)))

    def renamed(self, whole: _Ints) -> SeenLaunches:
        """Replaces numbers of names: `whole` has the new one of each."""
        return SeenLaunches(self.time, self.thread, whole[self.name] if len(self) else self.name, self.threads)


def recorded_launches(capture: CaptureReader, texts: KernelTexts) -> SeenLaunches:
    """Returns the launches of a capture whose kernels' names are known, those in closed command lists when appended.

    Raises:
        CaptureError: the capture is damaged.
    """
    columns: list[list[_Ints]] = [[np.empty(0, np.int64)] for _ in range(4)]
    for table in capture.tables("launch", ("time_ns", "pid", "tid", "name", "flags")):
        table = table.filter(pa.array((table["flags"].to_numpy() & (LaunchFlags.OTHER | LaunchFlags.CARRIED)) == 0))
        distinct: dict[str | None, int] = {}
        number = number_texts(table["name"], distinct)
        times = np.minimum(table["time_ns"].to_numpy(), np.uint64(_MAX_NS)).astype(np.int64)
        found = (
            times, *(table[name].to_numpy().astype(np.int64) for name in ("pid", "tid")),
            texts.number(list(distinct))[number] if len(table) else number,
        )  # fmt: skip
        for column, values in zip(columns, found, strict=True):
            column.append(values)
    return SeenLaunches.of(*(np.concatenate(column) for column in columns))


@dataclass
class _File:
    """What a trace file tells of launches, a list of batches each."""

    calls: list[tuple[_Ints, ...]]  # correlation, time, pid, tid
    kernels: list[tuple[_Ints, ...]]  # correlation, name


def traced_launches(traces: CaptureReader, texts: KernelTexts) -> Mapping[int, SeenLaunches]:
    """Returns the launches in each trace file that has any: calls of a runtime with the correlation of a kernel.

    Their time is the middle of the call.

    Raises:
        CaptureError: the capture of the traces is damaged.
    """
    files: dict[int, _File] = {}
    for table in traces.tables("slice", _COLUMNS):
        table = table.filter(pc.is_valid(table["correlation"]))
        for is_kernel in (True, False):
            some = table.filter(pa.array(rows_where(table["category"], _is_kernel if is_kernel else _is_call)))
            for file, own in _by_file(some):
                each = files.setdefault(file, _File([], []))
                correlation, begin, duration, pid, tid = (
                    own[name].to_numpy() for name in ("correlation", "time_ns", "duration_ns", "pid", "tid")
                )
                if is_kernel:
                    distinct: dict[str | None, int] = {}
                    number = number_texts(own["name"], distinct)
                    each.kernels.append((correlation, texts.number(list(distinct))[number]))
                else:
                    middle = np.clip(begin, -_MAX_NS, _MAX_NS) + np.clip(duration, 0, _MAX_NS) // 2
                    each.calls.append((correlation, np.minimum(middle, _MAX_NS), pid, tid))
    found = {file: _launches(each) for file, each in files.items() if each.calls and each.kernels}
    return {file: launches for file, launches in found.items() if len(launches)}


def _is_kernel(category: str | None) -> bool:
    return category is not None and category.lower() == _KERNEL


def _is_call(category: str | None) -> bool:
    return category is not None and category.lower().endswith(_HOST_SIDE)


def _by_file(table: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    files = table["file"].to_numpy()
    for file in np.unique(files).tolist():
        own = files == file
        yield file, table if own.all() else table.filter(pa.array(own))


def _launches(file: _File) -> SeenLaunches:
    correlation, time, pid, tid = (np.concatenate(column) for column in zip(*file.calls, strict=True))
    kernel, name = (np.concatenate(column) for column in zip(*file.kernels, strict=True))
    order = np.argsort(kernel, kind="stable")
    kernel, name = kernel[order], name[order]
    place = np.minimum(np.searchsorted(kernel, correlation), len(kernel) - 1)
    has = kernel[place] == correlation
    return SeenLaunches.of(time[has], pid[has], tid[has], name[place[has]])
