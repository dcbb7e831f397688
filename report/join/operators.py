"""Operators: what a framework did on a thread while it launched kernels, from the traces in a capture.

The chain of a launch is the slices around it on its thread, outermost first: operators, annotations and modules.
Python's other functions are left out, as the stack of the launch has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.dictionaries import number_texts, rows_where
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.distinct import distinct_rows
from iaprof.formats.header.traces import TraceClock, trace_clocks
from iaprof.report.join.placements import OPERATOR_COLUMN

NOTHING = -1

OTHERS = "[other operators]"
_CATEGORIES = ("cpu_op", "user_annotation")
_FUNCTIONS, _MODULE = "python_function", "nn.Module: "
# PyTorch's profiler numbers its steps: https://pytorch.org/docs/stable/profiler.html
_STEP = re.compile(r"(ProfilerStep)#\d+")
_MOST_CHAINS = 1 << 15  # of launches: those with the fewest launches become one
_DEEPEST = 256
_COLUMNS = ("time_ns", "duration_ns", "file", "pid", "tid", "name", "category")
_MAX_NS = (1 << 62) - 1
_Ints = NDArray[np.int64]


class Nesting:
    """The slices of some threads. They need not nest: what crosses another one is simply not inside it."""

    def __init__(self, thread: _Ints, begin: _Ints, end: _Ints) -> None:
        """Sorts slices, int64[n] each: by thread, and outer ones before what they contain. Times in ns."""
        self.order = np.lexsort((-end, begin, thread))
        """int64[n]: the slices in that order, to which all numbers refer that methods return."""
        self.thread, self.begin, self.end = thread[self.order], begin[self.order], end[self.order]
        self._first = np.searchsorted(self.thread, self.thread)  # of each one's thread
        # The latest end of 1, 2, 4, 8, ... neighbours: to find the last slice before one that ends late enough.
        self._levels = [self.end]
        while len(self._levels[-1]) > 1:
            ends = self._levels[-1]
            padded = np.append(ends, np.iinfo(np.int64).min) if len(ends) % 2 else ends
            self._levels.append(np.maximum(padded[::2], padded[1::2]))

    def parents(self) -> _Ints:
        """Returns the innermost slice that contains each one wholly: int64[n]; NOTHING if there is none."""
        place = np.arange(len(self.end))
        found = self._last_reaching(place - 1, self.end)
        return np.where(found >= self._first, found, NOTHING)

    def around(self, thread: _Ints, time: _Ints) -> _Ints:
        """Returns the innermost slice of a thread around each time: int64[m]; NOTHING if there is none.

        A slice has its begin in it, and not its end.
        """
        low, high = np.searchsorted(self.thread, thread), np.searchsorted(self.thread, thread, "right")
        # The number of slices of the thread that began: ranks stand for times, so that a key has both.
        ranks = np.searchsorted(begins := np.sort(self.begin), time, "right")
        width = len(begins) + 1
        keys = self.thread * width + np.searchsorted(begins, self.begin, "right")
        begun = np.searchsorted(keys, thread * width + ranks, "right")
        found = self._last_reaching(np.clip(begun, low, high) - 1, time + 1)
        return np.where(found >= low, found, NOTHING)

    def _last_reaching(self, place: _Ints, until: _Ints) -> _Ints:
        """Returns the last slice at or before each place whose end is at or after a time; NOTHING if there is none."""
        node, found = place.copy(), np.full(len(place), NOTHING)
        level_of = np.full(len(place), NOTHING)
        open_ = np.flatnonzero(place >= 0)
        for level, ends in enumerate(self._levels):
            here = node[open_]
            reaches = ends[here] >= until[open_] if not level else np.zeros(len(here), bool)
            left = (here % 2 == 1) & ~reaches
            before = np.zeros(len(here), bool)
            before[left] = ends[here[left] - 1] >= until[open_][left]
            node[open_[before]] -= 1
            level_of[open_[reaches | before]] = level
            open_ = open_[~(reaches | before)]
            node[open_] >>= 1
        for level in range(len(self._levels) - 1, 0, -1):
            own = np.flatnonzero(level_of == level)
            right = np.minimum(2 * node[own] + 1, len(self._levels[level - 1]) - 1)
            node[own] = np.where(self._levels[level - 1][right] >= until[own], right, 2 * node[own])
            level_of[own] = level - 1
        known = level_of == 0
        found[known] = node[known]
        return found


def depths(parents: _Ints) -> _Ints:
    """Returns how many slices are around each one: int64[n]. Pointers double, so that depth costs little."""
    depth, ancestor = (parents >= 0).astype(np.int64), parents.copy()
    while (going := np.flatnonzero(ancestor >= 0)).size:
        above = ancestor[going]
        depth[going] += depth[above]
        ancestor[going] = ancestor[above]
    return depth


@dataclass(frozen=True)
class HostSlices:
    """Operators and the like, in the order of `Nesting`."""

    nesting: Nesting
    name: _Ints  # [n], index into names
    names: Sequence[str]
    threads: Sequence[tuple[int, int]]  # process and thread, by the numbers in `nesting.thread`


def read_host_slices(part: CaptureReader) -> HostSlices | None:
    """Reads the operators of the traces that were joined to a capture; None if there are none.

    Steps of PyTorch's profiler lose their number, so that they add up.

    Raises:
        CaptureError: the capture is damaged.
    """
    clocks = trace_clocks(part.header)
    if not any(clocks) or not part.count("slice"):
        return None
    threads: dict[tuple[int, int], int] = {}
    texts: dict[str | None, int] = {}
    columns: list[list[_Ints]] = [[np.empty(0, np.int64)] for _ in range(4)]
    for table in part.tables("slice", _COLUMNS):
        keep = rows_where(table["category"], lambda text: text in _CATEGORIES)
        keep |= rows_where(table["category"], lambda text: text == _FUNCTIONS) & rows_where(
            table["name"], lambda text: text is not None and text.startswith(_MODULE)
        )
        keep &= table["duration_ns"].to_numpy() > 0
        if not keep.any():
            continue
        table = table.filter(pa.array(keep))
        begin, duration, file, pid, tid = (
            table[name].to_numpy().astype(np.int64) for name in ("time_ns", "duration_ns", "file", "pid", "tid")
        )
        begin = np.clip(begin, -_MAX_NS // 2, _MAX_NS // 2)
        first, which = distinct_rows(*(values - values.min() for values in (file, pid, tid)))
        keys = zip(file[first].tolist(), pid[first].tolist(), tid[first].tolist(), strict=True)
        own = [_thread(clocks, *key) for key in keys]
        number = np.array([-1 if key is None else threads.setdefault(key, len(threads)) for key in own], np.int64)
        found = (
            number[which], begin, begin + np.clip(duration, 0, _MAX_NS // 2), number_texts(table["name"], texts),
        )  # fmt: skip
        joined = found[0] >= 0
        for column, values in zip(columns, found, strict=True):
            column.append(values[joined])
    thread, begin, end, name = (np.concatenate(column) for column in columns)
    if not len(thread):
        return None
    nesting = Nesting(thread, begin, end)
    return HostSlices(nesting, name[nesting.order], [_STEP.sub(r"\1", text or "") for text in texts], list(threads))


def _thread(clocks: Sequence[TraceClock | None], file: int, pid: int, tid: int) -> tuple[int, int] | None:
    """Returns the capture's process and thread for a trace's; None for a trace with a clock of its own."""
    clock = clocks[file] if file < len(clocks) else None
    return None if clock is None else clock.threads.get((pid, tid), (pid, tid))


class Operators:
    """Finds the chains of launches."""

    def __init__(self, slices: HostSlices) -> None:
        """Numbers the chains of all slices."""
        self._slices = slices
        self._chain, self._parent_chain, self._name_of_chain = _chains(slices)
        self.chains: list[tuple[str, ...]] = [()]
        """The chains of launches seen so far, outermost first; number 0 is that of launches in no operator."""
        self._numbers: dict[int, int] = {}

    def of_launches(self, launches: pa.Table) -> pa.Table:
        """Adds OPERATOR_COLUMN, an index into `chains`, to `launch` rows with columns time_ns, pid and tid."""
        times = np.minimum(launches["time_ns"].to_numpy(), np.uint64(_MAX_NS)).astype(np.int64)
        pids, tids = (launches[name].to_numpy().astype(np.int64) for name in ("pid", "tid"))
        first, which = distinct_rows(pids, tids)
        known = {key: number for number, key in enumerate(self._slices.threads)}
        thread = np.array(
            [known.get(key, -1) for key in zip(pids[first].tolist(), tids[first].tolist(), strict=True)], np.int64
        )[which]
        has = np.flatnonzero(thread >= 0) if len(thread) else np.empty(0, np.int64)
        innermost = np.full(len(times), NOTHING)
        innermost[has] = self._slices.nesting.around(thread[has], times[has])
        inside = np.flatnonzero(innermost >= 0)
        chains, chain_of, count = np.unique(self._chain[innermost[inside]], return_inverse=True, return_counts=True)
        rare = set(np.argsort(-count, kind="stable")[_MOST_CHAINS:].tolist())
        number = [
            self._numbered(NOTHING, (OTHERS,)) if at in rare else self._number(chain)
            for at, chain in enumerate(chains.tolist())
        ]
        found = np.zeros(len(times), np.int64)
        found[inside] = np.array(number, np.int64)[chain_of]
        return launches.append_column(OPERATOR_COLUMN, pa.array(found))

    def _number(self, chain: int) -> int:
        names = []
        at = chain
        while at != NOTHING:
            names.append(self._slices.names[int(self._name_of_chain[at])])
            at = int(self._parent_chain[at])
        return self._numbered(chain, tuple(names[::-1]))

    def _numbered(self, chain: int, names: tuple[str, ...]) -> int:
        if chain not in self._numbers:
            self._numbers[chain] = len(self.chains)
            self.chains.append(names)
        return self._numbers[chain]


def read_operators(part: CaptureReader) -> Operators | None:
    """Reads the operators of a capture; None if it has none.

    Raises:
        CaptureError: the capture is damaged.
    """
    slices = read_host_slices(part)
    return None if slices is None else Operators(slices)


def _chains(slices: HostSlices) -> tuple[_Ints, _Ints, _Ints]:
    """Numbers the distinct chains of slices; what is nested more than _DEEPEST deep has its ancestor's.

    Returns:
        The chain of each slice; and of each chain the one around it, NOTHING if there is none, and its innermost name.
    """
    parents = slices.nesting.parents()
    depth = depths(parents)
    texts: dict[str, int] = {}
    same = np.array([texts.setdefault(name, len(texts)) for name in slices.names], np.int64)
    name = same[slices.name]  # steps have one name now
    first_with = np.unique(same, return_index=True)[1]
    order = np.argsort(depth, kind="stable")
    ends = np.searchsorted(depth[order], np.arange(_DEEPEST + 1))
    chain = np.full(len(parents), NOTHING)
    parent_chain, names = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    count = 0
    for level in range(_DEEPEST):
        own = order[ends[level] : ends[level + 1]]
        if not len(own):
            break
        above = np.where(parents[own] >= 0, chain[parents[own]], NOTHING)
        first, number = distinct_rows(above + 1, name[own])
        chain[own] = count + number
        parent_chain.append(above[first])
        names.append(first_with[name[own][first]])
        count += len(first)
    above = parents.copy()
    while (deep := np.flatnonzero((depth >= _DEEPEST) & (depth[above] >= _DEEPEST))).size:
        above[deep] = above[above[deep]]  # pointers double: to the first ancestor that is not too deep
    chain[depth >= _DEEPEST] = chain[above[depth >= _DEEPEST]]
    return chain, np.concatenate(parent_chain), np.concatenate(names)
