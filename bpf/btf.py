"""The running kernel's structures and functions, from its BTF (Documentation/bpf/btf.rst)."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from pathlib import Path

VMLINUX = Path("/sys/kernel/btf/vmlinux")
_MAGIC = 0xEB9F
_HEADER = struct.Struct(
    "<HBBIIIII"
)  # magic, version, flags, header length; then offset and length of the type section and of the string section
_STRUCT, _UNION, _FUNCTION = 4, 5, 12
_EXTRA_WORDS = {1: 1, 3: 3, 14: 1, 17: 1}  # by kind: number of 4-byte words after the three that every type has
_WORDS_PER_MEMBER = {4: 3, 5: 3, 6: 2, 13: 2, 15: 3, 19: 3}  # by kind, in 4-byte words
_LONGEST_NAME = 256
_MAX_NESTING = 8  # of anonymous structures and unions


class BtfError(Exception):
    """The kernel has no BTF, or it cannot be read."""


class Btf:
    """The types of a kernel."""

    def __init__(self, path: Path = VMLINUX, functions: Sequence[str] = ()) -> None:
        """Reads the BTF file, which takes 25 ms.

        Args:
            path: the file.
            functions: names of the functions for which `function` will be called.

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
            self._structs: dict[int, int] = {}  # index into _types, by type number
            self._functions: dict[int, int] = {}  # type number, by the index of the name
            self._find({self._name(name) for name in functions})
        except (OSError, struct.error, IndexError, TypeError) as error:
            raise BtfError(f"the kernel's BTF cannot be read: {error}") from error

    def _find(self, functions: Collection[int | None]) -> None:
        types, structs, at, number = self._types, self._structs, 0, 0
        while at < len(types):
            number += 1
            info = types[at + 1]
            kind = info >> 24 & 31
            if kind in (_STRUCT, _UNION):
                structs[number] = at
            elif kind == _FUNCTION and types[at] in functions:
                self._functions[types[at]] = number
            at += 3 + _EXTRA_WORDS.get(kind, 0) + _WORDS_PER_MEMBER.get(kind, 0) * (info & 0xFFFF)

    def offset(self, name: str, *members: str) -> int | None:
        """Returns the offset in bytes of a member, which may be in a nested structure; None if it does not exist.

        Args:
            name: of the structure.
            members: path of member names; all but the last name structures.
        """
        wanted = self._name(name)
        if wanted is None:
            return None
        number = next((number for number, at in self._structs.items() if self._is_struct(at, wanted)), None)
        total = 0
        for member in members:
            found = self._member(number, member.encode(), _MAX_NESTING)
            if found is None:
                return None
            offset, number = found
            total += offset
        return total

    def function(self, name: str) -> int | None:
        """Returns a function's type number, by which programs call it; None if the kernel has none of that name."""
        wanted = self._name(name)
        return None if wanted is None else self._functions.get(wanted)

    def _name(self, name: str) -> int | None:
        """Returns a name's index in the section of strings."""
        start, end = self._strings, self._strings + self._strings_size
        found = self._data.find(b"\0" + name.encode() + b"\0", start, end)
        return found + 1 - start if found >= 0 else None

    def _is_struct(self, at: int, name: int) -> bool:
        return self._types[at] == name and self._types[at + 1] >> 24 & 31 == _STRUCT

    def _member(self, number: int | None, name: bytes, levels_left: int) -> tuple[int, int] | None:
        """Returns a member's offset in bytes and its type number; searches anonymous structures, too."""
        at = self._structs.get(number) if number is not None else None
        if at is None or not levels_left:
            return None
        has_bits = self._types[at + 1] >> 31
        end = min(at + 3 + 3 * (self._types[at + 1] & 0xFFFF), len(self._types) - 2)
        for each in range(at + 3, end, 3):
            string, kind, bits = self._types[each : each + 3].tolist()
            offset = (bits & 0xFFFFFF if has_bits else bits) // 8
            if string and self._string(string) == name:
                return offset, kind
            if not string and (inner := self._member(kind, name, levels_left - 1)) is not None:
                return offset + inner[0], inner[1]
        return None

    def _string(self, offset: int) -> bytes:
        start = self._strings + offset
        return self._data[start : start + _LONGEST_NAME].split(b"\0", 1)[0]
