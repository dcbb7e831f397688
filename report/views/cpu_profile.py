"""Counts the CPU samples of a capture by stack and interval."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import rows_equal
from iaprof.formats.capture.limits import CPU_STACKS
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct_rows, sum_groups
from iaprof.formats.export import CpuSamples
from iaprof.formats.header.left_out import TOTALS as LEFT_OUT
from iaprof.formats.profile import Launch
from iaprof.report.join.attribution import intervals_of
from iaprof.report.join.selection import begun_ns
from iaprof.report.profile import ReportOptions
from iaprof.report.views.process_names import process_names
from iaprof.symbols.cpu_frames import CpuFrames
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.names import Symbolizer

_COLUMNS = ("time_ns", "pid", "tid", "stack", "kernel_stack")
_LEFT_OUT = "left_out"
_ROWS_AT_ONCE = 1 << 20


def build_cpu(capture: CaptureReader, symbolizer: Symbolizer, options: ReportOptions) -> CpuSamples:
    """Counts and symbolizes the CPU samples that the selection's times, processes and Python functions keep.

    Samples of the recorder's processes and of processes out of scope are only counted, unless the options want all.

    Args:
        capture: an open capture, or a part of a merged one.
        symbolizer: names the frames.
        options: the report's options.

    Raises:
        CaptureError: the capture is damaged.
    """
    processes = capture.table("process")
    names = process_names(processes)
    left_out: Counter[str] = Counter()
    interval, pid, stack, kernel_stack, count = _count_samples(capture, options, names, left_out)
    first, launch = distinct_rows(pid, stack, kernel_stack)
    capture.check(len(first), CPU_STACKS)
    ids = np.unique(np.concatenate([stack[first], kernel_stack[first]]))
    spaces = AddressSpaces(capture.table("mapping"), processes)
    cpu = CpuFrames(
        capture.stacks(ids),
        spaces,
        symbolizer,
        options.frame_options,
        capture.has_cut_stacks,
        capture.table("python_code"),
    )
    launches = [
        Launch(names.get(pid_, ""), pid_, cpu.frames(user), cpu.frames(kernel), origins=cpu.origins(user))
        for pid_, user, kernel in zip(*(column[first].tolist() for column in (pid, stack, kernel_stack)), strict=True)
    ]
    matches = np.array([options.selection.matches_stack(each.stack) for each in launches], bool)
    keep, numbers = matches[launch], np.cumsum(matches) - 1
    chosen = [each for each, is_selected in zip(launches, matches.tolist(), strict=True) if is_selected]
    columns = (numbers[launch[keep]], interval[keep].astype(np.int64), count[keep].astype(np.int64))
    return CpuSamples(chosen, *columns, left_out=left_out)


def _count_samples(
    capture: CaptureReader, options: ReportOptions, names: dict[int, str], left_out: Counter[str]
) -> list[NDArray[np.uint64]]:
    """Counts the selected samples by interval, pid, stack and kernel_stack: these columns and the count, [5][n].

    Adds to `left_out` those that are left out, by the reason in their rows.
    """
    start = begun_ns(capture.header) if options.start_ns is None else options.start_ns
    interval_ns = int(options.interval_s * 1e9)
    selection = options.selection
    row_filter = selection.row_filter(capture.header, start)
    pids = np.array(sorted(selection.matching_pids(capture, names)), np.uint64) if selection.by_process else None
    inside = selection.in_cgroups(capture)
    tids = np.array(sorted(selection.tids), np.uint64)
    batches = [np.empty((0, 5), np.uint64)]
    pending = 0
    for table in capture.tables("cpu_sample", (*_COLUMNS, _LEFT_OUT)):
        time, pid, tid, stack, kernel_stack = (table[name].to_numpy().astype(np.uint64) for name in _COLUMNS)
        keep = (time >= np.uint64(row_filter.begin_ns)) & (time <= np.uint64(row_filter.end_ns))
        if pids is not None:
            keep &= np.isin(pid, pids)
        if inside is not None:
            keep &= inside.has(pid, time)
        if len(tids):
            keep &= np.isin(tid, tids)
        for why in () if options.all_samples else LEFT_OUT:
            is_left_out = keep & rows_equal(table[_LEFT_OUT], why)
            left_out[why] += int(np.count_nonzero(is_left_out))
            keep &= ~is_left_out
        interval = intervals_of(time[keep], start, interval_ns, "CPU samples").astype(np.uint64)
        columns = [interval, *(column[keep] for column in (pid, stack, kernel_stack))]
        rows = np.column_stack([*columns, np.ones(len(interval), np.uint64)])
        batches.append(rows)
        pending += len(rows)
        if pending > max(_ROWS_AT_ONCE, len(batches[0])):
            batches, pending = [_merge(batches)], 0
    return list(_merge(batches).T.copy())


def _merge(batches: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    rows = np.concatenate(batches)
    first, number = distinct_rows(*rows[:, :4].T)
    return np.column_stack([rows[first, :4], sum_groups(rows[:, 4:], number)])
