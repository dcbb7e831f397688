"""Parses hexadecimal numbers in text by whole columns: /proc/kallsyms and perf maps can have a million lines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_DIGITS = 16  # of a 64-bit number
_NO_DIGIT = 16
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
for _digit in range(16):
    _DIGITS[[ord(f"{_digit:x}"), ord(f"{_digit:X}")]] = _digit


def padded(text: bytes | bytearray | memoryview) -> NDArray[np.uint8]:
    """Returns the text with a few newlines appended, so that it can be read a little past its end: uint8[n]."""
    return np.concatenate([np.frombuffer(text, np.uint8), np.full(MOST_DIGITS + 4, ord("\n"), np.uint8)])


def hex_numbers(text: NDArray[np.uint8], starts: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Parses the number at each of `starts`, one digit of all numbers at a time.

    Args:
        text: as `padded` made it.
        starts: int64[n], where the first digits should be; at most one byte after the text.

    Returns:
        uint64[n]: the numbers.
        int64[n]: their numbers of digits; 0 if there is no number, more than MOST_DIGITS if it has more than 64 bits.
    """
    numbers, lengths = np.zeros(len(starts), np.uint64), np.zeros(len(starts), np.int64)
    goes_on = np.ones(len(starts), np.bool_)
    for position in range(MOST_DIGITS + 1):
        digits = _DIGITS[text[starts + position]]
        goes_on &= digits != _NO_DIGIT
        if not goes_on.any():
            break
        numbers = np.where(goes_on, numbers << np.uint64(4) | digits, numbers)
        lengths += goes_on
    return numbers, lengths
