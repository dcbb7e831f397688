"""Reads from an untrusted library what probes need: its build-id, file offsets of addresses and functions, and code.

At an instruction that the kernel does not emulate (arch/x86/kernel/uprobes.c), a probe single-steps a copy of it, which
takes 2 to 10 us instead of a few hundred ns.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import BinaryIO

from iaprof.basics.elf import EM_X86_64, PF_EXECUTE, PF_WRITE, STT_FUNC, ElfError, ElfFile, TooLarge, in_stream
from iaprof.basics.errors import IaprofError

MAX_READ_BYTES = 1 << 20  # in total, to limit the time that a malicious library costs; the runtime's needs 10,000
_CHANGE_FUNCTION = b"_dl_debug_state"  # of the dynamic linker, for debuggers
_MOST_LINKER_BYTES = 1 << 22
_CALL_OR_JUMP = re.compile(rb"[\xe8\xe9](?=(.{4}))", re.DOTALL)
_BEFORE_CHANGE = 40  # bytes before the call
# mov $NUMBER,24(%register) or mov %esi,24(%register): 24 is the offset of r_state in struct r_debug.
_STORES_STATE = re.compile(rb"\xc7[\x40-\x47]\x18(?P<number>.{4})|\x89[\x70-\x77]\x18", re.DOTALL)
_RT_DELETE = 2  # link.h
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

    def code(self, offset: int, size: int) -> bytes:
        """Returns bytes of the file; fewer at its end.

        Raises:
            ProbeError: iaprof has read too much of the file.
        """
        return self._read_limited(offset, size)

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


class Change(IntEnum):
    """What a dynamic linker does to a process's libraries at a probed place; the cookie of its probe."""

    LOAD = 0  # it maps libraries, or has finished
    UNLOAD = 1  # it unmaps libraries, or nobody knows
    IN_ESI = 2  # r_state of struct r_debug (link.h) is in this register


def changes_of_libraries(linker: LibraryFile) -> list[tuple[int, Change]]:
    """Returns where a dynamic linker tells debuggers that it maps or unmaps libraries, as file offsets.

    It calls an empty function for that, in which debuggers place a breakpoint. So its calls are probed, and not the
    function. Before, it notes what it does in r_state: as a number, or in newer versions as the argument of a function.

    Raises:
        ProbeError: the file is broken.
    """
    with linker.reading():
        function = linker.elf.exported(_CHANGE_FUNCTION, kinds=(STT_FUNC,))
        if function is None:
            return []
        code = [(each, linker.elf.at(each.address, each.size)) for each in linker.loads if each.flags & PF_EXECUTE]
    changes = []
    for segment, content in code:
        for found in _CALL_OR_JUMP.finditer(content[:_MOST_LINKER_BYTES]):
            (relative,) = struct.unpack("<i", found[1])
            if segment.address + found.start() + 5 + relative == function:
                before = content[max(found.start() - _BEFORE_CHANGE, 0) : found.start()]
                changes.append((segment.offset + found.start(), _change(before)))
    return changes


def _change(before: bytes) -> Change:
    """Returns what a dynamic linker does, from the code before its call."""
    stores = list(_STORES_STATE.finditer(before))
    if not stores:
        return Change.UNLOAD
    number = stores[-1]["number"]
    return Change.IN_ESI if number is None else Change(int.from_bytes(number, "little") == _RT_DELETE)


def exported(library: LibraryFile, names: Iterable[str]) -> dict[str, int]:
    """Returns the file offsets of those of the functions that a library exports, by name.

    Raises:
        ProbeError: the file is broken.
    """
    with library.reading():
        found = {name: library.elf.exported(name.encode(), kinds=(STT_FUNC,)) for name in names}
    return {name: library.offset(at, executable=True) for name, at in found.items() if at is not None}


# push, also of r8 to r15; nop; conditional jumps, short and near; jmp and call. Linux 6.1 and later.
EMULATED = re.compile(rb"\x41?[\x50-\x57]|\x90|[\x70-\x7f]|\x0f[\x80-\x8f]|[\xe8\xe9\xeb]", re.DOTALL)
_LONG_NOP = re.compile(rb"\x66*(?:\x90|\x0f\x1f)", re.DOTALL)  # emulated by newer kernels, such as Linux 6.18
_LONGEST = 15  # maximum length of an instruction in bytes


def single_stepped(file_fd: int, offsets: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Returns the names of the places in a file whose instruction no kernel emulates, without duplicates.

    Args:
        file_fd: the open file.
        offsets: name and file offset of each place.

    Raises:
        OSError: the file cannot be read.
    """
    stepped = (name for name, offset in offsets if not _may_be_emulated(os.pread(file_fd, _LONGEST, offset)))
    return tuple(dict.fromkeys(stepped))


def _may_be_emulated(code: bytes) -> bool:
    return bool(EMULATED.match(code) or _LONG_NOP.match(code))
