"""Iterations: a sequence of kernels that a rank repeats, or the steps that PyTorch's profiler marks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.grouped import rows_of
from iaprof.timelines.intervals import FARTHEST, ends
from iaprof.timelines.options import Options
from iaprof.timelines.placeholders import placed
from iaprof.timelines.trace import Trace

STAGE = "ITSTATS"
STEP = r"^ProfilerStep#\d+$"
"""The name of a step's slice (torch/profiler/profiler.py)."""
_FLOATS = ("Mean", "Min", "Max", "StDev")
_SCHEMA = pa.schema(
    [("pid", pa.int64()), ("Kernels", pa.int64()), ("Iterations", pa.int64()),
     *((name, pa.float64()) for name in _FLOATS), ("Slowest", pa.int64()), ("Slower By", pa.float64()),
     ("Idle Excess", pa.float64()), ("Kernel Excess", pa.float64()), ("Kernel", pa.large_string())]
)  # fmt: skip
"""Times in us. `Slowest` is the number of the slowest iteration, from 0 on; it took `Slower By` longer than the mean,
`Kernel Excess` of it in `Kernel`, `Idle Excess` outside of all kernels. Null where no iteration is slower.
Times of no iteration, and the deviation of a single one, are null."""
SHORTEST_WORD, SHORTEST_TEXT = 4, 10  # kernels: of an iteration, and of the sequence in which it is searched
LONGEST_WORD = 1 << 16
SURE = 8  # kernels around the middle that must repeat before a word of more than twice as many is examined


@dataclass(frozen=True)
class Word:
    """An iteration: kernels `start` to `start + length`, and again as many after them."""

    start: int
    length: int


def collect_iteration_stats(trace: Trace, options: Options) -> None:
    """Finds the iterations of each rank: how long they take, how much that varies, and what makes the slowest slow.

    Makes the tables `iterations`, with a row for each rank, and `iteration_times`, with a row for each iteration.
    """
    found = [*_words(trace), *_steps(trace)]
    if not found:
        return
    rows = [_row(trace, each) for each in found]
    trace.tables["iterations"] = pa.Table.from_pylist(rows, _SCHEMA)
    for row in rows:
        trace.messages.note(
            STAGE, f"[{row['pid']}] avg_iteration_time={round(row['Mean'] or 0.0, 3)}, iterations={row['Iterations']}"
        )
    if any(len(each.start) for each in found):
        number = np.concatenate([np.arange(len(each.start)) for each in found])
        start, length = (np.concatenate([getattr(each, name) for each in found]) for name in ("start", "length"))
        columns = {
            "pid": np.repeat([each.pid for each in found], [len(each.start) for each in found]),
            "Iteration": number,
            "Start Time": start / 1000,
            "Time": length / 1000,
            "Kernel Time": np.concatenate([each.kernel_times() for each in found]) / 1000,
        }
        trace.tables["iteration_times"] = pa.table(columns)


@dataclass(frozen=True)
class _Iterations:
    """The iterations of a rank, and the kernels that run in them."""

    pid: int
    kernels: int  # of an iteration
    start: NDArray[np.int64]  # [n], ns
    length: NDArray[np.float64]  # [n], ns
    iteration: NDArray[np.int64]  # [kernels of all], from 0 to n - 1
    name: NDArray[np.int32]  # [kernels of all], codes
    duration: NDArray[np.float64]  # [kernels of all], ns

    def kernel_times(self) -> NDArray[np.float64]:
        """Returns the ns of all kernels of each iteration."""
        return np.asarray(np.bincount(self.iteration, self.duration, len(self.start)), float)


def _row(trace: Trace, found: _Iterations) -> dict[str, Any]:
    us = found.length / 1000
    count = len(us)
    row: dict[str, Any] = {
        "pid": found.pid,
        "Kernels": found.kernels,
        "Iterations": count,
        "Mean": us.mean() if count else None,
        "Min": us.min() if count else None,
        "Max": us.max() if count else None,
        "StDev": us.std(ddof=1) if count > 1 else None,
    }
    if count < 2 or row["Max"] <= row["Min"]:
        return row
    slowest = int(us.argmax())
    row |= {"Slowest": slowest, "Slower By": row["Max"] - row["Mean"]}
    row["Idle Excess"] = row["Slower By"]
    if len(found.name):
        # How much longer each kernel ran than in the mean of all iterations: with the idle time, the whole excess.
        names, number = np.unique(found.name, return_inverse=True)
        mean = np.bincount(number, found.duration) / count
        excess = np.bincount(number, np.where(found.iteration == slowest, found.duration, 0.0)) - mean
        row["Idle Excess"] -= float(excess.sum()) / 1000
        if excess.max() > 0:
            most = int(excess.argmax())
            row |= {"Kernel Excess": float(excess[most]) / 1000, "Kernel": trace.texts[names[most]]}
    return row


def _words(trace: Trace) -> Iterator[_Iterations]:
    """Yields the iterations of each rank in FLEX files: a repeated sequence of kernels."""
    slices = trace.slices
    is_kernel = find(trace, Kind.KERNEL) & slices.has_counters & placed(trace)
    if trace.torch_files.any():
        is_kernel &= ~trace.is_torch(slices)
    kernels = slices.take(is_kernel)
    order = np.lexsort((kernels.start, kernels.pid))
    kernels = kernels.take(order)
    durations = np.clip(np.nan_to_num(kernels.duration), 0, None)
    distinct, lows = np.unique(kernels.pid, return_index=True)
    name, start = kernels.name, kernels.start
    for pid, low, high in zip(distinct.tolist(), lows, np.append(lows, len(kernels))[1:], strict=True):
        names, starts = name[low:high], start[low:high]
        word = find_word(names)
        length = word.length if word else 0
        places = _followed(names, word) if word else np.zeros(0, np.int64)
        inside = (places[:, np.newaxis] + np.arange(length)).ravel()
        yield _Iterations(
            pid,
            length,
            starts[places],
            (starts[places + length] - starts[places]).astype(float),
            np.repeat(np.arange(len(places)), length),
            names[inside],
            durations[low:high][inside],
        )


def _steps(trace: Trace) -> Iterator[_Iterations]:
    """Yields the iterations of each rank in TORCH files that mark them: the steps of PyTorch's profiler."""
    if not trace.torch_files.any():
        return
    slices = trace.slices
    ranks = np.array([file.rank for file in trace.files], np.int64)[slices.file]
    of_torch, device = trace.is_torch(slices) & placed(trace), find(trace, Kind.DEVICE)
    marks = np.flatnonzero(of_torch & ~device & trace.texts.matches(slices.name, STEP))
    kernels = np.flatnonzero(of_torch & device & find(trace, Kind.KERNEL))
    wanted = np.unique(ranks[marks])
    start, end, duration, name = slices.start, ends(slices), slices.duration, slices.name
    of_ranks = zip(wanted.tolist(), rows_of(ranks[marks], wanted), rows_of(ranks[kernels], wanted), strict=True)
    for rank, its, mine in of_ranks:
        steps = marks[its]
        steps = steps[np.argsort(start[steps], kind="stable")]
        starts, until = start[steps], np.maximum.accumulate(end[steps])
        rows = kernels[mine]
        step = np.searchsorted(starts, start[rows], side="right") - 1
        inside = (step >= 0) & (start[rows] < until[step])
        rows, step = rows[inside], step[inside]
        yield _Iterations(
            rank,
            round(len(rows) / len(steps)),
            starts,
            np.clip(np.nan_to_num(duration[steps]), 0, FARTHEST),
            step,
            name[rows],
            np.clip(np.nan_to_num(duration[rows]), 0, None),
        )


def find_word(names: NDArray[np.int32]) -> Word | None:
    """Returns the first sequence of kernels that is repeated after a prefix of less than a third; None without one.

    Args:
        names: codes, in the order of time.
    """
    count = len(names)
    best: Word | None = None
    best_end = count + 1
    for length in _candidates(names).tolist():
        if 2 * length > best_end:
            break
        # Any word of this length that starts after so short a prefix contains this kernel.
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
    """Returns lengths of words that may be repeated: the kernels around the end of the first word repeat."""
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


def _followed(names: NDArray[np.int32], word: Word) -> NDArray[np.int64]:
    """Returns where the word begins, if it is repeated without a kernel between the two."""
    places = _places(names[word.start :], names[word.start : word.start + word.length]) + word.start
    return np.asarray(places[:-1][np.diff(places) == word.length], np.int64)


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
