"""The lines of folded stacks, by whole columns.

A line is put together from a few texts, each of which belongs to many lines. They are sorted, numbered and joined as
columns: there is no Python per line.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.frames import BETWEEN, CPU_PARTS, GPU_PARTS, NOTHING, clean_frame, gpu_frames, launch_frames
from iaprof.formats.profile import Profile, Shape
from iaprof.formats.stalls import REASONS

_LINES_AT_ONCE = 1 << 16
_TEXT = pa.large_string()
_WIDEST_KEY = 1 << 62


def write_lines(profile: Profile, shape: Shape, out: IO[str]) -> None:
    """Writes every stack with its count, sorted by text; those below the limit add up in a last line."""
    columns, counts = lines_of(profile, shape)
    total = int(counts.sum())
    kept = counts * 100.0 >= shape.percent_limit * total
    small = int(counts[~kept].sum())
    for first in range(0, len(counts), _LINES_AT_ONCE):
        some = slice(first, first + _LINES_AT_ONCE)
        out.write(text_of([(texts, numbers[some][kept[some]]) for texts, numbers in columns], counts[some][kept[some]]))
    if small:
        out.write(f"[below {shape.percent_limit:g} %] {small}\n")


LinesColumn = tuple[list[str], NDArray[np.int64]]
"""Texts, and which of them each line has."""


def lines_of(profile: Profile, shape: Shape, by_interval: bool = False) -> tuple[list[LinesColumn], NDArray[np.int64]]:
    """The parts of each line from the root on, in the order of the lines' texts, and each line's count.

    Counts are int64[lines]; by interval, they are int64[lines, intervals].
    """
    row, reason = np.nonzero(profile.counts)
    counts = profile.counts[row, reason].astype(np.int64)
    if by_interval:
        counts = counts[:, np.newaxis] * (profile.interval[row, np.newaxis] == np.arange(len(profile.intervals)))
    columns = []
    for parts in _runs(shape.parts):
        if parts[0] in CPU_PARTS:
            frames = [launch_frames(launch, shape, parts) for launch in profile.launches]
            columns.append(_column(frames, profile.launch[row], shape))
        elif parts[0] in GPU_PARTS:
            pairs, pair_of = np.unique(profile.kernel * len(profile.codes) + profile.code, return_inverse=True)
            each = [divmod(pair, len(profile.codes)) for pair in pairs.tolist()]
            frames = [gpu_frames(profile.kernels[kernel], profile.codes[code], shape, parts) for kernel, code in each]
            columns.append(_column(frames, pair_of[row], shape))
        elif parts[0] == "interval":
            columns.append(_column(_interval_frames(profile.intervals), profile.interval[row], shape))
        elif parts[0] == "reason":
            columns.append(_column([[f"{name}_[g]"] for name in REASONS], reason.astype(np.int64), shape))
        elif parts[0] == "offset":
            offsets, offset_of = np.unique(profile.offset, return_inverse=True)
            columns.append(_column([[f"0x{offset:x}_[g]"] for offset in offsets.tolist()], offset_of[row], shape))
        else:
            columns.append(([f"{BETWEEN};"], np.zeros(len(row), np.int64)))
    return _added_up(_never_empty(columns[::-1] if shape.inverted else columns), counts)


def _never_empty(columns: list[LinesColumn]) -> list[LinesColumn]:
    """The columns, with a frame for lines that have none of the parts that were chosen."""
    empty = np.logical_and.reduce([np.array([not text for text in texts], bool)[number] for texts, number in columns])
    if not empty.any():
        return columns
    texts, number = columns[0]
    sorted_ = sorted([*texts, f"{NOTHING};"])
    ranks = np.array([sorted_.index(text) for text in texts], np.int64)
    return [(sorted_, np.where(empty, sorted_.index(f"{NOTHING};"), ranks[number])), *columns[1:]]


def _runs(parts: Sequence[str]) -> list[list[str]]:
    """Parts that stand side by side and follow from the same columns; a `-` where the GPU follows the CPU."""
    runs: list[list[str]] = []
    for part in parts:
        side = next((group for group in (CPU_PARTS, GPU_PARTS) if part in group), (part,))
        if runs and runs[-1][0] in CPU_PARTS and side is not CPU_PARTS and part != "interval":
            runs.append([BETWEEN])
        if runs and runs[-1][0] in side:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _column(frames: Sequence[Sequence[str]], number: NDArray[np.int64], shape: Shape) -> LinesColumn:
    """Frames of each number as texts, the same text once, sorted; each frame ends in a `;`."""
    joined = [
        "".join(f"{clean_frame(frame)};" for frame in (reversed(each) if shape.inverted else each)) for each in frames
    ]
    texts = sorted(set(joined))
    ranks = {text: rank for rank, text in enumerate(texts)}
    return texts, np.array([ranks[text] for text in joined], np.int64)[number]


def _added_up(columns: list[LinesColumn], counts: NDArray[np.int64]) -> tuple[list[LinesColumn], NDArray[np.int64]]:
    """The distinct lines, sorted by text, and what their counts add up to."""
    key = np.zeros(len(counts), np.int64)
    width = 1
    for texts, number in columns:
        if width * max(len(texts), 1) > _WIDEST_KEY:
            found, key = np.unique(key, return_inverse=True)
            width = len(found)
        key = key * len(texts) + number
        width *= max(len(texts), 1)
    order = np.argsort(key, kind="stable")
    firsts = np.flatnonzero(np.diff(key[order], prepend=-1))
    lines = [(texts, number[order[firsts]]) for texts, number in columns]
    added = np.add.reduceat(counts[order], firsts) if len(firsts) else counts[:0]
    # Sorted texts side by side are sorted lines, unless a text goes on where another ends and the next part begins.
    if any(_goes_on(texts) for texts, _ in lines[:-1]):
        whole = [line for first in range(0, len(added), _LINES_AT_ONCE) for line in _stacks(lines, first)]
        texts = sorted(set(whole))
        ranks = {text: rank for rank, text in enumerate(texts)}
        number = np.array([ranks[text] for text in whole], np.int64)
        sums = np.zeros((len(texts), *added.shape[1:]), np.int64)
        np.add.at(sums, number, added)
        return [(texts, np.arange(len(texts)))], sums
    return lines, added


def _goes_on(texts: list[str]) -> bool:
    return any(after.startswith(before) for before, after in pairwise(texts))


def _stacks(columns: list[LinesColumn], first: int) -> list[str]:
    some = slice(first, first + _LINES_AT_ONCE)
    return list(_joined([(texts, number[some]) for texts, number in columns]).to_pylist())


def text_of(columns: list[LinesColumn], counts: NDArray[np.int64]) -> str:
    """Whole lines, one after the other: a stack and its count, or counts."""
    if not len(counts):
        return ""
    *before, (texts, number) = columns
    if all(texts):
        stacks = [*_texts(before), *_texts([([text.removesuffix(";") for text in texts], number)])]
    else:  # lines may end in any of the columns
        stacks = [pc.utf8_rtrim(_joined(columns), ";")]
    numbers = [pa.array(column).cast(_TEXT) for column in counts.reshape(len(counts), -1).T]
    spaced = [part for number in numbers for part in (pa.scalar(" ", _TEXT), number)]
    lines = pc.binary_join_element_wise(*stacks, *spaced, pa.scalar("\n", _TEXT), pa.scalar("", _TEXT))
    # An array of texts has them one after the other, and that is all that is wanted.
    return str(lines.buffers()[2], "utf-8")


def _joined(columns: list[LinesColumn]) -> pa.Array:
    """The texts of each line, one after the other."""
    return pc.binary_join_element_wise(*_texts(columns), pa.scalar("", _TEXT))


def _texts(columns: list[LinesColumn]) -> list[pa.Array]:
    return [pa.array(texts, _TEXT).take(pa.array(number)) for texts, number in columns]


def _interval_frames(intervals: Sequence[float]) -> list[list[str]]:
    """Seconds since the first one, all of one width so that they sort."""
    since = [f"{begin - intervals[0]:.3f}" for begin in intervals]
    width = max(map(len, since), default=0)
    return [[f"{text:0>{width}} s"] for text in since]
