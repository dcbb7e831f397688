"""What the CPUs did while the GPU waited: the CPU samples of a capture, counted by stack and interval."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import numbered
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct, summed
from iaprof.formats.export import CpuSamples
from iaprof.formats.profile import Launch
from iaprof.report.join.attribution import intervals_of
from iaprof.report.join.selection import begun_ns
from iaprof.report.profile import ReportOptions
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.cpu_frames import CpuFrames
from iaprof.symbols.names.names import Naming

_COLUMNS = ("time_ns", "pid", "tid", "stack", "kernel_stack")
_ROWS_AT_ONCE = 1 << 20


def build_cpu(capture: CaptureReader, symbolizer: Naming, options: ReportOptions) -> CpuSamples:
    """Counts and names the CPU samples; of a selection, times, processes and functions of Python matter here.

    Args:
        capture: the open capture.
        naming: names the frames.
        wanted: which part of it, in which intervals, and how frames are to look.

    Raises:
        CaptureError: the capture is damaged.
    """
    processes = capture.table("process")
    names = process_names(processes)
    interval, pid, stack, kernel_stack, count = _counted(capture, options, names)
    first, launch = distinct(pid, stack, kernel_stack)
    ids = np.unique(np.concatenate([stack[first], kernel_stack[first]]))
    spaces = AddressSpaces(capture.table("mapping"), processes)
    cpu = CpuFrames(
        capture.stacks(ids), spaces, symbolizer, options.look, capture.has_cut_stacks, capture.table("python_code")
    )
    launches = [
        Launch(names.get(who, ""), who, cpu.frames(user), cpu.frames(kernel), origins=cpu.origins(user))
        for who, user, kernel in zip(*(column[first].tolist() for column in (pid, stack, kernel_stack)), strict=True)
    ]
    calls = np.array([options.selection.matches_stack(each.stack) for each in launches], bool)
    keep, numbers = calls[launch], np.cumsum(calls) - 1
    chosen = [each for each, is_wanted in zip(launches, calls.tolist(), strict=True) if is_wanted]
    columns = (numbers[launch[keep]], interval[keep].astype(np.int64), count[keep].astype(np.int64))
    return CpuSamples(chosen, *columns)


def _counted(capture: CaptureReader, options: ReportOptions, names: dict[int, str]) -> list[NDArray[np.uint64]]:
    """The distinct interval, pid, stack and kernel_stack of the samples that are wanted, and how often each: [5][n]."""
    start = begun_ns(capture.header) if options.start_ns is None else options.start_ns
    interval_ns = int(options.interval_s * 1e9)
    selection = options.selection
    row_filter = selection.row_filter(capture.header, start)
    pids = np.array(sorted(selection.matching_pids(capture, names)), np.uint64) if selection.by_process else None
    tids = np.array(sorted(selection.tids), np.uint64)
    parts = [np.empty((0, 5), np.uint64)]
    waiting = 0
    for table in capture.tables("cpu_sample", _COLUMNS):
        time, pid, tid, stack, kernel_stack = (table[name].to_numpy().astype(np.uint64) for name in _COLUMNS)
        keep = (time >= np.uint64(row_filter.begin_ns)) & (time <= np.uint64(row_filter.end_ns))
        if pids is not None:
            keep &= np.isin(pid, pids)
        if len(tids):
            keep &= np.isin(tid, tids)
        interval = intervals_of(time[keep], start, interval_ns, "CPU samples").astype(np.uint64)
        columns = [interval, *(column[keep] for column in (pid, stack, kernel_stack))]
        rows = np.column_stack([*columns, np.ones(len(interval), np.uint64)])
        parts.append(rows)
        waiting += len(rows)
        if waiting > max(_ROWS_AT_ONCE, len(parts[0])):
            parts, waiting = [_added_up(parts)], 0
    return list(_added_up(parts).T.copy())


def _added_up(parts: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    rows = np.concatenate(parts)
    first, number = distinct(*rows[:, :4].T)
    return np.column_stack([rows[first, :4], summed(rows[:, 4:], number)])


def process_names(processes: pa.Table) -> dict[int, str]:
    """The last name of each process, by pid; `processes` are `process` rows."""
    texts: dict[str | None, int] = {}
    comm = numbered(processes["comm"], texts)
    time, pid, tid = (processes[name].to_numpy() for name in ("time_ns", "pid", "tid"))
    names = [text or "" for text in texts]
    place = np.empty(len(names), np.int64)  # in the order of the alphabet, for names of the same moment
    place[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    named = np.flatnonzero((pid == tid) & np.array([name != "" for name in names], bool)[comm])
    order = named[np.lexsort((place[comm[named]], time[named]))]
    return dict(zip(pid[order].tolist(), map(names.__getitem__, comm[order].tolist()), strict=True))
