"""Reads the numbers of DWARF call frame information."""

from __future__ import annotations

import struct
from mmap import mmap
from typing import TypeAlias

_MASK = (1 << 64) - 1
_LONGEST_BLOCK = 1 << 12  # bytes; real expressions have fewer than 100
Bytes: TypeAlias = bytes | mmap


class CfiError(Exception):
    """The data are not call frame information for x86-64, or damaged."""


class DwarfReader:
    """Reads numbers one after the other.

    Attributes:
        at: where the next number begins, in bytes from the start of `data`.

    Every method raises CfiError, IndexError or struct.error if the data ends before the number.
    """

    __slots__ = ("at", "data")

    def __init__(self, data: Bytes, at: int) -> None:
        """Begins at offset `at` of `data`."""
        self.data, self.at = data, at

    def byte(self) -> int:
        """Reads an unsigned number of one byte."""
        value = self.data[self.at]
        self.at += 1
        return value

    def number(self, form: str, size: int) -> int:
        """Reads a number of `size` bytes in a format of the module struct."""
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return int(value)

    def uleb(self) -> int:
        """Reads a ULEB128, cut to 64 bits."""
        value = self.data[self.at]
        self.at += 1
        if value < 128:
            return value
        value &= 127
        for shift in range(7, 70, 7):
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value & _MASK
        raise CfiError("a number without an end")

    def sleb(self) -> int:
        """Reads an SLEB128."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value - (1 << shift + 7) if byte & 64 else value
        raise CfiError("a number without an end")

    def block(self) -> bytes:
        """Reads a block: its length as a ULEB128, then its bytes."""
        size = self.uleb()
        if size > _LONGEST_BLOCK:
            raise CfiError(f"an expression of {size} bytes")
        value = bytes(self.data[self.at : self.at + size])
        if len(value) != size:
            raise CfiError("an expression without an end")
        self.at += size
        return value
