"""Slices of a row that partly overlap, which no viewer can show in one row.

Two slices of a row conflict when the second one starts inside the first and ends after it. Touching and nested slices
do not. As starts are whole ns, what is less than 1 ns is not an overlap.

Slices are placed by start, the longest first, each at the first level where it fits: level 0 is the row itself. Only
slices that conflict with another one of their row are placed one by one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.quantities import counted
from iaprof.formats.distinct import groups
from iaprof.timelines.device_clock import whole
from iaprof.timelines.options import Options, Overlap
from iaprof.timelines.stages.order import by_row
from iaprof.timelines.trace import ABSENT, MADE, Marks, Slices, Trace

_UNIT = 10
"""Times are compared in tenths of a ns, from the first start of their row on."""
_LONGEST = 1 << 58  # tenths of ns, 333 days: longer rows are hostile, and are cut
_SHIFT_BELOW = 5 * _UNIT
_NO_LEVEL = -1
_AT_ONCE = 1 << 20  # slices
_WHICH = "that partly overlapped another one of the row"
_FREE = 1 << 62  # the end of a level without open slices
_LARGEST_TID = np.iinfo(np.int64).max


def detect_partial_overlap_events(trace: Trace, options: Options) -> None:
    """Resolves conflicts as the option says: other rows, dropping, asynchronous events, or later starts."""
    slices = trace.slices
    involved = _Involved.of(slices)
    rows = involved.rows
    if not len(rows):
        return
    if options.overlap is Overlap.SHIFT:
        _shift(trace, rows, involved.start, involved.end, involved.row)
        return
    most = options.most_extra_tids if options.overlap is Overlap.TID else 0
    level = _levels(involved.start, involved.end, involved.row, most)
    count = int((level != 0).sum())
    if options.overlap is Overlap.TID:
        _move(trace, rows, level, most)
    elif options.overlap is Overlap.DROP:
        mask = np.ones(len(slices), bool)
        mask[rows[level != 0]] = False
        trace.keep(mask, "overlap")
        trace.messages.warn("POD", f"Dropped {counted(count, 'slice')} {_WHICH}")
    elif options.overlap is Overlap.ASYNC:
        _make_asynchronous(trace, rows[level != 0])
        trace.messages.warn("POD", f"Made asynchronous events of {counted(count, 'slice')} {_WHICH}")
    else:
        trace.messages.warn("POD", f"Found {counted(count, 'slice')} {_WHICH}")


def levels(slices: Slices) -> NDArray[np.int64]:
    """Returns for each slice the first level of its row where it fits: 0 for all that conflict with none."""
    result = np.zeros(len(slices), np.int64)
    involved = _Involved.of(slices)
    result[involved.rows] = _levels(involved.start, involved.end, involved.row, -1)
    return result


@dataclass(frozen=True)
class _Involved:
    """The slices that conflict with another one of their row, by row and start."""

    rows: NDArray[np.intp]
    start: NDArray[np.int64]  # tenths of ns since the first start of the row
    end: NDArray[np.int64]
    row: NDArray[np.int64]

    @classmethod
    def of(cls, slices: Slices) -> _Involved:
        """Finds them, some rows at a time: intermediate arrays for all slices need much memory."""
        order = by_row(slices)
        pids, tids = slices.pid[order], slices.tid[order]
        firsts = np.flatnonzero(np.append(True, (pids[1:] != pids[:-1]) | (tids[1:] != tids[:-1])))[: len(order)]
        del pids, tids
        bounds = np.append(firsts, len(order))
        found: list[tuple[NDArray[Any], ...]] = []
        low = 0
        while low < len(firsts):
            high = max(int(np.searchsorted(bounds, bounds[low] + _AT_ONCE, "right")) - 1, low + 1)
            span = order[bounds[low] : bounds[high]]
            first = firsts[low:high] - bounds[low]
            row = np.repeat(np.arange(high - low), np.diff(bounds[low : high + 1]))
            start, end = _in_row(slices, span, row, first)
            conflict = np.flatnonzero(_conflicting(start, end, row, first))
            found.append((span[conflict], start[conflict], end[conflict], row[conflict] + low))
            low = high
        none = np.zeros(0, np.int64)
        return (
            cls(*(np.concatenate(each) for each in zip(*found, strict=True))) if found else cls(none, none, none, none)
        )


def _in_row(
    slices: Slices, order: NDArray[np.intp], row: NDArray[np.int64], first: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns starts and ends in tenths of ns since the first start of the row."""
    starts = slices.start[order]
    # As unsigned differences, so that times of any size fit.
    since = (starts.view(np.uint64) - starts[first][row].view(np.uint64)).astype(np.uint64)
    start = np.minimum(since, _LONGEST // _UNIT).astype(np.int64) * _UNIT
    length = np.clip(np.nan_to_num(slices.duration[order]), 0, _LONGEST / _UNIT)
    return start, start + np.rint(length * _UNIT).astype(np.int64)


def _conflicting(
    start: NDArray[np.int64], end: NDArray[np.int64], row: NDArray[np.int64], first: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """Tells which slices conflict with another one of their row. Slices are in the order of rows and starts."""
    result = np.zeros(len(start), bool)
    if not len(start):
        return result
    spans = np.maximum.reduceat(end, first) + 4 * _UNIT
    if float(spans.sum(dtype=np.float64)) < _FREE:  # all rows fit on one axis, one after the other
        offset = (np.cumsum(spans) - spans)[row]
        return _conflicting_on_one_axis(start + offset, end + offset)
    bounds = np.append(first, len(start))
    for number in np.flatnonzero(np.diff(bounds) > 1):
        span = slice(bounds[number], bounds[number + 1])
        result[span] = _conflicting_on_one_axis(start[span], end[span])
    return result


def _conflicting_on_one_axis(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tells which slices conflict with another one: bool[n] of int64[n], sorted by start."""
    numbers = np.arange(len(start))
    # As the first of two: a slice that starts inside ends later.
    inside = np.searchsorted(start, end - _UNIT, "right")
    latest = _most(end, numbers + 1, inside)
    result = latest >= end + _UNIT
    if not result.any():
        return result
    # As the second of two: a slice that ends inside starts earlier.
    order = np.argsort(end, kind="stable")
    ends = end[order]
    from_ = np.searchsorted(ends, start + _UNIT, "left")
    until = np.searchsorted(ends, end - _UNIT, "right")
    return result | (_most(-start[order], from_, until) > -start)


def _most(values: NDArray[np.int64], from_: NDArray[np.intp], until: NDArray[np.intp]) -> NDArray[np.int64]:
    """Returns the largest of values[from_:until] for each pair of bounds; the least int64 for an empty span.

    A span of at least 2^k values is covered by two spans of 2^k values, whose maxima come from those of 2^(k-1) values.
    """
    result = np.full(len(from_), np.iinfo(np.int64).min, np.int64)
    length = until - from_
    exponent = np.frexp(np.maximum(length, 0).astype(np.float64))[1] - 1  # of 2, rounded down; -1 for 0
    by_exponent = np.argsort(exponent, kind="stable")
    bounds = np.searchsorted(exponent[by_exponent], np.arange(int(exponent.max(initial=0)) + 2))
    most, width = values, 1
    for k in range(len(bounds) - 1):
        asked = by_exponent[bounds[k] : bounds[k + 1]]
        result[asked] = np.maximum(most[from_[asked]], most[until[asked] - width])
        if k < len(bounds) - 2:
            most = np.maximum(most[:-width], most[width:])
            width *= 2
    return result


class _Levels:
    """Levels of a row, each with a list of the ends of its open slices, the earliest last.

    A slice fits into a level whose open slices all end after it. A binary tree over the levels, in which each node has
    the latest of the earliest ends below it, finds the first such level.
    """

    def __init__(self, most: int) -> None:
        """Starts with free levels.

        Args:
            most: how many; 0: any number.
        """
        self._most = most
        self._open: list[list[int]] = [[]]
        self._by_end: list[tuple[int, int]] = []  # a heap of ends and levels
        self._tree = [_FREE, _FREE]  # the root is at 1, the leaves are the second half

    def place(self, start: int, end: int) -> int:
        """Places a slice, and returns its level; _NO_LEVEL if it fits in none. Slices come in order of start."""
        while self._by_end and self._by_end[0][0] < start + _UNIT:
            level = heapq.heappop(self._by_end)[1]
            self._open[level].pop()
            self._update(level)
        if self._tree[1] <= end - _UNIT:
            self._double()
        tree, node, leaves = self._tree, 1, len(self._tree) // 2
        while node < leaves:
            node *= 2
            if tree[node] <= end - _UNIT:
                node += 1
        level = node - leaves
        if self._most and level >= self._most:
            return _NO_LEVEL
        while level >= len(self._open):
            self._open.append([])
        ends = self._open[level]
        ends.append(min(end, ends[-1]) if ends else end)
        heapq.heappush(self._by_end, (ends[-1], level))
        self._update(level)
        return level

    def _update(self, level: int) -> None:
        tree, node = self._tree, len(self._tree) // 2 + level
        tree[node] = self._open[level][-1] if self._open[level] else _FREE
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])

    def _double(self) -> None:
        leaves = len(self._tree) // 2
        tree = [_FREE] * (4 * leaves)
        tree[2 * leaves : 3 * leaves] = self._tree[leaves:]
        for node in range(2 * leaves - 1, 0, -1):
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
        self._tree = tree


def _levels(
    start: NDArray[np.int64], end: NDArray[np.int64], row: NDArray[np.int64], most_extra: int
) -> NDArray[np.int64]:
    """Returns the level of each slice, or _NO_LEVEL.

    Args:
        start: int64[n], by row and time.
        end: int64[n].
        row: int64[n].
        most_extra: levels beside level 0; -1: any number.
    """
    result = np.empty(len(start), np.int64)
    for span in _spans_of_rows(row):
        levels = _Levels(max(most_extra + 1, 0))
        pairs = zip(start[span].tolist(), end[span].tolist(), strict=True)
        result[span] = [levels.place(*pair) for pair in pairs]
    return result


def _spans_of_rows(row: NDArray[np.int64]) -> Iterator[slice]:
    """Yields the span of each row."""
    bounds = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
    for begin, end in itertools.pairwise(bounds):
        yield slice(begin, end)


def _move(trace: Trace, rows: NDArray[np.intp], levels: NDArray[np.int64], most_extra: int) -> None:
    """Moves slices to rows with unused numbers above that of their own row."""
    slices = trace.slices
    pids, tids = slices.pid[rows], slices.tid[rows]
    used_pids, used_tids = _rows((slices, trace.flows, trace.instants))
    row, first = groups(pids, tids)
    pids = pids[first]  # in order, as rows are
    places = (np.searchsorted(used_pids, pids, side).tolist() for side in ("left", "right"))
    extra = np.maximum.reduceat(np.maximum(levels, 0), first)
    numbers: list[int] = []
    last, unused = None, _Unused(())
    for pid, number, count, low, high in zip(pids.tolist(), tids[first].tolist(), extra.tolist(), *places, strict=True):
        if pid != last:
            last, unused = pid, _Unused(used_tids[low:high].tolist())
        numbers.append(number)
        for _ in range(count):
            numbers.append(unused.after(numbers[-1]))
    begins = np.cumsum(extra + 1) - (extra + 1)
    tid = slices.tid.copy()
    tid[rows] = np.array(numbers, np.int64)[begins[row] + np.maximum(levels, 0)]
    _move_flows(trace, tid)
    slices.tid = tid
    moved, left = int((levels > 0).sum()), int((levels == _NO_LEVEL).sum())
    trace.messages.warn("POD", f"Moved {counted(moved, 'slice')} {_WHICH} to other rows")
    if left:
        text = (
            f"Left {counted(left, 'slice')} {_WHICH} in place: --max-tid-streams allows"
            f" {counted(most_extra, 'extra row')}"
        )
        trace.messages.warn("POD", text)


def _rows(tables: Iterable[Slices | Marks]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the pids and tids of the distinct rows of events, in order."""
    pids, tids = [], []
    for table in tables:
        of_pids, of_tids = table.pid, table.tid
        _, first = groups(of_pids, of_tids)
        pids.append(of_pids[first])
        tids.append(of_tids[first])
    all_pids, all_tids = np.concatenate(pids), np.concatenate(tids)
    _, first = groups(all_pids, all_tids)
    return all_pids[first], all_tids[first]


def _move_flows(trace: Trace, tid: NDArray[np.int64]) -> None:
    """Moves flows that begin or end at the start of slices, if all of these slices get the same new row.

    Args:
        trace: its slices are still in their old rows.
        tid: int64[n], the new rows.
    """
    slices, flows = trace.slices, trace.flows
    if not len(flows):
        return
    place, first = groups(
        np.concatenate([slices.pid, flows.pid]),
        np.concatenate([slices.tid, flows.tid]),
        np.concatenate([slices.start, flows.time]),
    )
    of_slice, of_flow = place[: len(slices)], place[len(slices) :]
    lowest, highest = np.full(len(first), _LARGEST_TID), np.full(len(first), ABSENT)
    np.minimum.at(lowest, of_slice, tid)
    np.maximum.at(highest, of_slice, tid)
    same = lowest == highest
    flows.tid = np.where(same[of_flow], lowest[of_flow], flows.tid)


class _Unused:
    """Finds numbers that no row of a process has."""

    def __init__(self, used: Iterable[int]) -> None:
        """Starts with the numbers of rows."""
        self._next = {number: number + 1 for number in used}  # where to look for an unused one

    def after(self, number: int) -> int:
        """Returns the next unused number, and uses it."""
        passed = []
        while number in self._next:
            passed.append(number)
            number = self._next[number]
            if number > _LARGEST_TID:
                number = 1
        for each in passed:
            self._next[each] = number
        self._next[number] = number + 1
        return number


def _make_asynchronous(trace: Trace, rows: NDArray[np.intp]) -> None:
    """Makes a begin and an end of each of these slices."""
    mask = np.zeros(len(trace.slices), bool)
    mask[rows] = True
    slices = trace.slices.take(mask)
    count = len(slices)
    free = int(trace.instants.id.max(initial=-1)) + 1
    ids = (free if 0 <= free < _LARGEST_TID - count else 0) + np.arange(count)
    arguments: dict[str, NDArray[Any]] = {f"TS{number + 1}": slices.counters[:, number] for number in range(5)}
    arguments |= {"Power": slices.power, "CollGroup": slices.group}
    present = {name: values for name, values in arguments.items() if (values != _absent(values)).any()}
    times = {"b": slices.start, "e": slices.start + whole(slices.duration)}
    for phase, time in times.items():
        marks = Marks(
            slices.file, slices.pid, slices.tid, np.full(count, trace.texts.code(phase), np.int32), slices.name,
            slices.category, ids, time, slices.row if phase == "b" else np.full(count, MADE, np.int64),
            {**present, **slices.extra},
        )  # fmt: skip
        trace.instants = trace.instants.joined(marks)
    trace.slices = trace.slices.take(~mask)
    trace.merged["asynchronous events of overlapping slices"] += count
    trace.made["starts and ends of asynchronous events"] += 2 * count


def _absent(values: NDArray[Any]) -> int:
    return -1 if values.dtype == np.int32 else ABSENT


def _shift(
    trace: Trace, rows: NDArray[np.intp], start: NDArray[np.int64], end: NDArray[np.int64], row: NDArray[np.int64]
) -> None:
    """Starts slices later that overlap by less than 5 ns; their ends stay. Keeps `orig_ts`, `orig_dur` in us."""
    slices = trace.slices
    shifts = np.zeros(len(rows), np.int64)  # ns
    left = 0
    for span in _spans_of_rows(row):
        open_: list[int] = []  # ends, the earliest last
        for number, begin, finish in zip(
            range(span.start, span.stop), start[span].tolist(), end[span].tolist(), strict=True
        ):
            while open_ and open_[-1] < begin + _UNIT:
                open_.pop()
            ending_first = list(_while_before(open_, finish))
            if ending_first:
                late = ending_first[-1] - begin
                if late >= _SHIFT_BELOW:
                    left += 1
                    continue
                shifts[number] = -(-late // _UNIT) + 1  # rounded up to whole ns, and one more
            place = len(open_) - len(ending_first)
            open_.insert(place, min(finish, open_[place - 1]) if place else finish)
    moved = rows[shifts > 0]
    if len(moved):
        by = shifts[shifts > 0]
        _keep_original(slices, moved)
        slices.start, slices.duration = slices.start.copy(), slices.duration.copy()
        slices.start[moved] += by
        slices.duration[moved] = np.maximum(slices.duration[moved] - by, 0)
    text = f"Started {counted(len(moved), 'slice')} {_WHICH} later, by less than 7 ns"
    trace.messages.warn("POD", text)
    if left:
        trace.messages.warn("POD", f"Found {counted(left, 'slice')} {_WHICH}, by 5 ns or more")


def _while_before(open_: list[int], finish: int) -> Iterator[int]:
    """Yields the open ends that are before the end of a slice, the earliest first."""
    for each in reversed(open_):
        if each > finish - _UNIT:
            return
        yield each


def _keep_original(slices: Slices, rows: NDArray[np.intp]) -> None:
    for name, values in (("orig_ts", slices.start / 1e3), ("orig_dur", slices.duration / 1e3)):
        slices.extra[name] = np.full(len(slices), np.nan)
        slices.extra[name][rows] = values[rows]
