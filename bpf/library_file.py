"""A library, which may be anybody's, as far as probes need it: its build-id, and where addresses lie in the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection

from iaprof.basics.errors import IaprofError

MAX_READ_BYTES = 1 << 20  # in all: reading a library must not take long, whoever made it. The runtime's takes 10,000
EM_X86_64 = "EM_X86_64"
LOADERS = ("dlopen", "dlmopen")
_BUILD_ID_BYTES = range(8, 33)


class ProbeError(IaprofError):
    """A library cannot be probed; the text says why."""


class _Bounded:
    """As much of a file as pyelftools needs, which reads from it until that is too much."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = MAX_READ_BYTES
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        self._left -= max(size, 1)
        if size < 0 or self._left < 0:
            raise ProbeError("it has more headers, notes or symbols than any compiler and linker make")
        return self._file.read(size)


class LibraryFile:
    """An open x86-64 library."""

    def __init__(self, file: BinaryIO) -> None:
        """Reads its headers.

        Raises:
            ProbeError: it is none.
        """
        stream: Any = _Bounded(file)
        with self.reading():
            self.elf: Any = ELFFile(stream)
            if self.elf["e_machine"] != EM_X86_64 or self.elf.elfclass != 64 or not self.elf.little_endian:
                raise ProbeError("it is not an x86-64 library")
            self._segments = list(self.elf.iter_segments("PT_LOAD"))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within this, whatever is wrong with the file is a ProbeError."""
        try:
            yield
        except ProbeError:
            raise
        except Exception as error:  # pyelftools raises what it likes, and the file is anybody's
            raise ProbeError(f"it is a broken ELF file ({type(error).__name__}: {error})") from error

    def build_id(self) -> str:
        """In hexadecimal; empty where the library has none.

        Raises:
            ProbeError: the file is broken.
        """
        with self.reading():
            section = self.elf.get_section_by_name(".note.gnu.build-id")
            if isinstance(section, NoteSection):
                for note in section.iter_notes():
                    is_build_id = note["n_name"] == "GNU" and note["n_type"] == "NT_GNU_BUILD_ID"
                    if is_build_id and note["n_descsz"] in _BUILD_ID_BYTES:
                        return str(note["n_desc"])
        return ""

    def offset(self, address: int, executable: bool) -> int:
        """Where an address lies in the file: in a segment of code, or in one of data that can be written.

        Raises:
            ProbeError: in none.
        """
        for segment in self._segments:
            start = segment["p_vaddr"]
            flags = segment["p_flags"]
            right = flags & 1 and not flags & 2 if executable else flags & 2 and not flags & 1
            if right and start <= address and address + (1 if executable else 2) <= start + segment["p_filesz"]:
                return int(address - start + segment["p_offset"])
        where = "executable" if executable else "writable"
        raise ProbeError(f"a probe of it points outside its {where} segments")


def load_functions(library: LibraryFile) -> list[int]:
    """Offsets of the functions with which a C library loads other libraries, without doubles.

    Raises:
        ProbeError: the file is broken.
    """
    return sorted(set(exported(library, LOADERS).values()))


def exported(library: LibraryFile, names: Iterable[str]) -> dict[str, int]:
    """Offsets of those functions that a library exports, by their names.

    Raises:
        ProbeError: the file is broken.
    """
    found = {}
    with library.reading():
        table = library.elf.get_section_by_name(".gnu.hash") or library.elf.get_section_by_name(".hash")
        for name in names:
            symbol = table.get_symbol(name) if table is not None else None
            if symbol is not None and symbol["st_info"]["type"] == "STT_FUNC":
                found[name] = library.offset(symbol["st_value"], executable=True)
    return found
