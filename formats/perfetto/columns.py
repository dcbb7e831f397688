"""Perfetto's packets, of whole columns: each function makes a field of n messages, as an Arrow array of their bytes.

A null is a message that does not have the field. The wire format is https://protobuf.dev/programming-guides/encoding/.
Callers pass at most MOST_ROWS or so, so that the bytes of a column stay below 2 GiB.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Bytes: TypeAlias = pa.BinaryArray

VARINT, FIXED64, BYTES = 0, 1, 2
MOST_ROWS = 1 << 16
"""How many rows a caller should pass at once."""


_SHORT_VALUES = 1 << 14  # those of two bytes
_SHORT = [bytes([value]) for value in range(1 << 7)]


def varint(value: int) -> bytes:
    """Returns one number as a varint; a negative one as int64 has it."""
    if 0 <= value < 1 << 7:
        return _SHORT[value]
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def tag(number: int, kind: int) -> bytes:
    """Returns what begins a field."""
    return varint(number << 3 | kind)


def one(number: int, value: int | float | bytes) -> bytes:
    """Returns a field of one message: an int is a varint, a float a double."""
    if isinstance(value, bytes):
        return tag(number, BYTES) + varint(len(value)) + value
    if isinstance(value, float):
        return tag(number, FIXED64) + np.float64(value).tobytes()
    return tag(number, VARINT) + varint(value)


def varints(values: NDArray[Any], absent: NDArray[np.bool_] | None = None) -> Bytes:
    """Returns integers, int64 or uint64, as varints; null where they are absent."""
    if absent is not None:
        values = np.where(absent, values.dtype.type(0), values)  # absent ones are often long
    left = values.astype(np.int64, copy=False).view(np.uint64) if values.dtype != np.uint64 else values
    count = len(left)
    width = max(1, -(-int(left.max(initial=0)).bit_length() // 7))
    if width == 1:
        return _array(left.astype(np.uint8), np.arange(count + 1), absent)
    digits = np.empty((count, width), np.uint8)
    lengths = np.ones(count, np.int64)
    for place in range(width):
        digits[:, place] = left & np.uint64(0x7F)
        left = left >> np.uint64(7)
        more = left > 0
        digits[:, place] |= more.astype(np.uint8) << np.uint8(7)
        lengths += more
    data = digits.reshape(-1)
    if int(lengths.min()) < width:
        data = data[(np.arange(width) < lengths[:, None]).reshape(-1)]
    return _array(data, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), absent)


def _array(data: NDArray[np.uint8], offsets: NDArray[np.int64], absent: NDArray[np.bool_] | None = None) -> Bytes:
    valid = None if absent is None or not absent.any() else pa.py_buffer(np.packbits(~absent, bitorder="little"))
    buffers = [valid, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def numbers(number: int, values: NDArray[Any], absent: NDArray[np.bool_] | None = None) -> Bytes:
    """Returns a field of integers; null where they are absent."""
    short = np.where(absent, 0, values) if absent is not None else values
    if len(values) and short.min() >= 0 and short.max() < _SHORT_VALUES:
        return _short_fields(number, VARINT).take(pa.array(short, mask=absent))
    return pc.binary_join_element_wise(_scalar(tag(number, VARINT)), varints(values, absent), _scalar(b""))


def doubles(number: int, values: NDArray[np.float64], absent: NDArray[np.bool_] | None = None) -> Bytes:
    """Returns a field of doubles; null where they are absent."""
    return _fixed(number, values.astype("<f8"), absent)


def fixed(number: int, values: NDArray[np.uint64]) -> Bytes:
    """Returns a field of numbers of type fixed64."""
    return _fixed(number, values.astype("<u8"), None)


def _fixed(number: int, values: NDArray[Any], absent: NDArray[np.bool_] | None) -> Bytes:
    start = np.frombuffer(tag(number, FIXED64), np.uint8)
    size = len(start) + 8
    data = np.empty((len(values), size), np.uint8)
    data[:, : len(start)] = start
    data[:, len(start) :] = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), 8)
    return _array(data.reshape(-1), np.arange(len(values) + 1) * size, absent)


def contents(number: int, *parts: bytes | Bytes) -> Bytes:
    """Returns a field of texts, or of messages, which are parts one after the other; null where one of these is."""
    lengths = sum(len(each) if isinstance(each, bytes) else lengths_of(each) for each in parts)
    assert isinstance(lengths, np.ndarray)
    if lengths.max(initial=0) < _SHORT_VALUES:
        starts = [_short_fields(number, BYTES).take(pa.array(lengths))]
    else:
        starts = [_scalar(tag(number, BYTES)), varints(lengths)]
    return pc.binary_join_element_wise(*starts, *map(_piece, parts), _scalar(b""))


def field(number: int, value: Any) -> Any:
    """Returns a field of one message for an integer or a text, as bytes; else a column, of an array of these."""
    if isinstance(value, np.ndarray):
        return numbers(number, value)
    if isinstance(value, pa.Array):
        return contents(number, value.cast(pa.binary()))
    return one(number, value.encode() if isinstance(value, str) else value)


def nested(number: int, *fields: Any) -> Any:
    """Returns a field that is a message of fields: bytes if all of these are of one message."""
    if all(isinstance(each, bytes) for each in fields):
        return one(number, b"".join(fields))
    return contents(number, message(fields, next(len(each) for each in fields if not isinstance(each, bytes))))


def lengths_of(values: Bytes) -> NDArray[np.int64]:
    """Returns the lengths of texts or messages; any number where they are null."""
    _, offsets, _ = values.buffers()
    return np.diff(np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]).astype(np.int64)


def message(fields: Sequence[bytes | Bytes], count: int) -> Bytes:
    """Returns messages of fields. Fields of one message, as bytes, are in all of them."""
    used = [_piece(each) for each in fields]
    used = [each for each in used if isinstance(each, pa.Scalar) or each.null_count < count]
    if not any(isinstance(each, pa.Array) for each in used):
        return pa.repeat(_scalar(b"".join(each.as_py() for each in used)), count)
    if len(used) == 1 and not used[0].null_count:
        return used[0]
    return pc.binary_join_element_wise(*used, _scalar(b""), null_handling="replace", null_replacement=b"")


def joined(values: Bytes) -> bytes:
    """Returns all of them, one after the other."""
    if not len(values):
        return b""
    offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
    data = values.buffers()[2]
    return bytes(memoryview(data)[int(offsets[0]) : int(offsets[-1])]) if data is not None else b""


def _piece(part: bytes | Bytes) -> pa.Scalar | Bytes:
    return _scalar(part) if isinstance(part, bytes) else part


@functools.cache
def _short_fields(number: int, kind: int) -> Bytes:
    """Returns the tag of a field with each of the short varints, which most numbers and lengths are."""
    return pc.binary_join_element_wise(_scalar(tag(number, kind)), varints(np.arange(_SHORT_VALUES)), _scalar(b""))


@functools.cache
def _scalar(value: bytes) -> pa.Scalar:
    return pa.scalar(value, pa.binary())
