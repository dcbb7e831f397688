"""Events that stages make: values of counters, and arrows from slice to slice; and the identifiers of all flows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import groups
from iaprof.timelines.trace import ABSENT, MADE, NO_TEXT, Marks, Points, Trace

EVERYWHERE = -1
"""The pid of counters of all ranks together."""
DECIMALS = 9
"""Sums of rates are rounded to this, so that rates that cancel each other add up to 0."""


@dataclass(frozen=True)
class Track:
    """A counter."""

    name: str
    series: str  # the member of args, its unit
    category: str = ""


def add_points(
    trace: Trace,
    track: Track,
    file: NDArray[np.int32],
    pid: NDArray[np.int64],
    time: NDArray[np.int64],
    value: NDArray[np.float64],
) -> None:
    """Adds points to a track, and counts them."""
    count = len(time)
    if not count:
        return
    texts = trace.texts
    category = texts.code(track.category) if track.category else NO_TEXT
    made = Points(
        file=file.astype(np.int32),
        pid=pid.astype(np.int64),
        tid=np.zeros(count, np.int64),
        name=np.full(count, texts.code(track.name), np.int32),
        category=np.full(count, category, np.int32),
        series=np.full(count, texts.code(track.series), np.int32),
        time=time.astype(np.int64),
        value=value.astype(float),
        row=np.full(count, MADE, np.int64),
    )
    trace.points = trace.points.joined(made)
    trace.made[f"points of the counter {track.name}"] += count


@dataclass(frozen=True)
class Spans:
    """Values that hold for some time, in n rows."""

    file: NDArray[np.int32]
    pid: NDArray[np.int64]
    start: NDArray[np.int64]  # ns
    end: NDArray[np.int64]  # ns
    value: NDArray[np.float64]


def add_sums(trace: Trace, track: Track, spans: Spans, most: float | None = None) -> int:
    """Adds the sum of the values that hold at a time, for each pid: a point whenever one begins or ends.

    Args:
        trace: gets the points.
        track: the counter.
        spans: the values to add up.
        most: shown while a value above 100 holds: only a wrong percentage is above 100. Sums of other values are then
            limited to 100.

    Returns:
        how many sums of other values were limited.
    """
    times = np.concatenate([spans.start, spans.end])
    pids = np.concatenate([spans.pid, spans.pid])
    files = np.concatenate([spans.file, spans.file])
    steps = np.concatenate([spans.value, -spans.value])
    open_ = np.repeat(np.array([1, -1]), len(spans.start))
    order = np.lexsort((times, pids))
    times, pids, files = times[order], pids[order], files[order]
    last = np.append((times[1:] != times[:-1]) | (pids[1:] != pids[:-1]), True)[: len(times)]  # of an instant
    values = np.round(np.cumsum(steps[order])[last], DECIMALS)
    values[np.cumsum(open_[order])[last] == 0] = 0.0
    above = np.zeros(0, bool)
    if most is not None:
        wrong = np.cumsum((open_ * np.tile(spans.value > 100, 2))[order])[last] > 0
        above = ~wrong & (values > 100)
        values = np.where(wrong, most, np.minimum(values, 100))
    add_points(trace, track, files[last], pids[last], times[last], values)
    return int(above.sum())


@dataclass(frozen=True)
class Ends:
    """The starts, or the ends, of n arrows."""

    file: NDArray[np.int32]
    pid: NDArray[np.int64]
    tid: NDArray[np.int64]
    time: NDArray[np.int64]  # ns

    def take(self, rows: NDArray[np.bool_]) -> Ends:
        """Returns the given rows."""
        return Ends(self.file[rows], self.pid[rows], self.tid[rows], self.time[rows])


def largest_id(trace: Trace) -> int:
    """Returns the largest identifier of flows and correlations, which can become flows; at least 0."""
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
        trace: gets the arrows.
        what: their ends, such as "sends to receives", for the count.
        sources: where they start.
        targets: where they end; the arrow is bound to the slice around it ("bp": "e").
        name: codes of their names.
        category: codes of their categories.
        above: a number that is less than all their identifiers.
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
    """Tells which correlations are valid: runtimes write 0 for events without one."""
    return np.asarray((ids != ABSENT) & (ids != 0), bool)


def unique_ids(marks: Marks) -> NDArray[np.int64]:
    """Returns identifiers that are unique in the whole trace: files and categories use the same ones.

    A mark keeps its identifier if no other flow or asynchronous event has it. Marks of different files belong to
    different flows, unless a stage made them.

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
    else:  # they would not fit into int64: number all of them anew
        ids = np.arange(1, len(ids) + 1, dtype=np.uint64)
    return np.where(absent, ABSENT, ids[number].view(np.int64))
