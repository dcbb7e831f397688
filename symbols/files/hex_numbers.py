"""Hexadecimal numbers in text, a whole column at a time: /proc/kallsyms and perf maps have a million lines of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_DIGITS = 16  # of a 64-bit number
_NO_DIGIT = 16
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
for _digit in range(16):
    _DIGITS[[ord(f"{_digit:x}"), ord(f"{_digit:X}")]] = _digit


def padded(text: bytes | bytearray | memoryview) -> NDArray[np.uint8]:
    """The text as bytes that can be read a little past the end: uint8[len(text) + a few newlines]."""
    return np.concatenate([np.frombuffer(text, np.uint8), np.full(MOST_DIGITS + 4, ord("\n"), np.uint8)])


def hex_numbers(text: NDArray[np.uint8], starts: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Reads a number at each of `starts`, one digit of all of them at a time.

    Args:
        text: as `padded` made it.
        starts: int64[n], where digits should be, at most one behind the text.

    Returns:
        uint64[n]: the numbers.
        int64[n]: how many digits each has; 0 where there is none, more than MOST_DIGITS where it is no 64-bit number.
    """
    numbers, lengths = np.zeros(len(starts), np.uint64), np.zeros(len(starts), np.int64)
    more = np.ones(len(starts), np.bool_)
    for place in range(MOST_DIGITS + 1):
        digits = _DIGITS[text[starts + place]]
        more &= digits != _NO_DIGIT
        if not more.any():
            break
        numbers = np.where(more, numbers << np.uint64(4) | digits, numbers)
        lengths += more
    return numbers, lengths
