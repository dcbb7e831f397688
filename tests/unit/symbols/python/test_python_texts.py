"""Texts of copied objects: objects of this interpreter, and bytes that are not objects."""

from __future__ import annotations

import ctypes
import struct
import sys

import pytest
from hypothesis import given, strategies

from iaprof.symbols.python.code_objects import Text, TextError, bytes_of, text_of, type_of
from iaprof.symbols.python.layout import Layout
from pythons.interpreters import files_of, started_as


@pytest.fixture(scope="module")
def layout() -> Layout:
    ((_, interpreter),) = files_of(started_as("own")).items()
    return interpreter.layout


def memory_of(value: object) -> bytes:
    return ctypes.string_at(id(value), sys.getsizeof(value))


TEXTS = ["", "a", "ascii text", "Größe", "\xff", "尺", "尺" * 300, "𐎠 and ascii", "\U0010ffff", "a" * 5000]


@pytest.mark.parametrize("value", TEXTS, ids=ascii)
def test_strings_of_every_kind(value: str, layout: Layout) -> None:
    assert text_of(memory_of(value), layout) == Text(value, False)


@pytest.mark.parametrize("value", TEXTS, ids=ascii)
def test_text_is_cut_where_it_was_not_copied(value: str, layout: Layout) -> None:
    memory = memory_of(value)
    size = {1: 1, 2: 2, 4: 4}[1 if max(value, default="") <= "\xff" else 2 if max(value) <= "\uffff" else 4]
    data = layout.string_ascii_data if value.isascii() else layout.string_other_data
    for copied in (36, data, data + 1, data + 7, data + 8 * size, data + 256):
        characters = max(min(copied - data, len(memory) - data) // size, 0)
        expected = Text(value[:characters], characters < len(value))
        assert text_of(memory[:copied], layout) == expected


def test_surrogates_are_replaced(layout: Layout) -> None:
    for value in ("/home/\udcff.py", "\ud800", "𐎠\udfff", "\ud83d\ude00 two surrogates"):
        text = text_of(memory_of(value), layout).value
        text.encode()
    assert text_of(memory_of("/home/\udcff.py"), layout) == Text("/home/\ufffd.py", False)


class Other(str):
    pass


@pytest.mark.parametrize("length", [-1, -(1 << 63), 1 << 62])
def test_absurd_lengths_are_refused(length: int, layout: Layout) -> None:
    memory = bytearray(memory_of("text"))
    struct.pack_into("<q", memory, layout.string_length, length)
    with pytest.raises(TextError, match="absurd"):
        text_of(bytes(memory), layout)
    memory = bytearray(memory_of(b"bytes"))
    struct.pack_into("<q", memory, layout.bytes_length, length)
    with pytest.raises(TextError, match="absurd"):
        bytes_of(bytes(memory), layout)


def test_a_length_beyond_the_copy_is_cut(layout: Layout) -> None:
    memory = bytearray(memory_of("text"))
    struct.pack_into("<q", memory, layout.string_length, 1 << 40)
    assert text_of(bytes(memory[: layout.string_ascii_data + 3]), layout) == Text("tex", True)


def test_objects_that_are_not_compact_strings_are_refused(layout: Layout) -> None:
    for memory in (memory_of(Other("text")), memory_of(17).ljust(64, b"\0"), memory_of([]).ljust(64, b"\0")):
        with pytest.raises(TextError, match="not a string"):
            text_of(memory, layout)
    for size in range(36):
        with pytest.raises(TextError, match="not all of its head"):
            text_of(memory_of("text")[:size], layout)


def test_the_type_of_an_object() -> None:
    assert type_of(memory_of("text")) == id(str)
    assert type_of(memory_of(b"bytes")) == id(bytes)


def test_bytes(layout: Layout) -> None:
    value = bytes(range(256)) * 20
    assert bytes_of(memory_of(value), layout) == (value, len(value))
    assert bytes_of(memory_of(value)[:1000], layout) == (value[: 1000 - layout.bytes_data], len(value))
    assert bytes_of(memory_of(b""), layout) == (b"", 0)
    with pytest.raises(TextError, match="not all of its head"):
        bytes_of(memory_of(value)[:23], layout)


@given(copied=strategies.binary(max_size=200))
def test_any_bytes_give_valid_text_or_an_error(copied: bytes, layout: Layout) -> None:
    try:
        text = text_of(copied, layout)
    except TextError:
        return
    text.value.encode()
