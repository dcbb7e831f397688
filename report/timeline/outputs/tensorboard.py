"""Traces as TensorBoard's PyTorch plugin reads them: a file for each rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from iaprof.report.timeline.outputs.chrome import Rows
from iaprof.report.timeline.trace import Dialect, Trace

HOST_PIDS = 1000
"""What is added to a rank for the pid of its host's events in FLEX files."""


def workers(trace: Trace) -> Iterator[tuple[int, Rows]]:
    """Yields the ranks, and the events of each: of its device, of its host, and of the files of its rank."""
    torch = np.array([file.dialect is Dialect.TORCH for file in trace.files], bool)
    ranks_of_files = np.array([file.rank for file in trace.files], np.int64)
    kinds = (trace.slices, trace.points, trace.flows, trace.instants)
    ranks = []
    for columns in kinds:
        of_torch = torch[columns.file]
        of_pid = np.where(columns.pid >= HOST_PIDS, columns.pid - HOST_PIDS, columns.pid)
        ranks.append(np.where(of_torch, ranks_of_files[columns.file], of_pid))
    # Counters of all ranks together have a pid of -1.
    for rank in np.unique(np.concatenate([ranks[0], ranks_of_files[torch]])):
        if rank >= 0:
            yield int(rank), Rows(*(np.flatnonzero(of_kind == rank) for of_kind in ranks))
