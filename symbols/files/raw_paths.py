"""Restores bytes that are not UTF-8 in the paths of source files, which the `symbolic` library replaces by U+FFFD.

The strings of the debug information still have them. A component of a path is restored if there is one string there
that it can come from; otherwise it keeps the replacement characters.
"""

from __future__ import annotations

import re
from functools import cached_property

from iaprof.basics.elf import SHF_COMPRESSED, ElfError
from iaprof.symbols.files.elf import Elf

_REPLACED = "\ufffd".encode()
_SECTIONS = (".debug_line_str", ".debug_line", ".debug_str")
_MOST_BYTES = 1 << 27  # of a section
_MOST_COMPONENTS = 1 << 8  # that are looked for


class RawPaths:
    """The paths of one file's debug information."""

    def __init__(self, elf: Elf) -> None:
        """Reads nothing yet."""
        self._elf = elf
        self._components: dict[bytes, bytes] = {}

    def restored(self, path: bytes) -> bytes:
        """Returns a path with the bytes that it has in the debug information."""
        return b"/".join(map(self._component, path.split(b"/"))) if _REPLACED in path else path

    def _component(self, name: bytes) -> bytes:
        if _REPLACED not in name:
            return name
        if name not in self._components and len(self._components) < _MOST_COMPONENTS:
            self._components[name] = self._found(name)
        return self._components.get(name, name)

    def _found(self, name: bytes) -> bytes:
        # A replacement character stands for up to three bytes.
        parts = re.split(rb"((?:%b)+)" % _REPLACED, name)
        counts = [len(part) // len(_REPLACED) for part in parts]
        pattern = b"".join(
            rb"[\x80-\xff]{%d,%d}" % (count, 3 * count) if at % 2 else re.escape(part)
            for at, (part, count) in enumerate(zip(parts, counts, strict=True))
        )
        text = name.decode("utf-8", "replace")
        found = {match[0] for strings in self._strings for match in re.finditer(pattern + rb"(?=[/\x00])", strings)}
        fitting = {each for each in found if each.decode("utf-8", "replace") == text}
        return fitting.pop() if len(fitting) == 1 else name

    @cached_property
    def _strings(self) -> list[bytes]:
        """The sections with the strings, without compressed ones and those that cannot be read."""
        contents = []
        for section in _SECTIONS:
            index = self._elf.section(section)
            if index is not None and not self._elf.sections[index].flags & SHF_COMPRESSED:
                try:
                    contents.append(self._elf.data(index, _MOST_BYTES))
                except ElfError:
                    continue
        return contents
