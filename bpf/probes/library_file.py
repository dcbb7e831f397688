"""A library, which may be anybody's, as far as probes need it: its build-id, and where addresses lie in the file."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from iaprof.basics.errors import IaprofError
from iaprof.formats.elf import EM_X86_64, PF_EXECUTE, PF_WRITE, STT_FUNC, ElfError, ElfFile, TooLarge, in_stream

MAX_READ_BYTES = 1 << 20  # in all: reading a library must not take long, whoever made it. The runtime's takes 10,000
LOADERS = ("dlopen", "dlmopen")
_BUILD_ID_BYTES = range(8, 33)
_TOO_MUCH = "it has more headers, notes or symbols than any compiler and linker make"


class ProbeError(IaprofError):
    """A library cannot be probed; the text says why."""


class LibraryFile:
    """An open x86-64 library."""

    def __init__(self, file: BinaryIO) -> None:
        """Reads its headers.

        Raises:
            ProbeError: it is none.
        """
        self._read, self._left = in_stream(file), MAX_READ_BYTES
        with self.reading():
            self.elf = ElfFile(self._bounded)
            if self.elf.header.machine != EM_X86_64:
                raise ProbeError("it is not an x86-64 library")
            self.loads = self.elf.loads

    def _bounded(self, offset: int, size: int) -> bytes:
        self._left -= max(size, 1)
        if self._left < 0:
            raise ProbeError(_TOO_MUCH)
        return self._read(offset, size)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within this, whatever is wrong with the file is a ProbeError."""
        try:
            yield
        except TooLarge as error:
            raise ProbeError(_TOO_MUCH) from error
        except (ElfError, struct.error, ValueError, IndexError) as error:
            raise ProbeError(f"it is a broken ELF file ({type(error).__name__}: {error})") from error

    def build_id(self) -> str:
        """In hexadecimal; empty where the library has none.

        Raises:
            ProbeError: the file is broken.
        """
        with self.reading():
            for note in self.elf.notes_of(".note.gnu.build-id"):
                if note.is_build_id and len(note.description) in _BUILD_ID_BYTES:
                    return note.description.hex()
        return ""

    def offset(self, address: int, executable: bool) -> int:
        """Where an address lies in the file: in a segment of code, or in one of data that can be written.

        Raises:
            ProbeError: in none.
        """
        wanted = PF_EXECUTE if executable else PF_WRITE
        for segment in self.loads:
            within = address - segment.address
            is_right = segment.flags & (PF_EXECUTE | PF_WRITE) == wanted
            if is_right and 0 <= within <= segment.size - (1 if executable else 2):
                return within + segment.offset
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
    with library.reading():
        found = {name: library.elf.exported(name.encode(), kinds=(STT_FUNC,)) for name in names}
    return {name: library.offset(at, executable=True) for name, at in found.items() if at is not None}
