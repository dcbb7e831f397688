"""Folded stacks (stackcollapse): `frame;frame;...;frame COUNT`, a line per distinct stack, sorted.

From the root: process name and pid, user frames, kernel frames `_[k]`, a `-`, then the GPU's components: source file
and functions `_[G]`, mnemonic, reason and offset `_[g]`. StackOptions can select and order the components.

A line is composed of a few texts that many lines share. They are sorted, numbered and joined as columns: no Python runs
per line.

Of two captures, a line is `frame;frame;...;frame BEFORE AFTER`, as flamegraph.pl reads it (and difffolded.pl writes
it): it uses the second count for a frame's width and the difference for its colour, red for increases, blue for
decreases. Stacks with a second count of 0 have no width and must be left out: flamegraph.pl identifies frames by name,
depth and end, so that a frame without width replaces its neighbour. A single line `[gone]` has their sum; exchange the
captures to see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.distinct import numbered, order_by
from iaprof.formats.export import Export
from iaprof.formats.profile import Profile, StackOptions
from iaprof.formats.stacks.frame_lists import FrameLists, cpu_columns, is_separator, stack_columns
from iaprof.formats.stacks.frames import CPU_GPU_SEPARATOR, UNKNOWN_FRAME, clean_frame
from iaprof.formats.writers.writer import Writer

_LINES_AT_ONCE = 1 << 12  # their text, some 2 MB, fits into the CPU's caches
_TEXT = pa.large_string()
_WIDEST_KEY = 1 << 62
_MOST_JOINED, _MOST_JOINED_BYTES = 1 << 14, 4 << 20  # texts that two columns make together
LinesColumn = tuple[list[str], NDArray[np.int64]]
"""Texts, and the index of each line's text."""

DIFFERENCE_COMPONENTS = ("process", "cpu", "file", "function", "instruction", "reason")
"""The default components: process ids and offsets differ between builds and runs."""
_GONE = "[gone]"


class Folded(Writer):
    """The format of flamegraph.pl, speedscope and many others."""

    def write(self, export: Export, options: StackOptions, out: IO[str]) -> None:
        """Writes every stack with its count, sorted by text; stacks below the limit are added up in a last line."""
        if options.cpu_samples:
            write_cpu_lines(export, options, out)
        else:
            write_lines(export.profile, options, out)


def write_lines(profile: Profile, options: StackOptions, out: IO[str]) -> None:
    """Writes every stack with its count, sorted by text; stacks below the limit are added up in a last line."""
    _write(*folded_lines(profile, options), options, out)


def write_cpu_lines(export: Export, options: StackOptions, out: IO[str]) -> None:
    """Writes the stacks of CPU samples in the same way."""
    assert export.cpu is not None
    lists, number = cpu_columns(export.cpu, options)
    _write(*_added_up(_never_empty([_column(lists, number, options)]), export.cpu.count), options, out)


def _write(columns: list[LinesColumn], counts: NDArray[np.int64], options: StackOptions, out: IO[str]) -> None:
    total = int(counts.sum())
    kept = np.flatnonzero(counts * 100.0 >= options.percent_limit * total)
    small = total - int(counts[kept].sum())
    _write_lines(columns, counts, kept, out)
    if small:
        out.write(f"[below {options.percent_limit:g} %] {small}\n")


def folded_lines(
    profile: Profile, options: StackOptions, by_interval: bool = False
) -> tuple[list[LinesColumn], NDArray[np.int64]]:
    """The components of each line, from the root, in the order of the lines' texts; and each line's count.

    Counts are int64[lines], or, by interval, int64[lines, intervals].
    """
    row, reason, counts = profile.entries()
    if by_interval:
        counts = counts[:, np.newaxis] * (profile.interval[row, np.newaxis] == np.arange(len(profile.intervals)))
    columns = [
        ([f"{CPU_GPU_SEPARATOR};"], number) if is_separator(lists) else _column(lists, number, options)
        for lists, number in stack_columns(profile, options, row, reason)
    ]
    return _added_up(_never_empty(columns[::-1] if options.inverted else columns), counts)


def _never_empty(columns: list[LinesColumn]) -> list[LinesColumn]:
    """The columns, with a placeholder frame for lines that would be empty."""
    empty = np.logical_and.reduce([np.array([not text for text in texts], bool)[number] for texts, number in columns])
    if not empty.any():
        return columns
    texts, number = columns[0]
    sorted_ = sorted([*texts, f"{UNKNOWN_FRAME};"])
    ranks = np.array([sorted_.index(text) for text in texts], np.int64)
    return [(sorted_, np.where(empty, sorted_.index(f"{UNKNOWN_FRAME};"), ranks[number])), *columns[1:]]


def _column(lists: FrameLists, number: NDArray[np.int64], options: StackOptions) -> LinesColumn:
    """Frames as distinct, sorted texts, and the index of each row's text; each frame ends with `;`."""
    cleaned = cache(lambda text: f"{clean_frame(text)};")
    in_order = lists.reversed() if options.inverted else lists
    joined = in_order.joined(lambda frame: cleaned(frame.folded or frame.text))
    texts = sorted(set(joined))
    ranks = {text: rank for rank, text in enumerate(texts)}
    return texts, np.array([ranks[text] for text in joined], np.int64)[number]


def _added_up(columns: list[LinesColumn], counts: NDArray[np.int64]) -> tuple[list[LinesColumn], NDArray[np.int64]]:
    """The distinct lines, sorted by text, and the sums of their counts."""
    key = np.zeros(len(counts), np.int64)
    width = 1
    for texts, number in columns:
        if width * max(len(texts), 1) > _WIDEST_KEY:
            found, key = numbered(key)
            width = len(found)
        key = key * len(texts) + number
        width *= max(len(texts), 1)
    order = order_by(key)
    firsts = np.flatnonzero(np.diff(key[order], prepend=-1))
    lines = [(texts, number[order[firsts]]) for texts, number in columns]
    added = np.add.reduceat(counts[order], firsts) if len(firsts) else counts[:0]
    # Sorting by columns sorts the lines, unless a text is a prefix of another, so that the next component would decide.
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


def _write_lines(columns: list[LinesColumn], counts: NDArray[np.int64], rows: NDArray[np.int64], out: IO[str]) -> None:
    """Writes lines with a stack and its counts, each ended by a newline.

    Args:
        columns: the components of all lines.
        counts: int64[lines], or int64[lines, n].
        rows: int64[m], the lines to write.
        out: receives the text.
    """
    if not len(rows):
        return
    *before, (texts, number) = columns
    ends_here = all(texts)  # otherwise lines may end in any of the columns
    if ends_here:
        columns = [*before, ([text.removesuffix(";") for text in texts], number)]
    parts = _fewer([([text.encode() for text in texts], number) for texts, number in columns])
    numbers = []
    each_count = counts.reshape(len(counts), -1).T
    for place, column in enumerate(each_count, 1):
        distinct, number = numbered(column)
        end = b"\n" if place == len(each_count) else b""
        numbers.append(([b" %d%b" % (count, end) for count in distinct.tolist()], number))
    binary = getattr(out, "buffer", None)
    for first in range(0, len(rows), _LINES_AT_ONCE):
        some = rows[first : first + _LINES_AT_ONCE]
        if ends_here:
            found = _interleaved(parts + numbers, some)
        else:
            stacks = [pieces.rstrip(b";") for pieces in map(b"".join, zip(*_of_lines(parts, some), strict=True))]
            found = [part for line in zip(stacks, *_of_lines(numbers, some), strict=True) for part in line]
        if binary is None:
            out.write(b"".join(found).decode())
        else:  # it is UTF-8 already
            out.flush()
            binary.write(b"".join(found))


def _fewer(columns: list[tuple[list[bytes], NDArray[np.int64]]]) -> list[tuple[list[bytes], NDArray[np.int64]]]:
    """Joins columns that follow one another and have few texts: a line then has fewer parts."""
    found = columns[:1]
    for texts, number in columns[1:]:
        before, number_before = found[-1]
        size = sum(map(len, before)) * len(texts) + sum(map(len, texts)) * len(before)
        if len(before) * len(texts) <= _MOST_JOINED and size <= _MOST_JOINED_BYTES:
            joined = [first + text for first in before for text in texts]
            found[-1] = joined, number_before * len(texts) + number
        else:
            found.append((texts, number))
    return found


def _of_lines(columns: list[tuple[list[bytes], NDArray[np.int64]]], rows: NDArray[np.int64]) -> list[Iterator[bytes]]:
    """The texts of each column in these lines."""
    return [map(texts.__getitem__, number[rows].tolist()) for texts, number in columns]


def _interleaved(columns: list[tuple[list[bytes], NDArray[np.int64]]], rows: NDArray[np.int64]) -> list[bytes]:
    """The texts of these lines, one line after the other."""
    found = [b""] * (len(rows) * len(columns))
    for place, texts in enumerate(_of_lines(columns, rows)):
        found[place :: len(columns)] = texts
    return found


def _joined(columns: list[LinesColumn]) -> pa.Array:
    """The texts of each line, joined."""
    return pc.binary_join_element_wise(*_texts(columns), pa.scalar("", _TEXT))


def _texts(columns: list[LinesColumn]) -> list[pa.Array]:
    return [pa.array(texts, _TEXT).take(pa.array(number)) for texts, number in columns]


def write_difference(both: Profile, options: StackOptions, relative: bool, out: IO[str]) -> None:
    """Writes every stack with both counts, sorted by text, and a line `[gone]` for stacks without samples after.

    Args:
        both: interval 0 is before, interval 1 is after.
        options: the stack options.
        relative: scale the counts after, so that both sums are equal.
        out: receives the text.
    """
    columns, counts = folded_lines(both, options, by_interval=True)
    if relative:
        counts[:, 1] = _scaled(counts[:, 1], int(counts[:, 0].sum()))
    there = counts[:, 1] > 0
    _write_lines(columns, counts, np.flatnonzero(there), out)
    if gone := int(counts[~there, 0].sum()):
        out.write(f"{_GONE} {gone} 0\n")


def _scaled(counts: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Scales counts so that they add up to `total`, each off by less than 1: int64[n]."""
    sums = np.cumsum(counts)
    if not total or not len(sums) or not sums[-1]:
        return counts  # nothing to compare with
    scaled: NDArray[np.int64] = np.rint(sums * (total / int(sums[-1]))).astype(np.int64)
    scaled[1:] -= scaled[:-1].copy()
    return scaled
