"""The running kernel's structures and functions, from its BTF (Documentation/bpf/btf.rst)."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VMLINUX = Path("/sys/kernel/btf/vmlinux")
_MAGIC = 0xEB9F
_HEADER = struct.Struct(
    "<HBBIIIII"
)  # magic, version, flags, header length; then offset and length of the type section and of the string section
_STRUCT, _UNION, _FUNCTION = 4, 5, 12
_EXTRA_WORDS = {1: 1, 3: 3, 14: 1, 17: 1}  # by kind: number of 4-byte words after the three that every type has
_WORDS_PER_MEMBER = {4: 3, 5: 3, 6: 2, 13: 2, 15: 3, 19: 3}  # by kind, in 4-byte words
_DECIDES_LENGTH = 31 << 24 | 0xFFFF  # kind and number of members
_LONGEST_NAME = 256
_MAX_NESTING = 8  # of anonymous structures and unions


class BtfError(Exception):
    """The kernel has no BTF, or it cannot be read."""


class Btf:
    """The types of a kernel."""

    def __init__(self, path: Path = VMLINUX) -> None:
        """Reads the BTF file, which takes 15 ms.

        Raises:
            BtfError: the file is missing or damaged.
        """
        try:
            self._data = path.read_bytes()
            magic, _, _, header, types, types_size, strings, self._strings_size = _HEADER.unpack_from(self._data)
            if magic != _MAGIC:
                raise BtfError("it is not BTF")
            self._strings = header + strings
            self._types = memoryview(self._data)[header + types : header + types + types_size].cast("I")
            self._starts = _starts(self._types)  # [types], index into _types, by type number - 1
            words = np.asarray(self._types)
            self._names, self._kinds = words[self._starts], words[self._starts + 1] >> 24 & 31  # likewise
        except (OSError, struct.error, IndexError, TypeError, ValueError) as error:
            raise BtfError(f"the kernel's BTF cannot be read: {error}") from error

    def offset(self, name: str, *members: str) -> int | None:
        """Returns the offset in bytes of a member, which may be in a nested structure; None if it does not exist.

        Args:
            name: of the structure.
            members: path of member names; all but the last name structures.
        """
        bit = self.bit(name, *members)
        return None if bit is None else bit // 8

    def bit(self, name: str, *members: str) -> int | None:
        """Returns the offset in bits of a member, which may be a bit-field; the rest as `offset`."""
        number = self._number(name, _STRUCT)
        total = 0
        for member in members:
            found = self._member(number, member.encode(), _MAX_NESTING)
            if found is None:
                return None
            bits, number = found
            total += bits
        return total

    def function(self, name: str) -> int | None:
        """Returns a function's type number, by which programs call it; None if the kernel has none of that name."""
        return self._number(name, _FUNCTION)

    def _number(self, name: str, kind: int) -> int | None:
        wanted = self._name(name)
        if wanted is None:
            return None
        found = np.flatnonzero((self._names == wanted) & (self._kinds == kind))
        return int(found[0]) + 1 if len(found) else None

    def _name(self, name: str) -> int | None:
        """Returns a name's index in the section of strings."""
        start, end = self._strings, self._strings + self._strings_size
        found = self._data.find(b"\0" + name.encode() + b"\0", start, end)
        return found + 1 - start if found >= 0 else None

    def _member(self, number: int | None, name: bytes, levels_left: int) -> tuple[int, int] | None:
        """Returns a member's offset in bits and its type number; searches anonymous structures, too."""
        if not number or number > len(self._starts) or self._kinds[number - 1] not in (_STRUCT, _UNION):
            return None
        if not levels_left:
            return None
        at = int(self._starts[number - 1])
        has_bits = self._types[at + 1] >> 31
        end = min(at + 3 + 3 * (self._types[at + 1] & 0xFFFF), len(self._types) - 2)
        for each in range(at + 3, end, 3):
            string, kind, offset = self._types[each : each + 3].tolist()
            offset = offset & 0xFFFFFF if has_bits else offset
            if string and self._string(string) == name:
                return offset, kind
            if not string and (inner := self._member(kind, name, levels_left - 1)) is not None:
                return offset + inner[0], inner[1]
        return None

    def _string(self, offset: int) -> bytes:
        start = self._strings + offset
        return self._data[start : start + _LONGEST_NAME].split(b"\0", 1)[0]


def _starts(types: memoryview) -> NDArray[np.int64]:
    """Returns where each type begins in the section of types: int64[types], in 4-byte words."""
    found: list[int] = []
    add, words, at, end = found.append, {}, 0, len(types)
    while at < end:
        add(at)
        info = types[at + 1] & _DECIDES_LENGTH
        if info not in words:
            kind = info >> 24
            words[info] = 3 + _EXTRA_WORDS.get(kind, 0) + _WORDS_PER_MEMBER.get(kind, 0) * (info & 0xFFFF)
        at += words[info]
    return np.array(found, np.int64)
