"""Lists a capture's waits by thread and function, for time lines.

Short waits, which the recorder only adds up, have no times and are left out. If there are too many waits, those in
close succession are merged, as launches are (launch_runs.py).
"""

from __future__ import annotations

import numpy as np

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct_rows
from iaprof.formats.export import Launches, Thread
from iaprof.formats.header.waits import WaitFlags
from iaprof.report.parts import host_of, starts_ns
from iaprof.report.profile import ReportOptions
from iaprof.report.runs import MAX_NS, MAX_RUNS, Pairs, Runs
from iaprof.report.views.cpu_profile import process_names

_COLUMNS = ("time_ns", "end_ns", "pid", "tid", "comm", "function", "flags")


def wait_runs(capture: CaptureReader, options: ReportOptions, max_runs: int = MAX_RUNS) -> Launches:
    """Returns the waits that a selection's times, processes and threads keep, with functions in place of kernels.

    Args:
        capture: the open capture.
        options: the report's options.
        max_runs: the number of waits beyond which they are merged.

    Raises:
        CaptureError: the capture is damaged.
    """
    selection, runs, pairs = options.selection, Runs(max_runs, 1), Pairs()
    parts = capture.parts
    for part, start_ns in zip(parts, starts_ns(capture), strict=True):
        host = host_of(part.header) if len(parts) > 1 else ""
        row_filter = selection.row_filter(part.header, start_ns)
        names = process_names(part.table("process"))
        pids = selection.matching_pids(part, names) if selection.by_process else None
        inside = selection.in_cgroups(part)
        wanted_pids = None if pids is None else np.array(sorted(pids), np.int64)
        for table in part.tables("wait", _COLUMNS):
            begin, end, pid, tid, flags = (
                table[name].to_numpy() for name in ("time_ns", "end_ns", "pid", "tid", "flags")
            )
            keep = (flags & WaitFlags.ADDED_UP) == 0
            keep &= (end >= np.uint64(row_filter.begin_ns)) & (begin <= np.uint64(row_filter.end_ns))
            if wanted_pids is not None:
                keep &= np.isin(pid, wanted_pids)
            if inside is not None:
                keep &= inside.has(pid, begin)
            if selection.tids:
                keep &= np.isin(tid, np.array(sorted(selection.tids), np.int64))
            if not keep.any():
                continue
            comm, function = (table[name].unify_dictionaries().combine_chunks() for name in ("comm", "function"))
            columns = [pid, tid, comm.indices.to_numpy(), function.indices.to_numpy()]
            first, kind = distinct_rows(*(column[keep] for column in columns))
            texts, function_names = comm.dictionary.to_pylist(), function.dictionary.to_pylist()
            numbers = []
            for pid_, thread, comm_, which in zip(*(column[keep][first].tolist() for column in columns), strict=True):
                key = Thread(texts[comm_] or names.get(pid_, ""), pid_, thread, host)
                numbers.append(pairs.number(key, function_names[which]))
            since, until = (
                np.minimum(column[keep], np.uint64(MAX_NS)).astype(np.int64) - start_ns for column in (begin, end)
            )
            runs.add(np.array(numbers, np.int64)[kind], since, np.maximum(until, since))
    return runs.launches(pairs)
