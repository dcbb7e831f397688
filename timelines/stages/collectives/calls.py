"""Slices for the time of each rank in a collective operation: from its last kernel before it to its last transfer.

Only chains are supported: each rank adds its data to those of the rank before it, and the last one sends the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.grouped import Groups, rows_of
from iaprof.timelines.intervals import ends
from iaprof.timelines.options import Options
from iaprof.timelines.stages.collectives.events import RECEIVED, Events, events_of, peers_of
from iaprof.timelines.trace import ABSENT, NO_TEXT, Slices, Trace

STAGE = "FLOW"
NAME, CATEGORY, FIRST_TID = "gloo:all_reduce", "user_annotation", 10000
SIZE, ALGORITHM, PEERS, AFTER = (
    "Coll_data_size", "collective algorithm type", "peers", "rank group compute event"
)  # fmt: skip
TO_ALL = "^MultiCast"  # slices of one message, which merge_sends may have merged
INSTANCE = "instance"  # equal numbers for the slices of one collective
NEAR_NS = 10_000_000  # distance of the end of a kernel from that of a collective's first event


@dataclass(frozen=True)
class Arrivals:
    """When ranks have finished computing and join a collective, in n rows."""

    time: NDArray[np.int64]  # ns
    kernel: NDArray[np.int32]  # the name of the last kernel, or NO_TEXT


def arrivals(trace: Trace, first: Slices, until: NDArray[np.int64]) -> Arrivals:
    """Returns when ranks arrive at collectives: at the end of the first kernel that starts after its first event.

    Receives are posted early, so a rank may still compute what it sends after the first event has begun.

    Args:
        trace: with the kernels.
        first: the first event of each rank in each collective; where no kernel fits, its start is the arrival.
        until: the end of the rank's last event, in ns: a kernel that ends later is not taken.
    """
    is_kernel = find(trace, Kind.KERNEL) & ~trace.texts.matches(trace.slices.name, "^AllReduce")
    kernels = trace.slices.take(is_kernel & (trace.slices.group == NO_TEXT))
    kernels = kernels.take(np.argsort(kernels.start, kind="stable"))
    kernel_starts, kernel_ends, kernel_names = kernels.start, ends(kernels), kernels.name
    first_starts, first_ends = first.start, ends(first)
    time, name = first_starts.copy(), np.full(len(first), NO_TEXT, np.int32)
    pids = np.unique(first.pid)
    for mine, theirs in zip(rows_of(first.pid, pids), rows_of(kernels.pid, pids), strict=True):
        if not len(theirs):
            continue
        reached = np.maximum.accumulate(kernel_ends[theirs])
        after = np.searchsorted(kernel_starts[theirs], first_starts[mine], side="right")
        near = np.searchsorted(reached, first_ends[mine] - NEAR_NS)
        place = np.maximum(after, near)
        kernel = theirs[np.minimum(place, len(theirs) - 1)]
        latest = np.minimum(first_ends[mine] + NEAR_NS, until[mine])
        fits = (place < len(theirs)) & (kernel_ends[kernel] <= latest)
        time[mine[fits]] = kernel_ends[kernel[fits]]
        name[mine[fits]] = kernel_names[kernel[fits]]
    return Arrivals(time, name)


def add_collective_calls(trace: Trace, options: Options) -> None:
    """Adds a slice for each rank of each complete collective that is a chain."""
    events = events_of(trace)
    texts = trace.texts
    if not len(events.row):
        return
    of_rank = Groups(events.instance, events.slices.pid)
    instance, pid = of_rank.key(events.instance), of_rank.key(events.slices.pid)
    of_instance = Groups(instance)
    is_last = pid == of_instance.max(pid)[of_instance.numbers]
    is_first = pid == of_instance.min(pid)[of_instance.numbers]
    kinds = {kind: texts.matches(events.slices.type, kind) for kind in ("^SingleCast$", TO_ALL, RECEIVED)}
    begins = np.where(is_first[of_rank.numbers], kinds["^SingleCast$"], kinds[RECEIVED])
    finishes = np.where(is_last[of_rank.numbers], kinds[TO_ALL], kinds[RECEIVED])
    first = _extreme(of_rank, begins, events.slices.start, latest=False)
    last = _extreme(of_rank, finishes, events.slices.start, latest=True)

    multicasts = of_rank.max(kinds[TO_ALL].astype(np.int64)) > 0
    is_chain = (of_instance.max((multicasts & is_last).astype(np.int64)) > 0) & (
        of_instance.max((multicasts & ~is_last).astype(np.int64)) == 0
    )
    good = is_chain & events.is_complete
    if other := int((events.is_complete & ~is_chain).sum()):
        trace.messages.warn(STAGE, f"{other} collectives are not chains of ranks, so they get no slices")
    has = good[instance] & (first >= 0) & (last >= 0)
    _add(trace, events, instance[has], first[has], last[has])


def _extreme(groups: Groups, asked: NDArray[np.bool_], start: NDArray[np.int64], latest: bool) -> NDArray[np.int64]:
    """Returns the row of each group that starts first, or last, among the given rows; -1 without one."""
    rows = np.flatnonzero(asked)
    order = rows[np.argsort(start[rows], kind="stable")]
    found = np.full(len(groups), -1, np.int64)
    order = order if latest else order[::-1]
    found[groups.numbers[order]] = order  # the last assignment counts
    return found


def _add(
    trace: Trace, events: Events, instance: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64]
) -> None:
    begin, finish = events.slices.take(first), events.slices.take(last)
    until = ends(finish)
    arrived = arrivals(trace, begin, until)
    backward = until < arrived.time
    if count := int(backward.sum()):
        trace.messages.warn(STAGE, f"{count} ranks' collectives end before they begin, so they are left out")
    forward = np.flatnonzero(~backward)
    instance, begin, finish = instance[forward], begin.take(forward), finish.take(forward)
    if not len(forward):
        return
    texts = trace.texts
    ranks, members = _members(trace, events)
    size = np.where(begin.bytes != ABSENT, begin.bytes, finish.bytes)
    known = size != ABSENT
    is_sum = texts.matches(begin.group, "AllReduce_all_reduce")
    made = Slices.of(
        len(forward),
        file=begin.file,
        pid=begin.pid,
        tid=FIRST_TID + begin.pid,
        name=np.where(is_sum, texts.code(NAME), begin.group).astype(np.int32),
        category=np.full(len(forward), texts.code(CATEGORY), np.int32),
        start=arrived.time[forward],
        duration=(until - arrived.time)[forward].astype(float),
        bytes=size,
        group=begin.group,
    )
    made.extra = {
        INSTANCE: instance,
        SIZE: np.where(known, 2 * (ranks[instance] - 1) * np.where(known, size, 0), ABSENT),
        ALGORITHM: np.full(len(forward), texts.code("chain"), np.int32),
        PEERS: members[instance],
        AFTER: arrived.kernel[forward],
    }
    trace.slices = trace.slices.joined(made)
    trace.made["slices of collectives"] += len(forward)


def _members(trace: Trace, events: Events) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Returns the number of ranks of each instance, and the code of their list as a text."""
    own, peers = peers_of(trace, events.slices.peers)
    instances = np.append(events.instance, events.instance[own])
    pairs = Groups(instances, np.append(events.slices.pid, peers))
    instance, rank = pairs.key(instances), pairs.key(np.append(events.slices.pid, peers))
    counts = np.bincount(instance, minlength=len(events.is_complete))
    ranks = np.split(rank, np.cumsum(counts)[:-1])
    known: dict[bytes, str] = {}  # nearly all instances have the same ranks
    lists = [known.setdefault(some.tobytes(), "{" + ", ".join(map(str, some.tolist())) + "}") for some in ranks]
    return counts, trace.texts.codes(lists)
