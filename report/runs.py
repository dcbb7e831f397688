"""Runs of events for time lines: those of a pair, such as a thread and a kernel, in close succession.

A recording can have a hundred million events, which no picture can show. Events stream by and only runs are kept. If
there are too many runs, the gap within which events belong to one run doubles until there are few enough.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import numbered, order_by
from iaprof.formats.export import Launches, Thread

MAX_RUNS = 200_000
MAX_PAIRS = MAX_RUNS // 2  # each pair has at least one run, whatever the gap
OTHERS = "[others]"
"""The name of all that have no runs of their own, where there are too many."""
MAX_NS = (1 << 62) - 1  # of times, so that differences fit into 63 bits
_FIRST_GAP_NS = 1_000_000
_LAST_GAP_NS = 1 << 62  # more than any time; doubled once more, it fits into 63 bits
_ROWS_AT_ONCE = 1 << 20
_Ints = NDArray[np.int64]


class Pairs:
    """The numbers of threads, of kernels, and of pairs of these. Beyond MAX_PAIRS, all share one that is OTHERS."""

    def __init__(self) -> None:
        self.threads: dict[Thread, int] = {}
        self.kernels: dict[str, int] = {}
        self.numbers: dict[tuple[int, int], int] = {}  # by thread and kernel

    def number(self, thread: Thread, kernel: str) -> int:
        """Returns the number of a pair, of a new one the next free number."""
        if len(self.numbers) >= MAX_PAIRS and (
            (self.threads.get(thread, -1), self.kernels.get(kernel, -1)) not in self.numbers
        ):
            thread, kernel = Thread(OTHERS, 0, 0), OTHERS
        pair = (
            self.threads.setdefault(thread, len(self.threads)),
            self.kernels.setdefault(kernel, len(self.kernels)),
        )
        return self.numbers.setdefault(pair, len(self.numbers))


class Runs:
    """Runs, and the largest gap between launches of a run, which grows with their number."""

    def __init__(self, max_runs: int, gap_ns: int = _FIRST_GAP_NS) -> None:
        self.gap_ns = gap_ns
        self._max_runs = max_runs
        self._batches: list[tuple[_Ints, ...]] = []
        self._waiting = 0

    def add(self, pair: _Ints, begin: _Ints, end: _Ints | None = None, count: _Ints | None = None) -> None:
        """Adds launches or other events, in any order.

        Args:
            pair: int64[n], the number of the thread and the kernel.
            begin: int64[n], ns.
            end: int64[n], ns; None: when they begin.
            count: int64[n], the events that each row stands for; None: 1.
        """
        if not len(pair):
            return
        end, count = begin if end is None else end, np.ones_like(begin) if count is None else count
        self._batches.append((pair, begin, end, count))
        self._waiting += len(pair)
        if self._waiting > _ROWS_AT_ONCE:
            self.all()

    def all(self) -> tuple[_Ints, ...]:
        """Returns pair, begin, end and count of all runs: int64[n] each. Gaps between a pair's runs exceed `gap_ns`."""
        if not self._batches:
            return (np.empty(0, np.int64),) * 4
        columns = [np.concatenate(column) for column in zip(*self._batches, strict=True)]
        order = order_by(columns[0], columns[1])
        pair, begin, end, count = (column[order] for column in columns)
        # The latest end so far of each pair: ranks of ends fit into one number together with the pair.
        ends, rank = numbered(end)
        reach = ends[np.maximum.accumulate(pair * len(ends) + rank) % len(ends)]
        between = np.where(pair[1:] != pair[:-1], np.iinfo(np.int64).max, begin[1:] - reach[:-1])
        while (between > self.gap_ns).sum() >= self._max_runs and self.gap_ns < _LAST_GAP_NS:
            self.gap_ns *= 2
        first = np.concatenate([[0], np.flatnonzero(between > self.gap_ns) + 1])
        runs = pair[first], begin[first], np.maximum.reduceat(end, first), np.add.reduceat(count, first)
        self._batches, self._waiting = [runs], 0
        return runs

    def launches(self, pairs: Pairs) -> Launches:
        """Returns all runs in the order of time; `pairs` has the threads and kernels of their pairs."""
        pair, begin, end, count = self.all()
        order = np.argsort(begin, kind="stable")
        thread_of, kernel_of = np.array(list(pairs.numbers), np.int64).reshape(-1, 2).T
        return Launches(
            list(pairs.kernels),
            list(pairs.threads),
            kernel_of[pair[order]],
            thread_of[pair[order]],
            begin[order] / 1e9,
            end[order] / 1e9,
            count[order],
            self.gap_ns / 1e9,
        )
