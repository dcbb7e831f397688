"""Adds up a capture's waits for the GPU by process, function and stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import number_texts
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct_rows, sum_groups
from iaprof.formats.export import CpuSamples
from iaprof.formats.header.waits import WaitFlags
from iaprof.formats.profile import Launch
from iaprof.report.cpu_names import SymbolOptions, open_symbolizer
from iaprof.report.join.attribution import intervals_of
from iaprof.report.join.selection import begun_ns
from iaprof.report.parts import host_of, starts_ns
from iaprof.report.profile import ReportOptions
from iaprof.report.views.launchers import launcher
from iaprof.report.views.process_names import process_names
from iaprof.symbols.cpu_frames import CpuFrames
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.names import Symbolizer

_COLUMNS = ("time_ns", "end_ns", "waited_ns", "count", "pid", "tid", "function", "handle", "stack", "flags")
_NS_A_US = 1000


@dataclass(frozen=True, eq=False)
class Waits:
    """Sums of waits by (interval, launch, function, handle), each combination once."""

    launches: Sequence[Launch]  # process and stack that wait; they launch no kernel
    functions: Sequence[str]
    launch: NDArray[np.int64]  # [n], index into launches
    function: NDArray[np.int64]  # [n], index into functions
    handle: NDArray[np.uint64]  # [n], of the object waited for
    interval: NDArray[np.int64]  # [n]
    waited_ns: NDArray[np.int64]  # [n]
    count: NDArray[np.int64]  # [n], waits
    longest_ns: NDArray[np.int64]  # [n]; for short waits that the recorder added up, their mean
    not_ended: NDArray[np.int64]  # [n], waits that had not ended when the recording did

    def as_samples(self) -> CpuSamples:
        """Returns the stacks and intervals as CPU samples, with microseconds in place of samples."""
        us = (self.waited_ns + _NS_A_US // 2) // _NS_A_US
        return CpuSamples(self.launches, self.launch, self.interval, us)


@dataclass(frozen=True)
class Entry:
    """A line of the table."""

    host: str
    process: str
    pid: int
    function: str
    launcher: str  # see launchers.py
    waited_ns: int
    waits: int
    longest_ns: int
    objects: int  # the number of objects waited for
    handle: int  # of the object; 0 if there are several
    not_ended: int


def waits_of(capture: CaptureReader, options: ReportOptions, symbol_options: SymbolOptions) -> Waits:
    """Returns the waits that a selection's times, processes, threads and Python functions keep.

    Raises:
        CaptureError: the capture is damaged.
    """
    found = []
    for part, start_ns in zip(capture.parts, starts_ns(capture), strict=True):
        host = host_of(part.header) if len(capture.parts) > 1 else ""
        with open_symbolizer(part, symbol_options) as names:
            found.append(_waits_of_part(part, names, replace(options, start_ns=start_ns), host))
    return _concatenated(found)


def _waits_of_part(capture: CaptureReader, symbolizer: Symbolizer, options: ReportOptions, host: str) -> Waits:
    processes = capture.table("process")
    names = process_names(processes)
    texts: dict[str | None, int] = {}
    columns = _rows(capture, options, names, texts)
    interval, pid, stack, function, handle = columns[:5]
    first, launch = distinct_rows(pid, stack)
    spaces = AddressSpaces(capture.table("mapping"), processes)
    cpu = CpuFrames(
        capture.stacks(np.unique(stack[first])),
        spaces,
        symbolizer,
        options.frame_options,
        capture.has_cut_stacks,
        capture.table("python_code"),
    )
    launches = [
        Launch(names.get(pid_, ""), pid_, cpu.frames(user), host=host, origins=cpu.origins(user))
        for pid_, user in zip(pid[first].tolist(), stack[first].tolist(), strict=True)
    ]
    is_selected = np.array([options.selection.matches_stack(each.stack) for each in launches], bool)
    keep, numbers = is_selected[launch], np.cumsum(is_selected) - 1
    kept = (numbers[launch[keep]], *(column[keep] for column in (function, handle, interval, *columns[5:])))
    found = [each for each, keeps in zip(launches, is_selected.tolist(), strict=True) if keeps]
    own, functions, handles, *others = kept
    return Waits(found, [text or "" for text in texts], own, functions.astype(np.int64), handles, *_signed(others))


def _rows(
    capture: CaptureReader, options: ReportOptions, names: dict[int, str], texts: dict[str | None, int]
) -> list[NDArray[np.uint64]]:
    """Adds up the selected waits: interval, pid, stack, function, handle, waited, count, longest, not ended: [9][n]."""
    start = begun_ns(capture.header) if options.start_ns is None else options.start_ns
    selection = options.selection
    row_filter = selection.row_filter(capture.header, start)
    pids = np.array(sorted(selection.matching_pids(capture, names)), np.uint64) if selection.by_process else None
    inside = selection.in_cgroups(capture)
    tids = np.array(sorted(selection.tids), np.uint64)
    batches = [np.empty((0, 9), np.uint64)]
    for table in capture.tables("wait", _COLUMNS):
        numbers = {name: table[name].to_numpy().astype(np.uint64) for name in _COLUMNS if name != "function"}
        function = number_texts(table["function"], texts).astype(np.uint64)
        keep = (numbers["end_ns"] >= np.uint64(row_filter.begin_ns)) & (
            numbers["time_ns"] <= np.uint64(row_filter.end_ns)
        )
        if pids is not None:
            keep &= np.isin(numbers["pid"], pids)
        if inside is not None:
            keep &= inside.has(numbers["pid"], numbers["time_ns"])
        if len(tids):
            keep &= np.isin(numbers["tid"], tids)
        interval = intervals_of(numbers["time_ns"][keep], start, int(options.interval_s * 1e9), "waits")
        count = numbers["count"]
        not_ended = count * ((numbers["flags"] & np.uint64(WaitFlags.NOT_ENDED)) > 0)
        longest = numbers["waited_ns"] // np.maximum(count, np.uint64(1))
        others = (numbers["pid"], numbers["stack"], function, numbers["handle"], numbers["waited_ns"], count, longest)
        rows = np.column_stack([interval.astype(np.uint64), *(each[keep] for each in (*others, not_ended))])
        batches = [_merge([*batches, rows])]
    return list(batches[0].T.copy())


def _merge(batches: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    rows = np.concatenate(batches)
    first, number = distinct_rows(*rows[:, :5].T)
    longest = np.zeros(len(first), np.uint64)
    np.maximum.at(longest, number, rows[:, 7])
    waited, count, not_ended = (sum_groups(rows[:, column], number) for column in (5, 6, 8))
    return np.column_stack([rows[first, :5], waited, count, longest, not_ended])


def _signed(columns: Sequence[NDArray[np.uint64]]) -> list[NDArray[np.int64]]:
    return [np.minimum(column, np.uint64((1 << 63) - 1)).astype(np.int64) for column in columns]


def _concatenated(parts: Sequence[Waits]) -> Waits:
    if len(parts) == 1:
        return parts[0]
    launches: list[Launch] = []
    functions: list[str] = []
    shifted: dict[str, list[NDArray[np.int64]]] = {"launch": [], "function": []}
    for part in parts:
        shifted["launch"].append(part.launch + len(launches))
        shifted["function"].append(part.function + len(functions))
        launches += part.launches
        functions += part.functions
    rest = ("interval", "waited_ns", "count", "longest_ns", "not_ended")
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in rest}
    handle = np.concatenate([part.handle for part in parts])
    return Waits(
        launches,
        functions,
        np.concatenate(shifted["launch"]),
        np.concatenate(shifted["function"]),
        handle,
        **columns,
    )


def entries(waits: Waits, limit: int, rows: NDArray[np.bool_] | None = None) -> tuple[list[Entry], int, Entry]:
    """Ranks waits by time, longest first.

    Args:
        waits: a capture's waits.
        limit: the number of entries; 0: all.
        rows: bool[n], the waits to count; None: all.

    Returns:
        The entries, the number of entries beyond the limit, and the sum of all.
    """
    selected = np.ones(len(waits.launch), bool) if rows is None else rows
    keys: dict[tuple[str, str, int, str, str], int] = {}
    of_launch = [(each.host, each.comm, each.pid, launcher(each)) for each in waits.launches]
    first, pair = distinct_rows(waits.launch[selected], waits.function[selected])
    number_of = np.array(
        [
            keys.setdefault((*of_launch[launch][:3], waits.functions[function], of_launch[launch][3]), len(keys))
            for launch, function in zip(
                waits.launch[selected][first].tolist(), waits.function[selected][first].tolist(), strict=True
            )
        ],
        np.int64,
    )
    number = number_of[pair]
    sums = [
        np.bincount(number, column[selected], len(keys)).astype(np.int64)
        for column in (waits.waited_ns, waits.count, waits.not_ended)
    ]
    longest = np.zeros(len(keys), np.int64)
    np.maximum.at(longest, number, waits.longest_ns[selected])
    one = distinct_rows(number, waits.handle[selected])[0]
    objects = np.bincount(number[one], minlength=len(keys))
    handle = np.zeros(len(keys), np.uint64)
    handle[number[one]] = waits.handle[selected][one]
    found = [
        Entry(
            *key,
            waited_ns=int(sums[0][at]),
            waits=int(sums[1][at]),
            longest_ns=int(longest[at]),
            objects=int(objects[at]),
            handle=int(handle[at]) if objects[at] == 1 else 0,
            not_ended=int(sums[2][at]),
        )
        for key, at in keys.items()
    ]
    found.sort(key=lambda each: (-each.waited_ns, each.host, each.process, each.pid, each.function, each.launcher))
    shown = found[: limit or None]
    return shown, len(found) - len(shown), total(found)


def total(found: Sequence[Entry]) -> Entry:
    """Returns the sum of entries."""
    waited, waits, not_ended = (
        sum(getattr(each, name) for each in found) for name in ("waited_ns", "waits", "not_ended")
    )
    longest = max((each.longest_ns for each in found), default=0)
    return Entry("", "", 0, "", "", waited, waits, longest, 0, 0, not_ended)
