"""How ranks share the work: communication beside computation, and who waits for whom."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from iaprof.timelines.dialects import Kind, communicates, find
from iaprof.timelines.grouped import Groups
from iaprof.timelines.intervals import ends, lengths_of_unions
from iaprof.timelines.options import Options
from iaprof.timelines.placeholders import placed
from iaprof.timelines.stages.collectives.calls import NAME, SIZE, arrivals
from iaprof.timelines.stages.collectives.events import events_of
from iaprof.timelines.trace import ABSENT, Trace


def compare_ranks(trace: Trace, options: Options) -> None:
    """Makes the tables `overlap`, `imbalance` and `imbalance_ranks`."""
    _overlap(trace)
    _wait(trace)


def _overlap(trace: Trace) -> None:
    """Times are those in which at least one slice of a kind runs; the share is that of the communication."""
    slices = trace.slices
    talks = communicates(trace)
    works = find(trace, Kind.KERNEL) & find(trace, Kind.DEVICE) & ~talks
    used = np.flatnonzero((works | talks) & placed(trace))
    if not len(used):
        return
    start, until = slices.start[used], ends(slices)[used]
    pids, rank = np.unique(slices.pid[used], return_inverse=True)
    works, talks = works[used], talks[used]
    computation, communication, either = (
        lengths_of_unions(start[rows], until[rows], rank[rows], len(pids)) for rows in (works, talks, works | talks)
    )
    both = computation + communication - either
    trace.tables["overlap"] = pa.table(
        {
            "pid": pids,
            "Computation": computation / 1000,
            "Communication": communication / 1000,
            "Overlap": both / 1000,
            "Overlap Percent": np.divide(both, communication, out=np.full(len(pids), np.nan), where=communication > 0)
            * 100,
        }
    )


def _wait(trace: Trace) -> None:
    """Makes the tables of waits: the first and last rank of each collective, and how long each rank waits."""
    events = events_of(trace)
    if not len(events.row):
        return
    of_rank = Groups(events.instance, events.slices.pid)
    first = events.slices.take(of_rank.order[of_rank.firsts])  # rows are by time
    instance, pid = of_rank.key(events.instance), first.pid
    time = arrivals(trace, first, of_rank.max(ends(events.slices))).time
    order = np.lexsort((pid, time, instance))
    instance, pid, time, group = instance[order], pid[order], time[order], first.group[order]
    collectives = Groups(instance)
    ordered = collectives.firsts + collectives.counts - 1
    several = collectives.counts > 1
    head, tail = collectives.firsts[several], ordered[several]
    if not len(head):
        return
    nth = Groups(group[collectives.firsts], np.arange(len(collectives)))
    begins = np.append(True, np.diff(nth.key(group[collectives.firsts])) != 0)
    count = np.arange(len(nth)) - np.maximum.accumulate(np.where(begins, np.arange(len(nth)), 0))
    number = np.empty(len(nth), np.int64)
    number[nth.order] = count
    trace.tables["imbalance"] = pa.table(
        {
            "CollGroup": trace.texts.taken(group[head]),
            "Instance": number[several],
            "Ranks": collectives.counts[several],
            "First Rank": pid[head],
            "Last Rank": pid[tail],
            "First Arrival": time[head] / 1000,
            "Last Arrival": time[tail] / 1000,
            "Wait": (time[tail] - time[head]) / 1000,
        }
    )
    last_of = np.repeat(ordered, collectives.counts)
    counted = several[collectives.numbers] & True
    wait = (time[last_of] - time)[counted] / 1000
    ranks = Groups(pid[counted])
    is_last = (np.arange(len(pid)) == last_of)[counted]
    caused = Groups(np.append(pid[counted], pid[tail]))
    total = caused.sum(np.append(np.zeros(int(counted.sum())), (time[tail] - time[head]) / 1000))
    trace.tables["imbalance_ranks"] = pa.table(
        {
            "pid": ranks.key(pid[counted]),
            "Collectives": ranks.counts,
            "Waits": ranks.sum(wait),
            "Longest Wait": ranks.max(wait),
            "Last": ranks.sum(is_last.astype(np.int64)),
            "Longest Waits for It": total,
        }
    )


def calculate_stats_v2(trace: Trace, options: Options) -> None:
    """Makes the table `stats_summary`: how long each rank computes and communicates, of all its time.

    Times are those in which at least one slice of a kind runs.
    """
    slices = trace.slices
    rank = slices.extra.get("rank", slices.pid)
    talks = trace.is_torch(slices) & communicates(trace)
    computes = find(trace, Kind.KERNEL) & ~talks
    talks |= slices.extra.get(SIZE, np.full(len(slices), ABSENT)) != ABSENT
    talks |= trace.texts.matches(slices.name, f"^{NAME}$")
    rows = np.flatnonzero((computes | talks) & placed(trace))
    groups = Groups(rank[rows])
    start, until = slices.start[rows], ends(slices)[rows]
    comp, comm = (
        lengths_of_unions(start[own], until[own], groups.numbers[own], len(groups)) / 1000
        for own in (computes[rows], talks[rows])
    )
    elapsed = (groups.max(until) - groups.min(start)) / 1000
    some = elapsed > 0
    trace.tables["stats_summary"] = pa.table(
        {
            "pid": groups.key(rank[rows]),
            "elapsed_time": elapsed,
            "comp_active_atime": comp,
            "comm_active_atime": comm,
            "comp_active_atime_perc": np.divide(comp, elapsed, out=np.full(len(groups), np.nan), where=some),
            "comm_active_atime_perc": np.divide(comm, elapsed, out=np.full(len(groups), np.nan), where=some),
        }
    )
