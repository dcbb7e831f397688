"""Puts events of several kinds in order of time, a window at a time: all events at once need much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 16  # rows whose times are computed together
_WINDOW = 1 << 19  # events, about
_CHUNK = 1 << 16  # rows that are put in order together
_MOST_WINDOWS = 64  # each reads all blocks if rows are not in order
_SAMPLED = 64  # events for each one that is a sample for the bounds of windows
_Ints = NDArray[np.int64]


@dataclass(frozen=True)
class EventKind:
    """Events of one kind: rows from 0 on."""

    count: int
    times: Callable[[slice], _Ints]  # returns the times of a range of rows, in ns; called several times


@dataclass(frozen=True)
class _Block:
    first: int  # number of its first event among those of all kinds
    rows: slice
    kind: EventKind
    low: int  # its earliest time
    high: int  # its latest time


class EventOrder:
    """The order of events. They are numbered from 0 on, one kind after the other."""

    def __init__(self, kinds: Sequence[EventKind]) -> None:
        """Reads the times of all events, and divides them into windows."""
        self._blocks: list[_Block] = []
        samples = [np.zeros(0, np.int64)]
        count = 0
        for kind in kinds:
            for begin in range(0, kind.count, _BLOCK):
                rows = slice(begin, min(begin + _BLOCK, kind.count))
                times = kind.times(rows)
                self._blocks.append(_Block(count + begin, rows, kind, int(times.min()), int(times.max())))
                samples.append(times[::_SAMPLED].copy())
            count += kind.count
        windows = min(-(-count // _WINDOW), _MOST_WINDOWS)
        sampled = np.sort(np.concatenate(samples))
        places = [len(sampled) * number // windows for number in range(1, windows)]
        self._begins: list[int] = np.unique(sampled[places]).tolist()  # where windows begin, except the first

    @property
    def earliest(self) -> int:
        """The first time of all events, in ns; 0 without events."""
        return min((block.low for block in self._blocks), default=0)

    def chunks(self, key: Callable[[_Ints], NDArray[Any]], at_once: int) -> Iterator[tuple[_Ints, _Ints]]:
        """Yields events in order of time, then of a key, then of their numbers.

        Args:
            key: returns the keys of some events, by their numbers.
            at_once: the number of events in each array, except the last.

        Yields:
            int64[at_once], numbers of events, and int64[at_once], their times.
        """
        events, times = np.zeros(0, np.int64), np.zeros(0, np.int64)  # not yet yielded
        for low, high in zip([None, *self._begins], [*self._begins, None], strict=True):
            found, of_found = self._window(low, high)
            order = by_time(of_found, lambda rows, found=found: key(found[rows]))  # type: ignore[misc]
            events, times = np.concatenate([events, found[order]]), np.concatenate([times, of_found[order]])
            ready = len(events) - len(events) % at_once
            for begin in range(0, ready, at_once):
                yield events[begin : begin + at_once], times[begin : begin + at_once]
            events, times = events[ready:].copy(), times[ready:].copy()
        if len(events):
            yield events, times

    def _window(self, low: int | None, high: int | None) -> tuple[_Ints, _Ints]:
        """Returns the numbers and times of the events from a time on (None: of all) and before another one."""
        events, times = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for block in self._blocks:
            if (high is not None and block.low >= high) or (low is not None and block.high < low):
                continue
            found = block.kind.times(block.rows)
            inside = np.ones(len(found), bool)
            if low is not None and block.low < low:
                inside &= found >= low
            if high is not None and block.high >= high:
                inside &= found < high
            rows = np.flatnonzero(inside)
            events.append(rows + block.first)
            times.append(found[rows])
        return np.concatenate(events), np.concatenate(times)


def by_time(
    times: NDArray[np.int64], key: NDArray[Any] | Callable[[NDArray[np.int64]], NDArray[Any]]
) -> NDArray[np.int64]:
    """Returns rows in order of time, then of a key, then of their numbers.

    This is several times as fast as np.lexsort if most times are in order.

    Args:
        times: int64[n].
        key: the key of each row, or a function that returns the keys of some rows, which needs less memory.
    """
    order = np.argsort(times, kind="stable")
    keys = key if callable(key) else key.__getitem__
    begin, count = 0, len(order)
    while begin < count:  # a chunk at a time needs less memory
        end = min(begin + _CHUNK, count)
        while end < count:  # up to where the time changes
            others = times[order[end : end + _CHUNK]] != times[order[end - 1]]
            end += int(np.argmax(others)) if others.any() else len(others)
            if others.any():
                break
        rows = order[begin:end]
        ordered = times[rows]
        if (ordered[1:] == ordered[:-1]).any():
            order[begin:end] = rows[np.lexsort((keys(rows), ordered))]
        begin = end
    return order
