"""Differential folded stacks, `frame;frame;...;frame BEFORE AFTER`, as flamegraph.pl reads them.

flamegraph.pl (like difffolded.pl, which writes such lines) uses the second count for a frame's width and the difference
for its colour: red for increases, blue for decreases.

Stacks with a second count of 0 have no width and must be left out: flamegraph.pl identifies frames by name, depth and
end, so that a frame without width replaces its neighbour. A single line `[gone]` has their sum; exchange the captures
to see them.
"""

from __future__ import annotations

from typing import IO

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.profile import Profile, StackOptions
from iaprof.formats.writers.folded import folded_lines, lines_as_text

COMPONENTS = ("process", "cpu", "file", "function", "instruction", "reason")
"""The default components: process ids and offsets differ between builds and runs."""
_GONE = "[gone]"
_LINES_AT_ONCE = 1 << 16


def write(both: Profile, options: StackOptions, relative: bool, out: IO[str]) -> None:
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
    for first in range(0, len(counts), _LINES_AT_ONCE):
        some = np.flatnonzero(there[first : first + _LINES_AT_ONCE]) + first
        out.write(lines_as_text([(texts, numbers[some]) for texts, numbers in columns], counts[some]))
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
