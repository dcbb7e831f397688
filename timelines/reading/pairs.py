"""Pairs the beginnings and ends of slices (B and E): by thread, nested ones like brackets, others by their names."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.timelines.reading.answer import PHASES

_X, _B, _E = range(len(PHASES))
_MOST_OPEN = 1 << 17  # beginnings without an end: a limit on memory, for files that have only these
_FROM_END = ("ts1", "ts2", "ts3", "ts4", "ts5", "power", "bytes", "correlation", "device", "external_id", "python_id",
             "bandwidth", "group", "type", "peers", "category")  # fmt: skip
Rows = NDArray[np.int64]


class Pairs:
    """Pairs the events of a file, piece by piece."""

    def __init__(self) -> None:
        self._open: pa.Table | None = None  # beginnings without an end so far
        self.dropped: Counter[str] = Counter()
        self.merged = 0  # ends that were merged into a slice

    def slices(self, piece: pa.Table) -> pa.Table:
        """Returns the slices that end in a piece, in the order of their ends in the file.

        Args:
            piece: `slice` rows, with `phase` unless all are X; B and E rows have no duration.
        """
        if "phase" not in piece.column_names:
            return piece
        carried = self._open.num_rows if self._open is not None else 0
        rows = pa.concat_tables([self._open, piece]).unify_dictionaries() if self._open is not None else piece
        phases = rows["phase"].to_numpy()
        begins, ends, unpaired, left = _pairs(rows, phases)
        self.dropped["end without a beginning"] += len(unpaired)
        if len(left) > _MOST_OPEN:
            self.dropped["beginning without an end"] += len(left) - _MOST_OPEN
            left = left[-_MOST_OPEN:]
        self._open = rows.take(pa.array(left)) if len(left) else None
        times = rows["time_ns"].to_numpy()
        durations = times[ends] - times[begins]
        negative = durations < 0
        if negative.any():
            self.dropped["negative duration"] += 2 * int(negative.sum())
            begins, ends, durations = begins[~negative], ends[~negative], durations[~negative]
        self.merged += len(ends)
        paired = _merged(rows, begins, ends, durations) if len(begins) else None
        x = np.flatnonzero(phases[carried:] == _X) + carried
        found = rows.take(pa.array(x)).drop_columns(["phase"]) if len(x) else None
        if found is None or paired is None:
            return (found if paired is None else paired) or rows.drop_columns(["phase"]).slice(0, 0)
        order = np.argsort(np.concatenate([x, ends]), kind="stable")
        return pa.concat_tables([found, paired]).unify_dictionaries().take(pa.array(order))

    def finish(self) -> None:
        """Counts the beginnings that have no end in the file."""
        if self._open is not None:
            self.dropped["beginning without an end"] += self._open.num_rows
            self._open = None


def _pairs(rows: pa.Table, phases: NDArray[np.uint8]) -> tuple[Rows, Rows, Rows, Rows]:
    """Returns rows: paired beginnings, their ends (ascending), ends without a beginning, beginnings without an end."""
    at = np.flatnonzero(phases != _X)
    is_begin = phases[at] == _B
    names = _codes(rows["name"])[at]
    threads = np.unique(np.stack([rows[name].to_numpy()[at] for name in ("pid", "tid")]), axis=1, return_inverse=True)[
        1
    ].reshape(-1)
    by_thread = np.argsort(threads, kind="stable")
    threads, is_begin, names, at = threads[by_thread], is_begin[by_thread], names[by_thread], at[by_thread]
    begins, ends, unpaired, left = _nested(threads, is_begin)
    differ = (names[ends] >= 0) & (names[ends] != names[begins])
    if differ.any():
        odd = np.isin(threads, threads[ends[differ]])
        kept = ~odd
        results = [found[kept[found]] for found in (begins, ends, unpaired, left)]
        more = _by_name(np.flatnonzero(odd), threads, is_begin, names)
        begins, ends, unpaired, left = (np.concatenate(each) for each in zip(results, more, strict=True))
    order = np.argsort(at[ends], kind="stable")
    return at[begins[order]], at[ends[order]], np.sort(at[unpaired]), np.sort(at[left])


def _nested(threads: Rows, is_begin: NDArray[np.bool_]) -> tuple[Rows, Rows, Rows, Rows]:
    """Pairs like brackets. `threads` are sorted. Returns indices, see _pairs."""
    count = len(threads)
    if not count:
        empty = np.empty(0, np.int64)
        return empty, empty, empty, empty
    steps = np.where(is_begin, 1, -1)
    depth = np.cumsum(steps)
    first = np.searchsorted(threads, threads)
    depth -= (depth - steps)[first]  # within the thread
    barrier = threads.astype(np.int64) * (2 * count + 2)
    lowest = np.minimum(np.minimum.accumulate(depth - barrier) + barrier, 0)
    before = np.concatenate([[0], lowest[:-1]])
    before[first == np.arange(count)] = 0
    is_unpaired = ~is_begin & (depth < before)
    depth -= lowest  # ignoring these ends
    depth += ~is_begin  # the depth of the slice itself
    used = np.flatnonzero(~is_unpaired)
    order = used[np.lexsort((used, depth[used], threads[used]))]
    pairs = is_begin[order[:-1]] & ~is_begin[order[1:]]
    pairs &= (threads[order[:-1]] == threads[order[1:]]) & (depth[order[:-1]] == depth[order[1:]])
    begins, ends = order[:-1][pairs], order[1:][pairs]
    is_left = is_begin.copy()
    is_left[begins] = False
    return begins, ends, np.flatnonzero(is_unpaired), np.flatnonzero(is_left)


def _by_name(at: Rows, threads: Rows, is_begin: NDArray[np.bool_], names: Rows) -> tuple[Rows, Rows, Rows, Rows]:
    """Pairs one by one: an end with the latest open beginning of its name, or of any name if it has none."""
    begins, ends, unpaired, left = [], [], [], []
    thread = -1
    stack: list[int] = []
    by_name: dict[int, list[int]] = defaultdict(list)
    closed: set[int] = set()
    for row in at.tolist():
        if threads[row] != thread:
            left += [each for each in stack if each not in closed]
            thread, stack = int(threads[row]), []
            by_name.clear()
        name = int(names[row])
        if is_begin[row]:
            stack.append(row)
            by_name[name].append(row)
            continue
        opened = stack if name < 0 else by_name[name]
        while opened and opened[-1] in closed:
            opened.pop()
        if opened:
            begins.append(opened[-1])
            ends.append(row)
            closed.add(opened.pop())
        else:
            unpaired.append(row)
    left += [each for each in stack if each not in closed]
    begins_, ends_, unpaired_, left_ = (np.array(each, np.int64) for each in (begins, ends, unpaired, left))
    return begins_, ends_, unpaired_, left_


def _codes(texts: pa.ChunkedArray) -> Rows:
    """Returns a number for each distinct text; -1 for null."""
    array = texts.combine_chunks()
    array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
    once = array.dictionary.dictionary_encode().indices.to_numpy()
    indices = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return np.where(indices >= 0, np.append(once, -1)[indices], -1).astype(np.int64)


def _merged(rows: pa.Table, begins: Rows, ends: Rows, durations: Rows) -> pa.Table:
    """Returns a slice for each pair. The slice also gets the values that only its end has."""
    slices, last = rows.take(pa.array(begins)), rows.take(pa.array(ends))
    for name in _FROM_END:
        if last[name].null_count < len(ends):
            own = slices[name]
            if pa.types.is_dictionary(own.type):
                own, other = own.cast(pa.string()), last[name].cast(pa.string())
                column = pc.coalesce(own, other).dictionary_encode()
            else:
                column = pc.coalesce(own, last[name])
            slices = slices.set_column(slices.column_names.index(name), name, column)
    if last["args"].null_count < len(ends):
        args = _merged_args(slices["args"], last["args"])
        slices = slices.set_column(slices.column_names.index("args"), "args", args)
    index = slices.column_names.index("duration_ns")
    return slices.set_column(index, "duration_ns", pa.array(durations)).drop_columns(["phase"])


def _merged_args(first: pa.ChunkedArray, last: pa.ChunkedArray) -> pa.ChunkedArray:
    """Joins JSON objects. Of a member that both have, the later one counts: that of the end."""
    begin = pc.utf8_slice_codeunits(first, 0, -1)
    joined = pc.binary_join_element_wise(begin, pc.utf8_slice_codeunits(last, 1), ",")
    return pc.coalesce(joined, first, last)
