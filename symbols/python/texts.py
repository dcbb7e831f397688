"""Reads CPython's `str` and `bytes` objects, whose first bytes were copied from a process's memory.

PEP 393 and Include/cpython/unicodeobject.h: a string whose characters follow its head is called compact. It has 1, 2 or
4 bytes per character.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from iaprof.symbols.python.layout import Layout

_KIND, _KIND_SHIFT, _COMPACT, _ASCII = 7, 2, 1 << 5, 1 << 6  # bits of PyASCIIObject.state
_ENCODINGS = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}
_TYPE = 8  # offset of PyObject.ob_type in builds that are not free-threaded
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
_LONGEST = 1 << 62  # larger numbers are not lengths


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
    if not 0 <= length < _LONGEST:
        raise TextError(f"its length is absurd ({length})")
    count = min(length, max(len(copied) - start, 0) // size)
    return copied[start : start + count * size], count < length


def _number(copied: bytes, offset: int, form: str) -> int:
    try:
        return int(struct.unpack_from(form, copied, offset)[0])
    except struct.error:
        raise TextError("not all of its head was copied") from None
