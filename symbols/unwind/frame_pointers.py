"""Whether a library was built with frame pointers, told from its code: how its functions begin.

A function that keeps them begins with push %rbp; mov %rsp,%rbp. Compilers put endbr64 before that, and sometimes a
few instructions more. So what counts is the share of functions, of some size, near whose beginning the two stand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.elf import (
    EM_X86_64,
    PF_EXECUTE,
    SHT_DYNSYM,
    SHT_SYMTAB,
    STT_FUNC,
    ElfError,
    ElfFile,
    in_file,
)
from iaprof.formats.elf_tables import SYMBOL

SAMPLED = 256  # functions
SMALLEST = 64  # bytes of a function: smaller ones need no frame in any build
_OPENING = 24  # bytes at a function's beginning
_PROLOGUES = (b"\x55\x48\x89\xe5", b"\x55\x48\x8b\xec")  # the two encodings of that mov
_MOST_SECTIONS, _MOST_SEGMENTS = 1024, 64
_MOSTSYMBOL = 1 << 18


@dataclass(frozen=True)
class Openings:
    """How the functions that were looked at begin."""

    with_frame: int
    functions: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.with_frame / self.functions if self.functions else 0.0

    @property
    def kept(self) -> bool:
        """Whether it was built with frame pointers; assembly and shrink-wrapped functions never have them all."""
        return self.share >= 0.5


def read_openings(fd: int) -> Openings | None:
    """Looks at up to SAMPLED functions of an open x86-64 ELF file; None when it is none.

    The file may be anybody's: everything that is read of it is bounded, and nothing of it is believed.
    """
    try:
        elf = ElfFile(in_file(fd))
        return _openings(elf) if elf.header.machine == EM_X86_64 else None
    except ElfError:
        return None


def _openings(elf: ElfFile) -> Openings:
    starts: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)]
    for section in elf.sections[:_MOST_SECTIONS]:
        if section.type in (SHT_SYMTAB, SHT_DYNSYM):
            table = elf.read(section.offset, min(section.size // SYMBOL.itemsize, _MOSTSYMBOL) * SYMBOL.itemsize)
            starts.append(_functions(table[: len(table) // SYMBOL.itemsize * SYMBOL.itemsize]))
    every = np.unique(np.concatenate(starts))
    sampled = every[:: max(1, -(-len(every) // SAMPLED))]
    openings = [opening for address in sampled.tolist() if (opening := _opening(elf, address))]
    with_frame = sum(any(prologue in opening for prologue in _PROLOGUES) for opening in openings)
    return Openings(with_frame, len(openings))


def _functions(table: bytes) -> NDArray[np.uint64]:
    """Addresses of the functions that are in this file and large enough: uint64[n]."""
    symbols = np.frombuffer(table, SYMBOL)
    chosen = (symbols["info"] & 0xF == STT_FUNC) & (symbols["section"] != 0) & (symbols["size"] >= SMALLEST)
    addresses: NDArray[np.uint64] = symbols["value"][chosen].astype(np.uint64)
    return addresses


def _opening(elf: ElfFile, address: int) -> bytes:
    for segment in elf.loads[:_MOST_SEGMENTS]:
        within = address - segment.address
        if segment.flags & PF_EXECUTE and 0 <= within <= segment.size - _OPENING:
            return elf.read(segment.offset + within, _OPENING)
    return b""
