"""Function names of one ELF file, by whole tables: NumPy reads .symtab and .dynsym as they stand.

pyelftools finds the sections; no Python runs per symbol. The file may be anything: whatever is wrong with it makes
it a file without names.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection
from numpy.typing import NDArray

_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_FUNCTION, _IFUNC = 2, 10
_MAX_TABLE_BYTES = 1 << 30
_MAX_NAME_BYTES = 1 << 16
_BROKEN = (
    ELFError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    MemoryError,
    RecursionError,
    OSError,
    struct.error,
)


class ElfSymbols:
    """The functions of a file, sorted by address."""

    def __init__(self, file: BinaryIO) -> None:
        """Reads the tables.

        Raises:
            ValueError: it is no 64-bit ELF file, or a broken one.
        """
        try:
            elf = ELFFile(file)
            if elf.elfclass != 64 or not elf.little_endian:
                raise ValueError("not a 64-bit little-endian ELF file")
            self.build_id = _build_id(elf)
            self._loads = [
                (s["p_offset"], s["p_filesz"], s["p_vaddr"]) for s in elf.iter_segments("PT_LOAD") if s["p_filesz"]
            ]
            tables = [_table(elf, file, name) for name in (".symtab", ".dynsym")]
        except _BROKEN as error:
            raise ValueError(str(error)) from error
        self._names = [names for _, names in tables]
        symbols = np.concatenate([table for table, _ in tables])
        source = np.repeat(np.arange(len(tables)), [len(table) for table, _ in tables])
        kinds = symbols["info"] & 15
        kept = ((kinds == _FUNCTION) | (kinds == _IFUNC)) & (symbols["section"] != 0)
        symbols, source = symbols[kept], source[kept]
        # Of several names of one address the global one before the weak one before the local one: last one wins below.
        rank = np.array([0, 2, 1] + [0] * 13, np.uint8)[symbols["info"] >> 4]
        order = np.lexsort((-source, rank, symbols["size"], symbols["value"]))
        self._values = symbols["value"][order]
        self._sizes = symbols["size"][order]
        self._name_at = symbols["name"][order]
        self._source = source[order]

    def name(self, offset: int) -> str | None:
        """The function that contains the byte at `offset` of the file; None where none is known to."""
        address = next(
            (offset - start + vaddr for start, size, vaddr in self._loads if 0 <= offset - start < size), None
        )
        if address is None:
            return None
        index = int(np.searchsorted(self._values, np.uint64(address), side="right")) - 1
        if index < 0:
            return None
        start, size = int(self._values[index]), int(self._sizes[index])
        if address >= start + size and size:
            return None
        if size == 0 and address != start and not self._until_next(index, address):
            return None
        names, where = self._names[self._source[index]], int(self._name_at[index])
        end = names.find(b"\0", where, where + _MAX_NAME_BYTES)
        return names[where : end if end >= 0 else where].decode("utf-8", "backslashreplace") or None

    def _until_next(self, index: int, address: int) -> bool:
        """Assembly leaves sizes out: such a function reaches to the next symbol."""
        return index + 1 == len(self._values) or address < int(self._values[index + 1])


def _table(elf: Any, file: BinaryIO, name: str) -> tuple[NDArray[np.void], bytes]:
    section = elf.get_section_by_name(name)
    if section is None or section["sh_type"] == "SHT_NOBITS":
        return np.empty(0, _SYMBOL), b""
    strings = elf.get_section(section["sh_link"])
    if max(section["sh_size"], strings["sh_size"]) > _MAX_TABLE_BYTES or section["sh_entsize"] != _SYMBOL.itemsize:
        raise ValueError(f"its {name} is of an absurd size")
    data = _bytes(file, section)
    return np.frombuffer(data[: len(data) // _SYMBOL.itemsize * _SYMBOL.itemsize], _SYMBOL), _bytes(file, strings)


def _bytes(file: BinaryIO, section: Any) -> bytes:
    file.seek(section["sh_offset"])
    return file.read(section["sh_size"])


def _build_id(elf: Any) -> bytes | None:
    section = elf.get_section_by_name(".note.gnu.build-id")
    if not isinstance(section, NoteSection):
        return None
    for note in section.iter_notes():
        if note["n_type"] == "NT_GNU_BUILD_ID":
            return bytes.fromhex(note["n_desc"])
    return None


def open_module(path: str, build_id: bytes | None) -> ElfSymbols | None:
    """The symbols of the file at `path`, if it is the very build that was mapped.

    A path alone names nothing: the file may have been rebuilt since, or be another machine's. The path may also come
    from a stranger's capture: only a regular file is opened.

    Args:
        path: as the process saw it.
        build_id: of what was mapped; None when it had none, and then nothing can be confirmed.
    """
    if build_id is None or not path.startswith("/"):
        return None
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            return None
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            symbols = ElfSymbols(file)
    except (OSError, ValueError):
        return None
    return symbols if symbols.build_id == build_id else None
