"""The lines of a code object's instructions, from its location table (co_linetable).

The format is the same in Python 3.11 to 3.15: Objects/locations.md of 3.11 and 3.12, InternalDocs/code_objects.md of
later versions. An entry begins with a byte whose highest bit is set and that bit is set in no other byte, so all
entries are read at once as columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

NO_LINE = 0
"""What an instruction has that belongs to no line, or that the table does not tell of."""
BEFORE_THE_FIRST = -2
"""The offset of a function that has not begun, in 3.11 and 3.12; it is at its first line."""

_STARTS = 0x80
_LEAST_ONE_LINE, _NO_COLUMNS, _LONG, _NO_LOCATION = 10, 13, 14, 15  # codes of entries
_UNIT = 2  # bytes of an instruction without its arguments and caches
_MORE, _BITS = 0x40, 6  # of a byte of a number
_LONGEST_NUMBER = 6  # bytes: a line has 32 bits
_LARGEST_LINE = (1 << 31) - 1


def lines_of(table: bytes, first_line: int, offsets: ArrayLike) -> NDArray[np.int64]:
    """The lines of instructions.

    A table that was cut tells of the instructions in front of the cut, one that is damaged of those in front of the
    damage.

    Args:
        table: the content of co_linetable.
        first_line: co_firstlineno.
        offsets: of the instructions, in bytes from the first: int64[n], in any order.

    Returns:
        int64[n], NO_LINE where there is none.
    """
    wanted = np.asarray(offsets, np.int64)
    ends, lines = _entries(np.frombuffer(table, np.uint8), first_line)
    entry = np.searchsorted(ends, wanted, side="right")
    known = (wanted >= 0) & (entry < len(ends))
    found = np.full(len(wanted), NO_LINE, np.int64)
    found[known] = lines[entry[known]]
    if 0 < first_line <= _LARGEST_LINE:
        found[wanted == BEFORE_THE_FIRST] = first_line
    return found


def _entries(table: NDArray[np.uint8], first_line: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each entry up to the first that is damaged, the offset behind its instructions, and their line."""
    starts = np.flatnonzero(table & _STARTS)
    if not len(starts) or starts[0]:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    heads = table[starts].astype(np.int64)
    codes, ends = heads >> 3 & 15, np.cumsum(((heads & 7) + 1) * _UNIT)
    deltas, whole = _deltas(table, starts, codes)
    damaged = np.flatnonzero(~whole)
    count = int(damaged[0]) if len(damaged) else len(starts)
    lines = first_line + np.cumsum(deltas[:count])
    lines[(codes[:count] == _NO_LOCATION) | (lines <= 0) | (lines > _LARGEST_LINE)] = NO_LINE
    return ends[:count], lines


def _deltas(
    table: NDArray[np.uint8], starts: NDArray[np.int64], codes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """By how much each entry's line is larger than that before, and whether that could be read."""
    deltas = np.where((codes >= _LEAST_ONE_LINE) & (codes < _NO_COLUMNS), codes - _LEAST_ONE_LINE, 0)
    with_number = np.flatnonzero((codes == _NO_COLUMNS) | (codes == _LONG))
    limits = np.append(starts[1:], len(table))[with_number]
    at, values = starts[with_number] + 1, np.zeros(len(with_number), np.int64)
    goes_on = np.ones(len(with_number), np.bool_)
    for position in range(_LONGEST_NUMBER):
        there = goes_on & (at + position < limits)
        content = table[np.where(there, at + position, 0)]
        values |= np.where(there, content & _MORE - 1, 0).astype(np.int64) << _BITS * position
        goes_on &= ~there | (content & _MORE > 0)
    deltas[with_number] = np.where(values & 1, -(values >> 1), values >> 1)
    whole = np.ones(len(starts), np.bool_)
    whole[with_number] = ~goes_on
    return deltas, whole
