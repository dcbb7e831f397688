"""Traces as TensorBoard's PyTorch plugin reads them: a file for each rank.

The plugin measures steps, in which all else has to be (torch_tb_profiler 0.4.3, profiler/event_parser.py: StepParser).
Without slices `ProfilerStep#N` it takes the time of the host's operators for one, and without these a negative one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from iaprof.timelines.grouped import rows_of
from iaprof.timelines.outputs.chrome import Rows
from iaprof.timelines.placeholders import placed
from iaprof.timelines.stages.iterations import STEP
from iaprof.timelines.trace import HOST_PIDS, Trace
from iaprof.timelines.views import nesting

MOST_WORKERS = 1024  # files: a stranger's trace can have a million pids


def workers(trace: Trace) -> Iterator[tuple[int, Rows]]:
    """Yields the ranks, and the events of each: of its device, of its host, and of the files of its rank."""
    torch = trace.torch_files
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


def step_of(trace: Trace, rank: int, rows: Rows) -> list[Mapping[str, Any]]:
    """Returns the event of a step around all slices of a rank of the AIU's runtime, whose traces mark none.

    It is in whole us, and a us longer, as the plugin's floats do not resolve ns at today's times. A rank of which
    PyTorch has a trace gets none: that has steps, or operators.
    """
    own = rows.kinds[0][placed(trace)[rows.kinds[0]]]
    if (
        not len(own)
        or trace.is_torch(trace.slices)[own].any()
        or trace.texts.matches(trace.slices.name[own], STEP).any()
    ):
        return []
    starts, until = (each[own] for each in nesting.times(trace.slices))
    first, last = int(starts.min()) // 1000, -(-int(until.max()) // 1000) + 1
    place = {"pid": rank + HOST_PIDS, "tid": 0, "ts": first, "dur": last - first}
    job = trace.job_names[int(trace.slices.file[own[0]])]
    return [{"ph": "X", "name": "ProfilerStep#0", "cat": "user_annotation", **place, "args": {"jobname": job}}]
