"""Reads JSON numbers, and texts of numbers: whole columns, exactly.

Times of traces are us with decimals, and float64 does not resolve a ns of today's time since 1970: they are read digit
by digit.
"""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NEWLINE, _DOT, _QUOTE, _MINUS, _ZERO, _X = b'\n."-0x'
_MOST_DIGITS = 18  # that always fit into int64
_NO_DIGIT = 255
_EXACT_DIGITS = 12  # of base 10 or 16, which float64 adds up exactly
_LARGEST = 1 << 62  # ns: sums of two times fit into int64
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -12, 20
_CONTEXT = decimal.Context(prec=60, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)


def _digits(base: int) -> NDArray[np.uint8]:
    table = np.full(256, _NO_DIGIT, np.uint8)
    for value, character in enumerate("0123456789abcdef"[:base]):
        table[[ord(character), ord(character.upper())]] = value
    return table


_POWERS = 10 ** np.arange(_MOST_DIGITS + 1)
_DECIMAL, _HEX = _digits(10), _digits(16)


def integers(texts: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Reads integers.

    Args:
        texts: n JSON values as they stand in the file (bytes): numbers without decimals, or texts of decimal or `0x`
            numbers.

    Returns:
        int64[n]; bool[n], which of them are integers of 64 bits.
    """
    column = _Column(texts)
    is_hex = column.starts_with_0x()
    values, known = column.read(np.where(is_hex, column.starts + 2, column.starts), is_hex)
    for row in np.flatnonzero(~known).tolist():
        number = _integer(bytes(texts[row]))
        if number is not None:
            values[row], known[row] = number, True
    return np.where(known, values, 0), known


def nanoseconds(texts: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Reads times in us, with decimals.

    Args:
        texts: n JSON values as they stand in the file (bytes): numbers, or texts of decimal numbers.

    Returns:
        int64[n], ns, rounded half to even; bool[n], which of them are times of 62 bits.
    """
    column = _Column(texts)
    decimals, one_dot = column.without_dots()
    values, known = column.read(column.starts, None)
    known &= one_dot & (decimals <= _MOST_DIGITS)
    decimals = np.where(known, decimals, 0)
    more = decimals > 3
    scale = _POWERS[np.where(more, 0, 3 - decimals)]
    known &= np.abs(values) < (_LARGEST // _POWERS)[np.where(more, 0, 3 - decimals)]
    values = np.where(known, values, 0) * scale
    if more.any():
        divisor = _POWERS[np.where(more, decimals - 3, 0)]
        quotient, rest = np.divmod(values, divisor)
        up = (2 * rest > divisor) | ((2 * rest == divisor) & (quotient % 2 == 1))
        values = np.where(more, quotient + up, values)
    for row in np.flatnonzero(~known).tolist():
        number = _nanoseconds(bytes(texts[row]))
        if number is not None:
            values[row], known[row] = number, True
    return np.where(known, values, 0), known


class _Column:
    """Texts as one array of bytes."""

    def __init__(self, texts: Sequence[Any]) -> None:
        """Finds where the texts begin and end. A text with a line end is read as an empty one."""
        joined = b"\n".join(texts)
        if joined.count(b"\n") != max(len(texts) - 1, 0):
            joined = b"\n".join(b"" if b"\n" in bytes(text) else bytes(text) for text in texts)
        self.bytes = np.frombuffer(joined + b"\n", np.uint8)
        self.ends = np.flatnonzero(self.bytes == _NEWLINE)[: len(texts)]
        self.starts = np.concatenate([np.zeros(min(len(texts), 1), np.int64), self.ends[:-1] + 1])
        quoted = self.bytes[self.starts] == _QUOTE
        self.starts = self.starts + quoted
        self.ends = np.maximum(self.ends - quoted, self.starts)

    def starts_with_0x(self) -> NDArray[np.bool_]:
        """Tells which texts are hexadecimal."""
        second = np.minimum(self.starts + 1, len(self.bytes) - 1)
        marked = (self.bytes[self.starts] == _ZERO) & (self.bytes[second] | 32 == _X)
        return np.asarray(marked & (self.ends - self.starts > 2), bool)

    def without_dots(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Takes the dots out.

        Returns:
            int64[n], the number of digits after the dot; bool[n], whether there is at most one dot, between digits.
        """
        dots = np.flatnonzero(self.bytes == _DOT)
        decimals, one_dot = np.zeros(len(self.starts), np.int64), np.ones(len(self.starts), bool)
        if not len(dots):
            return decimals, one_dot
        first = np.arange(len(self.starts))
        after = first + 1
        if len(dots) != len(first) or (dots < self.starts).any() or (dots >= self.ends).any():
            first, after = np.searchsorted(dots, self.starts), np.searchsorted(dots, self.ends)
        count = after - first
        at = dots[np.minimum(first, len(dots) - 1)]
        decimals = np.where(count > 0, self.ends - at - 1, 0)
        one_dot = (count == 0) | ((count == 1) & (decimals > 0) & (at > self.starts))
        self.bytes = self.bytes[self.bytes != _DOT]
        self.starts, self.ends = self.starts - first, self.ends - after
        return decimals, one_dot

    def read(
        self, starts: NDArray[np.int64], is_hex: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Reads the digits from `starts` on. Returns int64[n], and which have only digits, and not too many."""
        negative = self.bytes[np.minimum(starts, len(self.bytes) - 1)] == _MINUS
        starts = starts + negative
        lengths = self.ends - starts
        known = (lengths > 0) & (lengths <= _MOST_DIGITS)
        if is_hex is not None:
            known &= ~is_hex | ((lengths < 16) & ~negative)
        values = np.zeros(len(starts), np.int64)
        for length in np.unique(lengths[known]).tolist():
            for base, table in ((10, _DECIMAL), (16, _HEX)):
                if is_hex is None and base == 16:
                    continue
                rows = known & (lengths == length)
                if is_hex is not None:
                    rows &= is_hex if base == 16 else ~is_hex
                numbers = np.flatnonzero(rows)
                if not len(numbers):
                    continue
                values[numbers], known[numbers] = _values(table[self._matrix(starts[numbers], length)], base)
        return np.where(negative, -values, values), known

    def _matrix(self, starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
        return np.asarray(self.bytes[starts[:, None] + np.arange(length)], np.uint8)


def _values(digits: NDArray[np.uint8], base: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns the value of each row of digits, and which rows have only digits."""
    values = np.zeros(len(digits), np.int64)
    for first in range(0, digits.shape[1], _EXACT_DIGITS):
        some = digits[:, first : first + _EXACT_DIGITS]
        count = some.shape[1]
        weights = float(base) ** np.arange(count - 1, -1, -1)
        values = values * base**count + (some.astype(np.float64) @ weights).astype(np.int64)
    return values, np.asarray((digits != _NO_DIGIT).all(axis=1), bool)


def _integer(text: bytes) -> int | None:
    """Returns an integer in an unusual form; None if it is not an integer of 64 bits."""
    text = text.strip(b'"').strip()
    if len(text) > 40:
        return None
    try:
        if text[:2].lower() == b"0x":
            number = int(text, 16)
        else:
            read = _CONTEXT.create_decimal(text.decode("ascii"))
            if not read.is_finite() or not read.adjusted() < _LARGEST_EXPONENT or read != read.to_integral_value():
                return None
            number = int(read)
    except (ValueError, decimal.DecimalException):
        return None
    return number if -(1 << 63) < number < 1 << 63 else None


def _nanoseconds(text: bytes) -> int | None:
    """Returns a time in an unusual form, such as with an exponent; None if it is not a number, or too large."""
    try:
        time = _CONTEXT.create_decimal(text.strip(b'"').strip().decode("ascii"))
    except (ValueError, decimal.DecimalException):
        return None
    if not time.is_finite() or time.adjusted() > _LARGEST_EXPONENT:
        return None
    if time.adjusted() < _SMALLEST_EXPONENT:
        return 0
    number = int((time * 1000).to_integral_value(decimal.ROUND_HALF_EVEN, _CONTEXT))
    return number if abs(number) < _LARGEST else None
