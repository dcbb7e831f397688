"""Puts the devices of all ranks on one clock, by their collectives.

A device's counters start at any time, so those of two ranks differ by a constant, and by a little more as their
frequencies differ. A multicast ends (TS5) on its sender when the last of its receivers has received (TS2).

Only events of the device are moved. Host events stay on the clocks of their hosts, which are assumed to be the same.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.quantities import counted
from iaprof.formats.distinct import distinct_values, groups
from iaprof.timelines.device_clock import whole
from iaprof.timelines.dialects import windows
from iaprof.timelines.grouped import Groups
from iaprof.timelines.options import Options
from iaprof.timelines.stages.device_counters import are_rising
from iaprof.timelines.trace import Slices, Trace

_STAGE = "MP_SYNC"
_MULTICAST = "(?i)multicast"
_RECEIVE = " DmaI$"
_SEND = "(?i)singlecast"
_ODD_DILATION = 0.01  # clocks differ by some millionths
_MOST_RANKS = 4096  # whose clocks are compared: untrusted files can have a million pids
_MOST_CELLS = 1 << 24  # ranks times collectives


@dataclass
class _Occurrences:
    """Runs of collectives: a group, and the number of the job with it, of a rank."""

    rows: NDArray[np.intp]  # [m] slices of collectives
    rank: NDArray[np.int64]  # [m] index into pids
    pids: NDArray[np.int64]  # [ranks]
    group: NDArray[np.int64]  # [m] number of the run, the same on all ranks
    count: int  # of runs
    left_out: int  # runs that were left out, as there were too many

    @classmethod
    def of(cls, trace: Trace, *, only_all_reduce: bool) -> _Occurrences:
        """Returns the runs of AllReduce groups; of all groups, if there are none and the caller accepts others."""
        slices = trace.slices
        usable = (slices.group >= 0) & are_rising(slices)
        all_reduce = usable & trace.texts.matches(slices.group, "AllReduce")
        rows = np.flatnonzero(all_reduce if only_all_reduce or all_reduce.any() else usable)
        rank, first = groups(slices.pid[rows])
        # A name in the third job of one rank is the same run as in the third job of another rank.
        jobs, job_first = groups(slices.pid[rows], slices.group[rows], slices.file[rows])
        begin = np.full(len(job_first), np.iinfo(np.int64).max)
        np.minimum.at(begin, jobs, slices.start[rows])
        order = np.lexsort((begin, slices.group[rows[job_first]], slices.pid[rows[job_first]]))
        same, _ = groups(slices.pid[rows[job_first]], slices.group[rows[job_first]])
        number = np.empty(len(order), np.int64)
        new = np.diff(same[order], prepend=-1) != 0
        number[order] = np.arange(len(order)) - np.flatnonzero(new)[np.cumsum(new) - 1]
        group, group_first = groups(slices.group[rows], number[jobs])
        count = min(len(group_first), max(_MOST_CELLS // max(len(first), 1), 1))
        kept = group < count
        left_out = len(group_first) - count
        return cls(rows[kept], rank[kept], slices.pid[rows[first]], group[kept], count, left_out)

    def latest(self, times: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Returns the latest time of each rank and run: float64[ranks, runs] of float64[m]; NaN without one."""
        result = np.full((len(self.pids), self.count), -np.inf)
        np.maximum.at(result, (self.rank[mask], self.group[mask]), times[mask])
        return np.where(np.isinf(result), np.nan, result)


def _device_ns(slices: Slices, rows: NDArray[np.intp], counter: int, base: int, soc_mhz: float) -> NDArray[np.float64]:
    """Returns times of a counter since `base` cycles, in ns of the device's clock."""
    return np.asarray((slices.counter(counter)[rows] - base) * (1e3 / soc_mhz))


def _base(trace: Trace) -> int:
    """Returns the cycles from which times of all devices are counted, so that they are small and exact."""
    return int(trace.slices.counter(0).min(where=are_rising(trace.slices), initial=np.iinfo(np.int64).max))


def _are_too_many(trace: Trace, runs: _Occurrences) -> bool:
    """Reports that there are too many ranks to compare, or collectives."""
    if runs.left_out:
        text = f"Compared the clocks of devices by {runs.count:,} collectives; {runs.left_out:,} others were left out"
        trace.messages.warn(_STAGE, text)
    if len(runs.pids) <= _MOST_RANKS:
        return False
    text = f"{len(runs.pids):,} devices have collectives, more than {_MOST_RANKS:,}: their clocks stay as they are"
    trace.messages.warn(_STAGE, text)
    return True


def mp_sync_tight_v1(trace: Trace, options: Options) -> None:
    """Shifts the devices' clocks so that multicasts end on all ranks at once, then onto the first rank's host clock."""
    runs = _Occurrences.of(trace, only_all_reduce=False)
    if len(distinct_values(trace.slices.pid)) < 2 or not len(runs.rows):
        return
    if len(runs.pids) < 2:
        text = f"Only pid {runs.pids[0]} has collectives: clocks of other devices stay as they are"
        trace.messages.warn(_STAGE, text)
        return
    if _are_too_many(trace, runs):
        return
    slices, texts, rows = trace.slices, trace.texts, runs.rows
    base = _base(trace)
    ends = _device_ns(slices, rows, 4, base, options.soc_mhz)
    receives = texts.matches(slices.name[rows], _RECEIVE)
    multicasts = texts.matches(slices.type[rows], _MULTICAST)
    sent = runs.latest(ends, multicasts)
    received = runs.latest(_device_ns(slices, rows, 1, base, options.soc_mhz), receives)
    apart, how = _apart_by_multicasts(sent, received), "multicast"
    if not apart:
        apart, how = _apart_by_sends(trace, runs, ends, received), "send"
    shift, residual, used = _solve(apart, len(runs.pids))
    _place(trace, runs.pids, shift, np.ones(len(shift)), np.zeros(len(shift)), base, options.soc_mhz)
    aligned = np.flatnonzero(~np.isnan(shift))
    for rank in aligned[1:].tolist():
        trace.messages.note(
            _STAGE,
            f"The device of pid {runs.pids[rank]} is moved by {shift[rank] / 1e3:.3f} us,"
            f" by {counted(int(used[rank]), how)}: the largest residual is {residual[rank] / 1e3:.3f} us",
        )
    if len(aligned) > 1:
        _report_host_events(trace, int(runs.pids[aligned[0]]))
    _report_missing(trace, runs, shift)


_Apart = dict[tuple[int, int], NDArray[np.float64]]
"""By (sender, receiver), as indexes of ranks: how much later the receiver's clock is, in ns."""


def _apart_by_multicasts(sent: NDArray[np.float64], received: NDArray[np.float64]) -> _Apart:
    """Compares the end of the root's last multicast with the others' last receive, in each run.

    Args:
        sent: float64[ranks, runs], the ends of multicasts; NaN.
        received: float64[ranks, runs], when receives were complete; NaN.
    """
    apart: _Apart = {}
    alone = (~np.isnan(sent)).sum(0) == 1  # a run with two roots is of no use
    for root in np.flatnonzero((~np.isnan(sent) & alone).any(1)).tolist():
        own = ~np.isnan(sent[root]) & alone
        later = received[:, own] - sent[root, own]
        for rank in np.flatnonzero(~np.isnan(later).all(1)).tolist():
            if rank != root:
                apart[root, rank] = later[rank, ~np.isnan(later[rank])]
    return apart


def _apart_by_sends(
    trace: Trace, runs: _Occurrences, ends: NDArray[np.float64], received: NDArray[np.float64]
) -> _Apart:
    """Compares the ends of sends to one rank with that rank's last receive, where it has only one sender in a run."""
    slices, rows = trace.slices, runs.rows
    sends = trace.texts.matches(slices.type[rows], _SEND)
    if not sends.any():
        sends = trace.texts.matches(slices.name[rows], "Send.* DmaO$")
    sends &= ~np.isnan(ends)
    receiver = _receivers(trace, slices.peers[rows], runs.pids)
    to_rank = np.flatnonzero(sends & (receiver >= 0) & (receiver != runs.rank))
    each = Groups(receiver[to_rank], runs.group[to_rank], runs.rank[to_rank])
    receivers, groups_, senders = (
        each.key(values[to_rank]) for values in (receiver, runs.group, runs.rank)
    )  # fmt: skip
    times = each.max(ends[to_rank])
    together = Groups(receivers, groups_)
    later = received[receivers, groups_] - times
    used = (together.counts[together.numbers] == 1) & ~np.isnan(later)
    pairs = Groups(senders[used], receivers[used])
    by_pair = np.split(later[used][pairs.order], pairs.firsts[1:])
    return dict(
        zip(
            zip(pairs.key(senders[used]).tolist(), pairs.key(receivers[used]).tolist(), strict=True),
            by_pair if len(pairs) else [],
            strict=True,
        )
    )


def _receivers(trace: Trace, peers: NDArray[np.int32], pids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns for texts of peers the index of the pid; -1 for other texts."""
    distinct, places = np.unique(peers, return_inverse=True)
    texts = [trace.texts[code] if code >= 0 else "" for code in distinct.tolist()]
    ranks = np.array([int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1 for text in texts])
    index = np.minimum(np.searchsorted(pids, ranks), max(len(pids) - 1, 0))
    return np.where(pids[index] == ranks, index, -1)[places] if len(peers) else np.zeros(0, np.int64)


def _solve(apart: _Apart, ranks: int) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Returns how far to shift each rank's clock: from the lowest rank on, along the pairs with most common runs.

    Returns:
        float64[ranks], ns, NaN for ranks that no pair reaches; the largest residual of a rank; and its runs.
    """
    shift, residual = np.full(ranks, np.nan), np.zeros(ranks)
    used = np.zeros(ranks, np.int64)
    if ranks:
        shift[0] = 0.0
    order = {pair: number for number, pair in enumerate(sorted(apart, key=lambda each: -len(apart[each])))}
    of_rank: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair in order:
        for rank in pair:
            of_rank[rank].append(pair)
    reached = [(order[pair], pair) for pair in of_rank[0]]
    heapq.heapify(reached)
    while reached:
        _, pair = heapq.heappop(reached)
        sender, receiver = pair
        if not np.isnan(shift[sender]) and not np.isnan(shift[receiver]):
            continue
        later = float(np.median(apart[pair]))
        if np.isnan(shift[receiver]):
            new, shift[receiver] = receiver, shift[sender] - later
        else:
            new, shift[sender] = sender, shift[receiver] + later
        residual[new] = float(np.abs(apart[pair] - later).max())
        used[new] = len(apart[pair])
        for other in of_rank[new]:
            heapq.heappush(reached, (order[other], other))
    return shift, residual, used


def _place(
    trace: Trace,
    pids: NDArray[np.int64],
    shift: NDArray[np.float64],
    dilation: NDArray[np.float64],
    about: NDArray[np.float64],
    base: int,
    soc_mhz: float,
) -> None:
    """Sets the times of slices with counters from these, on the host clock of the first rank that is aligned.

    A rank's time t since `base` becomes (t - about) / dilation + about + shift.

    Args:
        trace: whose slices move.
        pids: int64[ranks].
        shift: float64[ranks], ns; NaN: its slices stay.
        dilation: float64[ranks].
        about: float64[ranks], ns.
        base: cycles.
        soc_mhz: of the counters.
    """
    aligned = np.flatnonzero(~np.isnan(shift))
    if len(aligned) < 2:
        return
    slices = trace.slices
    first, last = windows(trace.texts, slices.name)
    rank = np.minimum(np.searchsorted(pids, slices.pid), len(pids) - 1)
    moved = are_rising(slices) & (pids[rank] == slices.pid) & ~np.isnan(shift[rank])
    ns = np.zeros((len(slices), 2))
    for column, counter in enumerate((first, last)):
        since = np.where(moved, slices.counters_by(counter) - base, 0) * (1e3 / soc_mhz)
        ns[:, column] = (since - about[rank]) / dilation[rank] + about[rank] + np.nan_to_num(shift[rank])
    # The host clock is that of the reference: by the median of its slices, as its counters may drift.
    reference = np.flatnonzero(moved & (rank == aligned[0]))
    origin = int(slices.start[reference[0]])
    host_end = (slices.start[reference] - origin) + slices.duration[reference]
    offset = float(np.median(host_end - ns[reference, 1]))
    slices.start = np.where(moved, origin + whole(ns[:, 0] + offset), slices.start)
    cycles = slices.counters_by(last) - slices.counters_by(first)
    duration = np.where(moved, cycles, 0) * (1e3 / soc_mhz) / dilation[rank]
    slices.duration = np.where(moved, duration, slices.duration)


def _report_host_events(trace: Trace, pid: int) -> None:
    count = int((~trace.slices.has_counters).sum())
    text = f"All devices are on the host clock of pid {pid}; {counted(count, 'host slice')} stayed as on their hosts"
    trace.messages.note(_STAGE, text)


def _report_missing(trace: Trace, runs: _Occurrences, shift: NDArray[np.float64]) -> None:
    lost = runs.pids[np.isnan(shift)].tolist()
    if len(lost) == len(runs.pids) - 1:
        text = f"No collective tells how the clocks of devices differ: {len(runs.pids)} devices stay as they are"
        trace.messages.warn(_STAGE, text)
    elif lost:
        names = ", ".join(map(str, lost[:8])) + (", ..." if len(lost) > 8 else "")
        text = f"No collective tells of the clocks of pids {names}: these devices stay as they are"
        trace.messages.warn(_STAGE, text)
    with_counters = distinct_values(trace.slices.pid[trace.slices.has_counters])
    if without := len(np.setdiff1d(with_counters, runs.pids)):
        trace.messages.warn(_STAGE, f"Left the clocks of {counted(without, 'device')} without collectives as they were")
    present = np.zeros((len(runs.pids), runs.count), bool)
    present[runs.rank, runs.group] = True
    if partly := int((~present.all(0)).sum()):
        text = f"Of {counted(runs.count, 'collective')}, {partly:,} did not run on all {len(runs.pids)} devices"
        trace.messages.warn(_STAGE, text)


def mp_ts_calibration_v2(trace: Trace, options: Options) -> None:
    """Puts the devices of all ranks on one clock by the ends of AllReduce, and makes their runs equally long.

    The run whose ends are closest on all ranks gets one end; other runs tell how fast a rank's clock is.
    """
    runs = _Occurrences.of(trace, only_all_reduce=True)
    if len(distinct_values(trace.slices.pid)) < 2:
        return
    if len(runs.pids) < 2:
        text = "Fewer than two devices have AllReduce collectives: the clocks of devices stay as they are"
        trace.messages.warn(_STAGE, text)
        return
    if _are_too_many(trace, runs):
        return
    base = _base(trace)
    ends = _device_ns(trace.slices, runs.rows, 4, base, options.soc_mhz)
    latest = runs.latest(ends, np.ones(len(ends), bool))
    later = latest - latest[0]
    shift, dilation = np.full(len(latest), np.nan), np.ones(len(latest))
    about, residual = np.zeros(len(latest)), np.zeros(len(latest))
    everywhere = np.flatnonzero(~np.isnan(later).any(0))
    reference = int(everywhere[np.argmin(later[:, everywhere].mean(0))]) if len(everywhere) else None
    for rank in range(len(latest)):
        known = np.flatnonzero(~np.isnan(later[rank]))
        if not len(known):
            continue
        at = reference if reference is not None else int(known[np.argmin(later[rank, known])])
        own, first = latest[rank, known], latest[0, known]
        if np.ptp(first) > 0 and np.ptp(own) > 0:
            dilation[rank] = np.ptp(own) / np.ptp(first)
        about[rank] = latest[rank, at]
        shift[rank] = latest[0, at] - latest[rank, at]
        placed = (own - about[rank]) / dilation[rank] + about[rank] + shift[rank]
        residual[rank] = np.abs(placed - first).max()
        if rank:
            _report_calibrated(trace, int(runs.pids[rank]), shift[rank], dilation[rank], residual[rank], len(known))
    _place(trace, runs.pids, shift, dilation, about, base, options.soc_mhz)
    if int((~np.isnan(shift)).sum()) > 1:
        _report_host_events(trace, int(runs.pids[0]))
    _report_missing(trace, runs, shift)


def _report_calibrated(trace: Trace, pid: int, shift: float, dilation: float, residual: float, runs: int) -> None:
    trace.messages.note(
        _STAGE,
        f"The device of pid {pid} is moved by {shift / 1e3:.3f} us, its clock is {dilation:.6f} times as fast,"
        f" by {counted(runs, 'collective')}: the largest residual is {residual / 1e3:.3f} us",
    )
    if runs < 2:
        text = f"pid {pid} has only one collective in common: it does not tell how fast the clock is"
        trace.messages.warn(_STAGE, text)
    elif abs(dilation - 1) > _ODD_DILATION:
        text = f"The clock of pid {pid} would be {dilation:.6f} times as fast: the collectives may not be the same ones"
        trace.messages.warn(_STAGE, text)
