"""The bandwidth of collectives: bytes divided by the time that all ranks take for one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.grouped import Groups
from iaprof.timelines.intervals import ends
from iaprof.timelines.made_events import EVERYWHERE, Spans, Track, add_points, add_sums
from iaprof.timelines.options import Options
from iaprof.timelines.stages.collectives.calls import INSTANCE, SIZE
from iaprof.timelines.trace import ABSENT, NO_TEXT, Trace

OF_CALLS = Track("Coll_Bandwidth", "GBps")
OF_SUMS, OF_ALL = Track("BW allreduce", "Unit GBps"), Track("BW all-pcie", "Unit GBps")


def compute_from_calls(trace: Trace, options: Options) -> None:
    """Adds a counter of the bandwidth of collectives, from the slices that add_collective_calls made."""
    slices = trace.slices
    size = slices.extra.get(SIZE, np.full(len(slices), ABSENT))
    calls = slices.take(size != ABSENT)
    if not len(calls):
        return
    collective = Groups(calls.extra[INSTANCE])
    start, end = collective.min(calls.start), collective.max(ends(calls))
    bytes_ = collective.key(calls.extra[SIZE])
    some = end > start
    rates = np.round(bytes_[some] / (end - start)[some], 3)  # bytes per ns are GB/s
    everywhere = np.full(len(rates), EVERYWHERE)
    spans = Spans(collective.key(calls.file)[some], everywhere, start[some], end[some], rates)
    add_sums(trace, OF_CALLS, spans)


def compute_from_events(trace: Trace, options: Options) -> None:
    """Adds counters of the bandwidth of all-reduces.

    An all-reduce lasts from the end of the slice before its first event, of any rank, to the end of the slice before
    the next kernel that belongs to no collective, after all ranks have received.
    """
    slices, texts = trace.slices, trace.texts
    is_sum = texts.matches(slices.group, "AllReduce_all_reduce_")
    if not is_sum.any():
        return
    ranks = len(np.unique(slices.pid[slices.group != NO_TEXT]))
    until = ends(slices)
    order = np.lexsort((slices.start, until))
    sorted_ends = until[order]
    is_sum = is_sum[order]
    names, bytes_ = slices.name[order], slices.bytes[order]
    of_sum = np.flatnonzero(is_sum).tolist()
    sends = np.flatnonzero(is_sum & texts.matches(names, "SenRdmaSend") & (bytes_ != ABSENT)).tolist()
    receives = np.flatnonzero(is_sum & texts.matches(names, "SenRdmaRec")).tolist()
    kernels = np.flatnonzero(find(trace, Kind.KERNEL)[order] & (slices.group[order] == NO_TEXT)).tolist()
    spans: list[tuple[int, int, int]] = []  # places in `order`
    place = 0
    while (at := bisect_left(of_sum, place)) < len(of_sum):
        first = of_sum[at]
        sent, received = bisect_left(sends, first), bisect_left(receives, first) + ranks - 1
        if sent >= len(sends) or received >= len(receives):
            break
        closing = bisect_right(kernels, max(sends[sent], receives[received]))
        if closing >= len(kernels):
            break
        spans.append((max(first - 1, 0), sends[sent], kernels[closing] - 1))
        place = kernels[closing] + 1
    if not spans:
        return
    first_, sent_, last_ = np.array(spans).T
    start, end = sorted_ends[first_], sorted_ends[last_]
    start = np.where(first_ == 0, np.minimum(start, slices.start[order][0]), start)
    some = end > start
    rates = np.round(bytes_[sent_][some] / (end - start)[some], 3)
    start, end, files = start[some], end[some], slices.file[order][sent_][some]
    times = np.column_stack([start, end]).reshape(-1)
    pid = np.full(len(times), EVERYWHERE)
    for track, factor in ((OF_SUMS, 1), (OF_ALL, 2 * (ranks - 1))):
        values = np.column_stack([rates * factor, np.zeros(len(rates))]).reshape(-1)
        add_points(trace, track, np.repeat(files, 2), pid, times, values)
