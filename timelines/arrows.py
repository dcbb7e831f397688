"""Arrows from one slice to another: the flows that stages make, and the identifiers of all flows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import groups
from iaprof.timelines.texts import NO_TEXT
from iaprof.timelines.trace import ABSENT, MADE, Marks, Trace


@dataclass(frozen=True)
class Ends:
    """The starts, or the ends, of n arrows."""

    file: NDArray[np.int32]
    pid: NDArray[np.int64]
    tid: NDArray[np.int64]
    time: NDArray[np.int64]  # ns

    def take(self, rows: NDArray[np.bool_]) -> Ends:
        """Returns some of them."""
        return Ends(self.file[rows], self.pid[rows], self.tid[rows], self.time[rows])


def largest_id(trace: Trace) -> int:
    """Returns the largest identifier of a flow, or of what may become one: a correlation; at least 0."""
    used = [trace.flows.id, trace.slices.correlation]
    return max((int(each.max()) for each in used if len(each)), default=0) if any(len(each) for each in used) else 0


def add_arrows(
    trace: Trace,
    what: str,
    sources: Ends,
    targets: Ends,
    name: NDArray[np.int32],
    category: NDArray[np.int32],
    above: int,
) -> None:
    """Adds arrows, and counts their events.

    Args:
        trace: to which they are added.
        what: they are from what to what, for the count.
        sources: where they start.
        targets: where they end; the arrow is bound to the slice around it ("bp": "e").
        name: codes of their names.
        category: codes of their categories.
        above: their identifiers are above this.
    """
    count = len(name)
    if not count:
        return
    ids = np.arange(count) + (max(above, 0) + 1)
    for phase, where in (("s", sources), ("f", targets)):
        bound = trace.texts.code("e") if phase == "f" else NO_TEXT
        made = Marks(
            file=where.file.astype(np.int32),
            pid=where.pid,
            tid=where.tid,
            phase=np.full(count, trace.texts.code(phase), np.int32),
            name=name.astype(np.int32),
            category=category.astype(np.int32),
            id=ids,
            time=where.time,
            row=np.full(count, MADE, np.int64),
            extra={"bp": np.full(count, bound, np.int32)},
        )
        trace.flows = trace.flows.joined(made)
    trace.made[f"ends of arrows from {what}"] += 2 * count


def is_known(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tells which correlations name something: runtimes give 0 to what has none."""
    return np.asarray((ids != ABSENT) & (ids != 0), bool)


def unique_ids(marks: Marks) -> NDArray[np.int64]:
    """Returns identifiers that are unique in the whole trace: files have the same ones, and categories, too.

    A mark keeps its identifier if no other flow or asynchronous event has it. Those of different files are different
    ones, unless a stage made them.

    Returns:
        int64[n], at least 0; ABSENT stays.
    """
    file = np.where(marks.row == MADE, -1, marks.file).astype(np.int64)
    absent = marks.id == ABSENT
    given = np.where(absent, 0, marks.id)
    number, first = groups(file, marks.category.astype(np.int64), given)
    ids = given[first].view(np.uint64)  # negative ones are the largest
    _, once = np.unique(ids, return_index=True)
    again = np.ones(len(ids), bool)
    again[once] = False
    free = np.uint64(1) + ids.max(initial=np.uint64(0))
    if free < np.uint64((1 << 63) - len(ids)):
        ids[again] = free + np.arange(int(again.sum()), dtype=np.uint64)
    else:  # no room above: count all anew
        ids = np.arange(1, len(ids) + 1, dtype=np.uint64)
    return np.where(absent, ABSENT, ids[number].view(np.int64))
