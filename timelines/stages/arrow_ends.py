"""Gives each arrow one start and one end: viewers draw no others, or draw them between strangers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.arrows import largest_id
from iaprof.timelines.grouped import Groups
from iaprof.timelines.options import Options
from iaprof.timelines.trace import ABSENT, MADE, Marks, Trace


def pair_ends(trace: Trace, options: Options) -> None:
    """Pairs the starts and ends of flows that have the same file, category and identifier, by time.

    An end belongs to the last start before it. Further ends of a start get a start of their own, which is how CUDA
    graphs launch several kernels at once. Starts and ends that have no other half are dropped.
    """
    flows = trace.flows
    if not len(flows):
        return
    turn = _turns(trace, flows)
    file = np.where(flows.row == MADE, -1, flows.file)
    alike = Groups(file, flows.category, flows.id)
    starts, steps, finishes = (alike.sum((turn == each).astype(np.int64)) for each in (0, 1, 2))
    has_end = (finishes == 1) | ((finishes == 0) & (steps > 0))  # unitrace's arrows end in steps
    is_odd = (starts != 1) | ~has_end | (alike.key(flows.id) == ABSENT)
    rows = np.flatnonzero(is_odd[alike.numbers] & (turn >= 0))
    if not len(rows):
        return
    rows = rows[np.lexsort((turn[rows], flows.time[rows], alike.numbers[rows]))]
    of_rows, number = turn[rows], alike.numbers[rows]
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


def _turns(trace: Trace, flows: Marks) -> NDArray[np.int8]:
    """Returns 0 for a start, 1 for a step, 2 for an end, and -1 for what is none of them: int8[flows]."""
    turn = np.full(len(flows), -1, np.int8)
    for number, phase in enumerate("stf"):
        turn[trace.texts.matches(flows.phase, f"^{phase}$")] = number
    return turn
