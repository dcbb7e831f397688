"""Differential folded stacks, `frame;frame;...;frame BEFORE AFTER`, as flamegraph.pl reads them.

flamegraph.pl (and difffolded.pl, which makes such lines from two folded files) takes widths from the second count and
colours of the leaves from the difference: red is more, blue is less.

A stack without samples after has no width. It must not be there at all: flamegraph.pl keeps frames by name, depth and
end, and one of no width takes the place of its neighbour. Such stacks add up in one line; they are seen when before and
after change places.
"""

from __future__ import annotations

from typing import IO

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import Profile, Shape
from iaprof.formats.writers.folded import lines_of, text_of

PARTS = ("process", "cpu", "file", "function", "instruction", "reason")
"""What a stack usually consists of: neither process ids nor offsets are the same in two builds and runs."""
_GONE = "[gone]"
_LINES_AT_ONCE = 1 << 16


def write(both: Profile, shape: Shape, relative: bool, out: IO[str]) -> None:
    """Writes every stack with its counts before and after, sorted by text; and `[gone]`, those with none after.

    Args:
        both: interval 0 is before, interval 1 after.
        shape: of the stacks.
        relative: counts after are scaled, so that they add up to those before.
        out: gets the text.
    """
    columns, counts = lines_of(both, shape, by_interval=True)
    if relative:
        counts[:, 1] = _scaled(counts[:, 1], int(counts[:, 0].sum()))
    there = counts[:, 1] > 0
    for first in range(0, len(counts), _LINES_AT_ONCE):
        some = np.flatnonzero(there[first : first + _LINES_AT_ONCE]) + first
        out.write(text_of([(texts, numbers[some]) for texts, numbers in columns], counts[some]))
    if gone := int(counts[~there, 0].sum()):
        out.write(f"{_GONE} {gone} 0\n")


def _scaled(counts: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """Whole numbers in the same proportions that add up to `total`, each less than 1 off: int64[n]."""
    sums = np.cumsum(counts)
    if not total or not len(sums) or not sums[-1]:
        return counts  # nothing to compare with
    scaled: NDArray[np.int64] = np.rint(sums * (total / int(sums[-1]))).astype(np.int64)
    scaled[1:] -= scaled[:-1].copy()
    return scaled
