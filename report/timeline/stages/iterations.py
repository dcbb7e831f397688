"""Iterations: a sequence of kernels that a rank runs again and again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.report.timeline.dialects import Kind, find
from iaprof.report.timeline.options import Options
from iaprof.report.timeline.trace import Dialect, Trace

STAGE = "ITSTATS"
SHORTEST_WORD, SHORTEST_TEXT = 4, 10  # kernels: of an iteration, and of what it is found in
LONGEST_WORD = 1 << 16
SURE = 8  # kernels beside the middle that must repeat before a word of more than twice as many is looked at


@dataclass(frozen=True)
class Word:
    """An iteration: kernels `start` to `start + length`, and again as many after them."""

    start: int
    length: int


def collect_iteration_stats(trace: Trace, options: Options) -> None:
    """Finds the iterations of each rank; says how long they take, and how much that varies."""
    slices = trace.slices
    is_kernel = find(trace, Kind.KERNEL) & slices.has_counters
    if any(file.dialect is Dialect.TORCH for file in trace.files):
        is_kernel &= ~trace.is_torch(slices)
    kernels = slices.take(is_kernel)
    order = np.lexsort((kernels.start, kernels.pid))
    pids, names, starts = kernels.pid[order], kernels.name[order], kernels.start[order]
    columns: dict[str, list[float]] = {}
    for pid in np.unique(pids).tolist():
        low, high = np.searchsorted(pids, [pid, pid + 1])
        word = find_word(names[low:high])
        gaps = _distances(names[low:high], starts[low:high], word) / 1000 if word else np.empty(0)
        row = {
            "pid": pid,
            "Kernels": word.length if word else 0,
            "Iterations": len(gaps),
            "Mean": gaps.mean() if len(gaps) else 0.0,
            "Min": gaps.min() if len(gaps) else 0.0,
            "Max": gaps.max() if len(gaps) else 0.0,
            "StDev": gaps.std(ddof=1) if len(gaps) > 1 else 0.0,
        }
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
        trace.messages.note(STAGE, f"[{pid}] avg_iteration_time={row['Mean']}, iterations={row['Iterations']}")
    if columns:
        trace.tables["iterations"] = pa.table(columns)


def find_word(names: NDArray[np.int32]) -> Word | None:
    """Returns the first sequence of kernels that comes twice after a prefix of less than a third; None without one.

    Args:
        names: codes, in the order of time.
    """
    count = len(names)
    best: Word | None = None
    best_end = count + 1
    for length in _candidates(names).tolist():
        if 2 * length > best_end:
            break
        # Wherever a word of this length starts after so short a prefix, this kernel is in it.
        middle = length - 1
        reach = min(middle + length, count - length)
        unequal = np.flatnonzero(names[:reach] != names[length : reach + length])
        place = int(np.searchsorted(unequal, middle))
        start = max(int(unequal[place - 1]) + 1 if place else 0, SHORTEST_TEXT - 2 * length)
        end = start + 2 * length
        if (
            start + length <= (unequal[place] if place < len(unequal) else reach)
            and start < end // 3
            and end <= best_end
        ):
            best, best_end = Word(start, length), end
    return best


def _candidates(names: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns lengths of words that may come twice: the kernels around the end of the first one repeat."""
    lengths = np.arange(SHORTEST_WORD, min(len(names) // 2, LONGEST_WORD) + 1)
    if not len(lengths):
        return lengths
    last = lengths - 1
    lengths = lengths[names[last] == names[last + lengths]]
    left, right = np.ones(len(lengths), bool), np.ones(len(lengths), bool)
    for away in range(1, SURE):
        earlier, later = lengths - 1 - away, np.minimum(lengths - 1 + away, len(names) - 1 - lengths)
        left &= names[np.maximum(earlier, 0)] == names[np.maximum(earlier, 0) + lengths]
        right &= names[later] == names[later + lengths]
    return np.asarray(lengths[left | right | (lengths <= 2 * SURE)], np.int64)


def _distances(names: NDArray[np.int32], starts: NDArray[np.int64], word: Word) -> NDArray[np.float64]:
    """Returns the ns between the starts of words that follow each other without a kernel between them."""
    places = _places(names[word.start :], names[word.start : word.start + word.length]) + word.start
    adjacent = np.flatnonzero(np.diff(places) == word.length)
    return (starts[places[adjacent + 1]] - starts[places[adjacent]]).astype(float)


def _places(names: NDArray[np.int32], word: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns where a word is found; of those that overlap, the first."""
    length = len(word)
    counts = np.bincount(names, minlength=int(word.max()) + 1)
    rarest = int(np.argmin(counts[word]))
    places = np.flatnonzero(names == word[rarest]) - rarest
    places = places[(places >= 0) & (places + length <= len(names))]
    for offset in range(length):
        if not len(places):
            break
        places = places[names[places + offset] == word[offset]]
    if (np.diff(places) >= length).all():
        return places
    apart: list[int] = []
    for place in places.tolist():
        if not apart or place - apart[-1] >= length:
            apart.append(place)
    return np.array(apart, np.int64)
