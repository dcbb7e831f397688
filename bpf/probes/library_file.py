"""Reads from an untrusted library what probes need: its build-id, and the file offsets of addresses and functions."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from iaprof.basics.errors import IaprofError
from iaprof.formats.elf import EM_X86_64, PF_EXECUTE, PF_WRITE, STT_FUNC, ElfError, ElfFile, TooLarge, in_stream

MAX_READ_BYTES = 1 << 20  # in total, to limit the time that a malicious library costs; the runtime's needs 10,000
_CHANGE_FUNCTION, _CHANGE_STATE = b"_dl_debug_state", b"_r_debug"  # of the dynamic linker, for debuggers (link.h)
_R_STATE = 24  # offset of r_state in struct r_debug
_BUILD_ID_BYTES = range(8, 33)
_TOO_MUCH = "it has more headers, notes or symbols than any compiler and linker make"


class ProbeError(IaprofError):
    """A library cannot be probed; the text says why."""


class LibraryFile:
    """An open x86-64 library."""

    def __init__(self, file: BinaryIO) -> None:
        """Reads the library's headers.

        Raises:
            ProbeError: the file is not an x86-64 ELF file.
        """
        self._read, self._bytes_left = in_stream(file), MAX_READ_BYTES
        with self.reading():
            self.elf = ElfFile(self._read_limited)
            if self.elf.header.machine != EM_X86_64:
                raise ProbeError("it is not an x86-64 library")
            self.loads = self.elf.loads

    def _read_limited(self, offset: int, size: int) -> bytes:
        self._bytes_left -= max(size, 1)
        if self._bytes_left < 0:
            raise ProbeError(_TOO_MUCH)
        return self._read(offset, size)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turns all errors about the file's content that are raised inside the `with` into ProbeError."""
        try:
            yield
        except TooLarge as error:
            raise ProbeError(_TOO_MUCH) from error
        except (ElfError, struct.error, ValueError, IndexError) as error:
            raise ProbeError(f"it is a broken ELF file ({type(error).__name__}: {error})") from error

    def build_id(self) -> str:
        """Returns the build-id in hexadecimal; empty if the library has none.

        Raises:
            ProbeError: the file is broken.
        """
        with self.reading():
            for note in self.elf.notes_of(".note.gnu.build-id"):
                if note.is_build_id and len(note.description) in _BUILD_ID_BYTES:
                    return note.description.hex()
        return ""

    def offset(self, address: int, executable: bool) -> int:
        """Returns the file offset of a virtual address, which must be in an executable or in a writable segment.

        Raises:
            ProbeError: the address is in no such segment.
        """
        wanted = PF_EXECUTE if executable else PF_WRITE
        for segment in self.loads:
            within = address - segment.address
            is_right = segment.flags & (PF_EXECUTE | PF_WRITE) == wanted
            if is_right and 0 <= within <= segment.size - (1 if executable else 2):
                return within + segment.offset
        where = "executable" if executable else "writable"
        raise ProbeError(f"a probe of it points outside its {where} segments")


def change_of_libraries(linker: LibraryFile) -> tuple[int, int] | None:
    """Returns where a dynamic linker tells debuggers that it maps or unmaps libraries; None if it does not.

    Returns:
        The file offset of the function that it calls, and how many bytes after its address r_state is, which tells what
        it does: modulo 2^64.

    Raises:
        ProbeError: the file is broken.
    """
    with linker.reading():
        function = linker.elf.exported(_CHANGE_FUNCTION, kinds=(STT_FUNC,))
        state = linker.elf.exported(_CHANGE_STATE)
    if function is None or state is None:
        return None
    return linker.offset(function, executable=True), (state + _R_STATE - function) % (1 << 64)


def exported(library: LibraryFile, names: Iterable[str]) -> dict[str, int]:
    """Returns the file offsets of those of the named functions that a library exports, by name.

    Raises:
        ProbeError: the file is broken.
    """
    with library.reading():
        found = {name: library.elf.exported(name.encode(), kinds=(STT_FUNC,)) for name in names}
    return {name: library.offset(at, executable=True) for name, at in found.items() if at is not None}
