"""The waits of a capture over time, by thread and function: what time lines show.

Those that were added up, as they were short, have no times of their own and are left out. If there are too many, waits
that follow one another closely are one, as launches are (launch_runs.py).
"""

from __future__ import annotations

import numpy as np

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct
from iaprof.formats.export import Launches, Thread
from iaprof.formats.header.waits import WaitFlags
from iaprof.report.parts import host_of, starts_ns
from iaprof.report.profile import ReportOptions
from iaprof.report.views.cpu_profile import process_names
from iaprof.report.views.launch_runs import LATEST_NS, MOST_RUNS, Runs

_COLUMNS = ("time_ns", "end_ns", "pid", "tid", "comm", "function", "flags")


def wait_runs(capture: CaptureReader, options: ReportOptions, most: int = MOST_RUNS) -> Launches:
    """The waits that a selection keeps, by its times, processes and threads; functions are in the place of kernels.

    Args:
        capture: the open capture.
        wanted: which part of it.
        most: how many there can be.

    Raises:
        CaptureError: the capture is damaged.
    """
    selection, runs = options.selection, Runs(most, 1)
    threads: dict[Thread, int] = {}
    functions: dict[str, int] = {}
    pairs: dict[tuple[int, int], int] = {}
    parts = capture.parts
    for part, start_ns in zip(parts, starts_ns(capture), strict=True):
        host = host_of(part.header) if len(parts) > 1 else ""
        row_filter = selection.row_filter(part.header, start_ns)
        names = process_names(part.table("process"))
        pids = selection.matching_pids(part, names) if selection.by_process else None
        wanted_pids = None if pids is None else np.array(sorted(pids), np.int64)
        for table in part.tables("wait", _COLUMNS):
            begin, end, pid, tid, flags = (
                table[name].to_numpy() for name in ("time_ns", "end_ns", "pid", "tid", "flags")
            )
            keep = (flags & WaitFlags.ADDED_UP) == 0
            keep &= (end >= np.uint64(row_filter.begin_ns)) & (begin <= np.uint64(row_filter.end_ns))
            if wanted_pids is not None:
                keep &= np.isin(pid, wanted_pids)
            if selection.tids:
                keep &= np.isin(tid, np.array(sorted(selection.tids), np.int64))
            if not keep.any():
                continue
            comm, function = (table[name].unify_dictionaries().combine_chunks() for name in ("comm", "function"))
            columns = [pid, tid, comm.indices.to_numpy(), function.indices.to_numpy()]
            first, kind = distinct(*(column[keep] for column in columns))
            texts, called = comm.dictionary.to_pylist(), function.dictionary.to_pylist()
            numbers = []
            for who, thread, text, which in zip(*(column[keep][first].tolist() for column in columns), strict=True):
                key = Thread(texts[text] or names.get(who, ""), who, thread, host)
                pair = threads.setdefault(key, len(threads)), functions.setdefault(called[which], len(functions))
                numbers.append(pairs.setdefault(pair, len(pairs)))
            since, until = (
                np.minimum(column[keep], np.uint64(LATEST_NS)).astype(np.int64) - start_ns for column in (begin, end)
            )
            runs.add(np.array(numbers, np.int64)[kind], since, np.maximum(until, since))
    pair_of, begins, ends, counts = runs.all()
    order = np.argsort(begins, kind="stable")
    thread_of, function_of = np.array(list(pairs), np.int64).reshape(-1, 2).T
    return Launches(
        list(functions),
        list(threads),
        function_of[pair_of[order]],
        thread_of[pair_of[order]],
        begins[order] / 1e9,
        ends[order] / 1e9,
        counts[order],
        runs.gap_ns / 1e9,
    )
