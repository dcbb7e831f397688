"""Reads numbers and texts that stand at known places in a block of JSON: whole columns."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.timelines.reading import numbers
from iaprof.timelines.reading.blocks import Block, NotPlain, Places

_ZEROS, _LOW, _HIGH = np.uint64(0x3030303030303030), np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x8080808080808080)
_ABOVE_9 = np.uint64(0x4646464646464646)  # added to a digit, it leaves the upper bit clear
_KEPT = np.array([0, *(((1 << 64) - 1) ^ ((1 << 8 * (8 - count)) - 1) for count in range(1, 9))], np.uint64)
_PAIRS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
_SCALES = np.uint64(10), np.uint64(100), np.uint64(10000)
_MOST_DIGITS, _MOST_WHOLE = 16, 15
_LOWER = np.uint64(0x2020202020202020)
# Added to a byte below 128, these set its upper bit if it is not below the character.
_FROM_0, _FROM_COLON, _FROM_A, _FROM_G = (np.uint64((0x80 - ord(each)) * 0x0101010101010101) for each in "0:ag")
_MINUS, _DOT = b"-."
_MOST_TEXT = 1 << 14


def integers(block: Block, starts: Places, ends: Places) -> NDArray[np.int64]:
    """Reads integers, decimal or with 0x, as numbers.integers does.

    Raises:
        NotPlain: one is none.
    """
    values, known = decimal_numbers(block, starts, ends)
    if not known.all():
        rows = np.flatnonzero(~known)
        hexadecimal, found = _hexadecimals(block, starts[rows], ends[rows])
        values[rows], known[rows] = hexadecimal, found
    return _with_odd(block, starts, ends, values, known, hexadecimal=True)


def whole_numbers(block: Block, starts: Places, ends: Places) -> NDArray[np.int64]:
    """Reads JSON integers of up to 16 digits.

    Raises:
        NotPlain: one is another value.
    """
    values, known = decimal_numbers(block, starts, ends)
    if not known.all():
        raise NotPlain
    return values


def canonical(block: Block, starts: Places, ends: Places) -> None:
    """Checks that JSON integers have up to 16 digits, and are not -0.

    Raises:
        NotPlain: one is so, or another value.
    """
    if ((whole_numbers(block, starts, ends) == 0) & (ends - starts > 1)).any():
        raise NotPlain


def nanoseconds(block: Block, starts: Places, ends: Places) -> NDArray[np.int64]:
    """Reads times in us, as numbers.nanoseconds does, in ns.

    Raises:
        NotPlain: one is none.
    """
    decimals = np.zeros(len(starts), np.int64)
    for count in (1, 2, 3):
        is_dot = block.bytes.take(ends - count - 1) == _DOT
        decimals[is_dot & (ends - count - 1 > starts)] = count
    has_dot = decimals > 0
    whole_ends = ends - decimals - has_dot
    values, known = decimal_numbers(block, starts, whole_ends)
    known &= whole_ends - starts <= _MOST_WHOLE
    values *= 1000
    if has_dot.any():
        fraction, good = decimal_numbers(block, np.where(has_dot, ends - decimals, starts), ends)
        good &= block.bytes.take(ends - decimals) != _MINUS
        fraction *= np.array([0, 100, 10, 1]).take(decimals)
        negative = block.bytes.take(starts) == _MINUS
        values += np.where(has_dot, np.where(negative, -fraction, fraction), 0)
        known &= good | ~has_dot
    return _with_odd(block, starts, ends, values, known, hexadecimal=False)


def _with_odd(
    block: Block,
    starts: Places,
    ends: Places,
    values: NDArray[np.int64],
    known: NDArray[np.bool_],
    *,
    hexadecimal: bool,
) -> NDArray[np.int64]:
    """Reads the rest one by one."""
    if known.all():
        return values
    rows = np.flatnonzero(~known)
    places = zip(starts[rows].tolist(), ends[rows].tolist(), strict=True)
    texts = [block.text[start:end] for start, end in places]
    found, good = numbers.integers(texts) if hexadecimal else numbers.nanoseconds(texts)
    if not good.all():
        raise NotPlain
    values[rows] = found
    return values


def decimal_numbers(block: Block, starts: Places, ends: Places) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Reads up to 16 decimal digits, perhaps with a minus. Returns int64[n], and which are so."""
    negative = block.bytes.take(starts) == _MINUS
    lengths = ends - starts - negative
    known = (lengths > 0) & (lengths <= _MOST_DIGITS)
    low, good = _eight(block, ends, np.clip(lengths, 0, 8))
    known &= good
    values = low
    if lengths.max(initial=0) > 8:
        high, good = _eight(block, np.maximum(ends - 8, 8), np.clip(lengths - 8, 0, 8))
        known &= good
        values = high * 100_000_000 + low
    return np.where(negative, -values, values), known


def _eight(block: Block, ends: Places, lengths: Places) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Reads the last 0 to 8 digits before `ends`: all eight bytes of a word at once."""
    kept = _KEPT.take(lengths)
    digits = (block.words.take(ends - 8) & kept) | (_ZEROS & ~kept)
    good = ((digits + _ABOVE_9) | (digits - _ZEROS)) & _HIGH == 0
    digits &= _LOW
    # The first digit is in the lowest byte: neighbours are joined to numbers of two, four and eight digits.
    digits = (digits * _SCALES[0] + (digits >> np.uint64(8))) & _PAIRS[0]
    digits = (digits * _SCALES[1] + (digits >> np.uint64(16))) & _PAIRS[1]
    digits = (digits * _SCALES[2] + (digits >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return digits.view(np.int64), good


def _hexadecimals(block: Block, starts: Places, ends: Places) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Reads up to 15 hexadecimal digits behind 0x. Returns int64[n], and which are so."""
    lengths = ends - starts - 2
    marked = (block.bytes.take(starts) == ord("0")) & (block.bytes.take(starts + 1) | 32 == ord("x"))
    known = marked & (lengths > 0) & (lengths < 16)
    low, good = _eight_hexadecimals(block, ends, np.clip(lengths, 0, 8))
    known &= good
    high, good = _eight_hexadecimals(block, np.maximum(ends - 8, 8), np.clip(lengths - 8, 0, 8))
    return ((high << np.uint64(32)) | low).view(np.int64), known & good


def _eight_hexadecimals(block: Block, ends: Places, lengths: Places) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    kept = _KEPT.take(lengths)
    digits = (block.words.take(ends - 8) & kept) | (_ZEROS & ~kept)
    lower = digits | _LOWER
    is_digit = (digits + _FROM_0) & ~(digits + _FROM_COLON)
    is_letter = (lower + _FROM_A) & ~(lower + _FROM_G) & _HIGH
    good = ((is_digit | is_letter) & ~digits & _HIGH) == _HIGH
    values = (digits & _LOW) + (is_letter >> np.uint64(7)) * np.uint64(9)
    values = ((values << np.uint64(4)) | (values >> np.uint64(8))) & _PAIRS[0]
    values = ((values << np.uint64(8)) | (values >> np.uint64(16))) & _PAIRS[1]
    return ((values << np.uint64(16)) | (values >> np.uint64(32))) & np.uint64(0xFFFFFFFF), good


def strings(block: Block, starts: Places, ends: Places) -> pa.StringArray:
    """Returns what stands at places."""
    offsets = np.full(2 * len(starts) + 1, len(block.text), np.int32)
    offsets[:-1:2], offsets[1::2] = starts, ends
    # Every second element is what lies between two of them.
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(block.text)]
    every = pa.Array.from_buffers(pa.string(), 2 * len(starts), buffers)
    return every.take(pa.array(np.arange(0, 2 * len(starts), 2)))


def content(block: Block, starts: Places, ends: Places) -> NDArray[np.uint8]:
    """Returns the bytes at places, one after the other."""
    _, offsets, data = strings(block, starts, ends).buffers()
    return np.frombuffer(data, np.uint8)[: np.frombuffer(offsets, np.int32)[len(starts)]].copy()


def encoded(block: Block, starts: Places, ends: Places) -> tuple[NDArray[np.int32], list[str]]:
    """Reads texts, without their quotes. Returns their codes, and the text of each code.

    Raises:
        NotPlain: one is too long, or has escapes that are not characters.
    """
    if (ends - starts).max(initial=0) > _MOST_TEXT:
        raise NotPlain
    found = strings(block, starts, ends).dictionary_encode()
    distinct = found.dictionary.to_pylist()
    if block.has_escapes:
        for row in np.flatnonzero(pc.match_substring(found.dictionary, "\\")).tolist():
            try:
                distinct[row] = msgspec.json.decode(f'"{distinct[row]}"'.encode(), type=str)
                distinct[row].encode()
            except (msgspec.MsgspecError, ValueError):
                raise NotPlain from None
    return found.indices.to_numpy(), distinct


def doubles(block: Block, starts: Places, ends: Places) -> NDArray[np.float64]:
    """Reads JSON numbers.

    Raises:
        NotPlain: one is another value, or as good as infinite.
    """
    try:
        values = strings(block, starts, ends).cast(pa.float64()).to_numpy()
    except pa.ArrowInvalid:
        raise NotPlain from None
    if not (np.abs(values) < 1e300).all():
        raise NotPlain
    return np.asarray(values)
