"""Reads what CPython's code objects have: names, which are `str` and `bytes` objects, and lines of instructions.

The first bytes of each object were copied from a process's memory. PEP 393 and Include/cpython/unicodeobject.h: a
string whose characters follow its head is called compact. It has 1, 2 or 4 bytes per character.

The location table (co_linetable) has the lines. Its format is the same in Python 3.11 to 3.15: Objects/locations.md of
3.11 and 3.12, InternalDocs/code_objects.md of later versions. Only the first byte of an entry has its highest bit set,
so all entries can be read at once as columns.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from iaprof.symbols.python.layout import Layout

_KIND, _KIND_SHIFT, _COMPACT, _ASCII = 7, 2, 1 << 5, 1 << 6  # bits of PyASCIIObject.state
_ENCODINGS = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}
_TYPE = 8  # offset of PyObject.ob_type in builds that are not free-threaded
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
_LONGEST_TEXT = 1 << 62  # larger numbers are not lengths

NO_LINE = 0
"""The line of an instruction that has none, or that the table does not cover."""
BEFORE_THE_FIRST = -2
"""In 3.11 and 3.12: the instruction offset of a frame whose function has not begun; it is at its first line."""

_STARTS = 0x80
_LEAST_ONE_LINE, _NO_COLUMNS, _LONG, _NO_LOCATION = 10, 13, 14, 15  # codes of entries
_UNIT = 2  # bytes of an instruction without its arguments and caches
_MORE, _BITS = 0x40, 6  # in each byte of a number: the flag that another byte follows, and the number of value bits
_LONGEST_NUMBER = 6  # bytes: a line has 32 bits
_LARGEST_LINE = (1 << 31) - 1


class TextError(ValueError):
    """The bytes are not an object of that type; the text says why."""


class Text(NamedTuple):
    """The content of a `str` object."""

    value: str  # valid Unicode: surrogates, as in file names that are not UTF-8, are replaced by U+FFFD
    is_cut: bool  # whether more characters follow, which were not copied


def with_ellipsis(text: Text) -> str:
    """Returns the string, with an ellipsis if it was cut."""
    return text.value + _ELLIPSIS * text.is_cut


class Content(NamedTuple):
    """The content of a `bytes` object."""

    value: bytes  # as far as it was copied
    length: int  # of the whole object


def type_of(copied: bytes) -> int:
    """Returns the address of an object's type."""
    return _number(copied, _TYPE, "<Q")


def text_of(copied: bytes, layout: Layout) -> Text:
    """Reads a `str` object.

    Args:
        copied: the object's first bytes.
        layout: of its interpreter.

    Raises:
        TextError: it is not a compact string, or its head was not copied.
    """
    length = _number(copied, layout.string_length, "<q")
    state = _number(copied, layout.string_state, "<I")
    size, is_ascii = state >> _KIND_SHIFT & _KIND, bool(state & _ASCII)
    if size not in _ENCODINGS or not state & _COMPACT or (is_ascii and size != 1):
        raise TextError("it is not a string whose characters lie behind its head")
    data = layout.string_ascii_data if is_ascii else layout.string_other_data
    content, is_cut = _content(copied, data, length, size)
    return Text(content.decode("ascii" if is_ascii else _ENCODINGS[size], "replace"), is_cut)


def bytes_of(copied: bytes, layout: Layout) -> Content:
    """Reads a `bytes` object; arguments and errors as for `text_of`."""
    length = _number(copied, layout.bytes_length, "<q")
    return Content(_content(copied, layout.bytes_data, length, 1)[0], length)


def _content(copied: bytes, start: int, length: int, size: int) -> tuple[bytes, bool]:
    """Returns the copied items of an object's data, and whether more items were not copied.

    Args:
        copied: the object's first bytes.
        start: offset of the data.
        length: the number of items.
        size: of an item, in bytes.
    """
    if not 0 <= length < _LONGEST_TEXT:
        raise TextError(f"its length is absurd ({length})")
    count = min(length, max(len(copied) - start, 0) // size)
    return copied[start : start + count * size], count < length


def _number(copied: bytes, offset: int, form: str) -> int:
    try:
        return int(struct.unpack_from(form, copied, offset)[0])
    except struct.error:
        raise TextError("not all of its head was copied") from None


def lines_of(table: bytes, first_line: int, offsets: ArrayLike) -> NDArray[np.int64]:
    """Returns the lines of instructions.

    A table that was cut or is damaged covers the instructions before the cut or the damage.

    Args:
        table: the content of co_linetable.
        first_line: co_firstlineno.
        offsets: of the instructions, in bytes from the first one: int64[n], in any order.

    Returns:
        int64[n], NO_LINE for instructions without a line.
    """
    positions = np.asarray(offsets, np.int64)
    ends, entry_lines = _entries(np.frombuffer(table, np.uint8), first_line)
    entry = np.searchsorted(ends, positions, side="right")
    known = (positions >= 0) & (entry < len(ends))
    lines = np.full(len(positions), NO_LINE, np.int64)
    lines[known] = entry_lines[entry[known]]
    if 0 < first_line <= _LARGEST_LINE:
        lines[positions == BEFORE_THE_FIRST] = first_line
    return lines


def _entries(table: NDArray[np.uint8], first_line: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the entries up to the first damaged one: the offsets after their instructions, and their lines."""
    starts = np.flatnonzero(table & _STARTS)
    if not len(starts) or starts[0]:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    heads = table[starts].astype(np.int64)
    codes, ends = heads >> 3 & 15, np.cumsum(((heads & 7) + 1) * _UNIT)
    deltas, readable = _deltas(table, starts, codes)
    damaged = np.flatnonzero(~readable)
    count = int(damaged[0]) if len(damaged) else len(starts)
    lines = first_line + np.cumsum(deltas[:count])
    lines[(codes[:count] == _NO_LOCATION) | (lines <= 0) | (lines > _LARGEST_LINE)] = NO_LINE
    return ends[:count], lines


def _deltas(
    table: NDArray[np.uint8], starts: NDArray[np.int64], codes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns by how much each entry's line exceeds that of the entry before, and whether this number is readable."""
    deltas = np.where((codes >= _LEAST_ONE_LINE) & (codes < _NO_COLUMNS), codes - _LEAST_ONE_LINE, 0)
    with_number = np.flatnonzero((codes == _NO_COLUMNS) | (codes == _LONG))
    limits = np.append(starts[1:], len(table))[with_number]
    at, values = starts[with_number] + 1, np.zeros(len(with_number), np.int64)
    goes_on = np.ones(len(with_number), np.bool_)
    for position in range(_LONGEST_NUMBER):
        inside = goes_on & (at + position < limits)
        content = table[np.where(inside, at + position, 0)]
        values |= np.where(inside, content & _MORE - 1, 0).astype(np.int64) << _BITS * position
        goes_on &= ~inside | (content & _MORE > 0)
    deltas[with_number] = np.where(values & 1, -(values >> 1), values >> 1)
    readable = np.ones(len(starts), np.bool_)
    readable[with_number] = ~goes_on
    return deltas, readable
