"""Traces as TensorBoard's PyTorch plugin reads them: a file for each rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from iaprof.report.timeline.grouped import rows_of
from iaprof.report.timeline.outputs.chrome import Rows
from iaprof.report.timeline.trace import HOST_PIDS, Dialect, Trace

MOST_WORKERS = 1024  # files: a stranger's trace can have a million pids


def workers(trace: Trace) -> Iterator[tuple[int, Rows]]:
    """Yields the ranks, and the events of each: of its device, of its host, and of the files of its rank."""
    torch = np.array([file.dialect is not Dialect.FLEX for file in trace.files], bool)
    ranks_of_files = np.array([file.rank for file in trace.files], np.int64)
    kinds = (trace.slices, trace.points, trace.flows, trace.instants)
    ranks = []
    for columns in kinds:
        of_torch = torch[columns.file]
        of_pid = np.where(columns.pid >= HOST_PIDS, columns.pid - HOST_PIDS, columns.pid)
        ranks.append(np.where(of_torch, ranks_of_files[columns.file], of_pid))
    # Counters of all ranks together have a pid of -1.
    wanted = np.unique(np.concatenate([ranks[0], ranks_of_files[torch]]))
    wanted = wanted[wanted >= 0]
    if len(wanted) > MOST_WORKERS:
        text = (
            f"There are {len(wanted):,} ranks: files for TensorBoard were written for the first {MOST_WORKERS:,} only"
        )
        trace.messages.warn("TB", text)
        wanted = wanted[:MOST_WORKERS]
    for rank, *rows in zip(wanted.tolist(), *(rows_of(of_kind, wanted) for of_kind in ranks), strict=True):
        yield rank, Rows(*rows)
