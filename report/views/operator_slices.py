"""Operators over time, for time lines: from the traces that were joined to a capture, on the threads of the capture."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.export import OperatorSlices, Thread
from iaprof.report.join.operators import HostSlices, depths, read_host_slices
from iaprof.report.join.selection import Selection
from iaprof.report.parts import host_of, starts_ns
from iaprof.report.profile import ReportOptions
from iaprof.report.views.cpu_profile import process_names

MOST_SLICES = 200_000  # the longest ones are shown
_Ints = NDArray[np.int64]


def operator_slices(capture: CaptureReader, options: ReportOptions, most: int = MOST_SLICES) -> OperatorSlices | None:
    """Returns the operators of the selected times, processes and threads; None if the capture has none.

    Args:
        capture: the open capture.
        options: the report's options.
        most: how many; of more, the longest.

    Raises:
        CaptureError: the capture is damaged.
    """
    names: dict[str, int] = {}
    threads: dict[Thread, int] = {}
    columns: list[tuple[_Ints, ...]] = []
    for part, start_ns in zip(capture.parts, starts_ns(capture), strict=True):
        slices = read_host_slices(part)
        if slices is None:
            continue
        processes = process_names(part.table("process", ("time_ns", "pid", "tid", "comm")))
        host = host_of(part.header) if len(capture.parts) > 1 else ""
        known = [Thread(processes.get(pid, ""), pid, tid, host) for pid, tid in slices.threads]
        pids = options.selection.matching_pids(part, {each.pid: each.comm for each in known})
        chosen = np.array([_is_chosen(each, options.selection, pids) for each in known], bool)
        number = np.array([threads.setdefault(each, len(threads)) for each in known], np.int64)
        row_filter = options.selection.row_filter(part.header, start_ns)
        begin, end = slices.nesting.begin, slices.nesting.end
        keep = chosen[slices.nesting.thread]
        keep &= (end > min(row_filter.begin_ns, 1 << 62)) & (begin <= min(row_filter.end_ns, 1 << 62))
        texts = np.array([names.setdefault(name, len(names)) for name in slices.names], np.int64)
        depth = depths(slices.nesting.parents())
        found = (
            number[slices.nesting.thread],
            texts[slices.name],
            depth,
            begin - start_ns,
            _clipped(slices, depth) - start_ns,
        )
        columns.append(tuple(column[keep] for column in found))
    if not columns:
        return None
    thread, name, depth, begin, end = (np.concatenate(column) for column in zip(*columns, strict=True))
    longest = np.sort(np.argsort(begin - end, kind="stable")[:most])
    whole = OperatorSlices(list(names), list(threads), name, thread, depth, begin / 1e9, end / 1e9, len(name))
    return whole if len(longest) == len(name) else whole.only(longest)


def _is_chosen(thread: Thread, selection: Selection, pids: set[int]) -> bool:
    return thread.pid in pids and (not selection.tids or thread.tid in selection.tids)


def _clipped(slices: HostSlices, depth: _Ints) -> _Ints:
    """Returns when slices end, at most when the next one of their thread and depth begins: rounded times may cross."""
    nesting = slices.nesting
    order = np.lexsort((nesting.begin, depth, nesting.thread))
    same = (nesting.thread[order][1:] == nesting.thread[order][:-1]) & (depth[order][1:] == depth[order][:-1])
    end = nesting.end.copy()
    before = order[:-1][same]
    end[before] = np.minimum(end[before], nesting.begin[order[1:][same]])
    return end
