"""Arrows from launches to the kernels that they started, and to waits for these; each with one start and one end.

Viewers ignore other arrows, or draw them between unrelated events.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.grouped import Groups
from iaprof.timelines.intervals import ends
from iaprof.timelines.made_events import Ends, add_arrows, is_known, largest_id
from iaprof.timelines.options import Options
from iaprof.timelines.trace import ABSENT, MADE, Marks, Slices, Trace

STAGE = "FLOWS"
KERNELS, WAITS = "^kernel$", "ScheduleWait"  # categories of kernels, names of waits
BETWEEN_OPERATORS = "^fwdbwd$"  # category of flows whose identifiers are no correlations
BEFORE_END_NS = 1  # where an arrow starts that leaves the end of a slice


class _ByCorrelation:
    """Finds rows by file and correlation: two ranks' files have the same correlations."""

    def __init__(self, file: NDArray[np.int32], correlation: NDArray[np.int64]) -> None:
        self._groups = Groups(file, correlation)
        self.rows = self._groups.order[self._groups.firsts]  # the first of each
        self._file, self._correlation = file[self.rows], correlation[self.rows]

    def find(self, file: NDArray[np.int32], correlation: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first row with each file and correlation; -1 if there is none."""
        known = len(self.rows)
        joined = Groups(np.append(self._file, file), np.append(self._correlation, correlation))
        row_of_group = np.full(len(joined), -1, np.int64)
        row_of_group[joined.numbers[:known]] = self.rows
        return row_of_group[joined.numbers[known:]]


def add_launch_flows(trace: Trace, options: Options) -> None:
    """Adds an arrow to each kernel from the source of its launch's flow, and one from the last kernel to the wait.

    Kernels at which a flow of their launch ends already get none.
    """
    texts, flows, slices = trace.texts, trace.flows, trace.slices
    of_launches = is_known(flows.id) & ~texts.matches(flows.category, BETWEEN_OPERATORS)
    starts = np.flatnonzero(texts.matches(flows.phase, "^s$") & of_launches)
    known = is_known(slices.correlation)
    if not len(starts) or not known.any():
        return
    sources = flows.take(starts)
    by_id = _ByCorrelation(sources.file, sources.id)
    waits = known & texts.matches(slices.name, WAITS)
    kernels = slices.take(known & ~waits & texts.matches(slices.category, KERNELS))
    kernels = kernels.take(np.argsort(kernels.start, kind="stable"))
    found = by_id.find(kernels.file, kernels.correlation)
    kernels, found = kernels.take(found >= 0), found[found >= 0]
    has_end = _have_ends(kernels, flows.take(texts.matches(flows.phase, "^f$") & of_launches))

    waiting = slices.take(waits)
    waiting = waiting.take(np.argsort(waiting.start, kind="stable"))
    last = _last_before(kernels, waiting)
    waiting, last = waiting.take(last >= 0), last[last >= 0]

    launched = _at(sources, found)
    ended = kernels.take(last)
    from_ = Ends(
        np.append(launched.file, ended.file),
        np.append(launched.pid, ended.pid),
        np.append(launched.tid, ended.tid),
        np.append(launched.time, ends(ended) - BEFORE_END_NS),
    )
    to = Ends(
        np.append(kernels.file, waiting.file),
        np.append(kernels.pid, waiting.pid),
        np.append(kernels.tid, waiting.tid),
        np.append(kernels.start, ends(waiting)),
    )
    origin = np.append(found, found[last])
    is_missing = np.append(~has_end, np.ones(len(waiting), bool))
    new = is_missing & (to.time >= from_.time)
    if backward := int(is_missing.sum() - new.sum()):
        trace.messages.warn(STAGE, f"{backward} kernels start before their launch, so they get no arrow from it")
    origin = origin[new]
    add_arrows(
        trace,
        "launches to kernels",
        from_.take(new),
        to.take(new),
        sources.name[origin],
        sources.category[origin],
        largest_id(trace),
    )


def _have_ends(kernels: Slices, ends_: Marks) -> NDArray[np.bool_]:
    """Tells at which kernels a flow of their correlation ends: bool[kernels]."""
    if not len(kernels) or not len(ends_):
        return np.zeros(len(kernels), bool)
    at = Groups(
        np.append(kernels.file, ends_.file), np.append(kernels.correlation, ends_.id),
        np.append(kernels.start, ends_.time),
    )  # fmt: skip
    has_end = np.zeros(len(at), bool)
    has_end[at.numbers[len(kernels) :]] = True
    return has_end[at.numbers[: len(kernels)]]


def _at(flows: Marks, rows: NDArray[np.int64]) -> Ends:
    """Returns the ends of arrows at some flows."""
    return Ends(flows.file[rows], flows.pid[rows], flows.tid[rows], flows.time[rows])


def _last_before(kernels: Slices, waits: Slices) -> NDArray[np.int64]:
    """Returns for each wait the kernel of its correlation that ends last, but not after it; -1 if there is none."""
    if not len(waits) or not len(kernels):
        return np.full(len(waits), -1, np.int64)
    count = len(kernels)
    launch = Groups(
        np.append(kernels.file, waits.file), np.append(kernels.correlation, waits.correlation)
    ).numbers  # equal numbers for the same launch
    is_wait = np.append(np.zeros(count, bool), np.ones(len(waits), bool))
    order = np.lexsort((is_wait, np.append(ends(kernels), ends(waits)), launch))
    places = np.arange(len(order))
    last = np.maximum.accumulate(np.where(is_wait[order], -1, places))  # index of the last kernel up to here
    kernel = order[np.maximum(last, 0)]
    same = (last >= 0) & (launch[kernel] == launch[order])
    result = np.full(len(waits), -1, np.int64)
    of_waits = is_wait[order]
    result[order[of_waits] - count] = np.where(same, kernel, -1)[of_waits]
    return result


def pair_ends(trace: Trace, options: Options) -> None:
    """Pairs the starts and ends of flows that have the same file, category and identifier, by time.

    An end belongs to the last start before it. Further ends of a start get a start of their own: CUDA graphs launch
    several kernels at once. Starts and ends without a partner are dropped.
    """
    flows = trace.flows
    if not len(flows):
        return
    role = _roles(trace, flows)
    file = np.where(flows.row == MADE, -1, flows.file)
    alike = Groups(file, flows.category, flows.id)
    starts, steps, finishes = (alike.sum((role == each).astype(np.int64)) for each in (0, 1, 2))
    has_end = (finishes == 1) | ((finishes == 0) & (steps > 0))  # unitrace's arrows end in steps
    is_odd = (starts != 1) | ~has_end | (alike.key(flows.id) == ABSENT)
    rows = np.flatnonzero(is_odd[alike.numbers] & (role >= 0))
    if not len(rows):
        return
    rows = rows[np.lexsort((role[rows], flows.time[rows], alike.numbers[rows]))]
    of_rows, number = role[rows], alike.numbers[rows]
    place = np.arange(len(rows))
    start = np.maximum.accumulate(np.where(of_rows == 0, place, -1))  # the last one, at or before each
    has_start = (start >= 0) & (number[start] == number) & (flows.id[rows] != ABSENT)
    is_end = has_start & (of_rows == 2)
    followers = np.bincount(start[has_start & (of_rows != 0)], minlength=len(rows))  # ends and steps of each start
    is_kept = has_start & (followers[start] > 0)
    lone = ~is_kept
    trace.dropped["starts of arrows without an end"] += int((lone & (of_rows == 0)).sum())
    trace.dropped["ends of arrows without a start"] += int((lone & (of_rows != 0)).sum())

    # The first start of a group keeps its identifier, with its first end.
    end_rows = place[is_end]
    first_end = np.append(True, start[end_rows][1:] != start[end_rows][:-1]) if len(end_rows) else np.zeros(0, bool)
    used = np.flatnonzero((of_rows == 0) & is_kept)
    again = used[np.append(False, number[used][1:] == number[used][:-1])] if len(used) else used
    ids = flows.id[rows]
    above = largest_id(trace) + 1
    given = np.full(len(rows), ABSENT)
    given[again] = above + np.arange(len(again))
    own = given[start]
    ids = np.where(is_kept & (own != ABSENT), own, ids)
    further = end_rows[~first_end]
    ids[further] = above + len(again) + np.arange(len(further))

    flows.unpack("id")
    flows.id[rows] = ids
    made = flows.take(rows[start[further]])
    made.id = ids[further]
    dropped = np.zeros(len(flows), bool)
    dropped[rows[lone]] = True
    trace.flows = flows.take(~dropped) if dropped.any() else flows
    if len(made):
        trace.flows = trace.flows.joined(made)
        trace.made["starts of arrows with several ends"] += len(made)


def _roles(trace: Trace, flows: Marks) -> NDArray[np.int8]:
    """Returns 0 for starts, 1 for steps, 2 for ends, and -1 for other events: int8[flows]."""
    role = np.full(len(flows), -1, np.int8)
    for number, phase in enumerate("stf"):
        role[trace.texts.matches(flows.phase, f"^{phase}$")] = number
    return role
