"""Tells from the prologues of a file's functions whether it was built with frame pointers.

A function that keeps frame pointers begins with push %rbp; mov %rsp,%rbp. Compilers may put endbr64 and a few other
instructions before. So the share of larger functions with these two near their start counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.elf import (
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
_PROLOGUE_BYTES = 24
_FRAME_SETUPS = (b"\x55\x48\x89\xe5", b"\x55\x48\x8b\xec")  # push %rbp; and the two encodings of mov %rsp,%rbp
_MOST_SECTIONS, _MOST_SEGMENTS = 1024, 64
_MOST_SYMBOLS = 1 << 18  # of a table


@dataclass(frozen=True)
class Prologues:
    """The prologues of the sampled functions of a file."""

    with_frame: int  # functions that set up a frame pointer
    functions: int

    @property
    def share(self) -> float:
        """The share of functions that set up a frame pointer, from 0 to 1."""
        return self.with_frame / self.functions if self.functions else 0.0

    @property
    def frame_pointers(self) -> bool:
        """Whether the file was built with frame pointers; even then assembly and shrink-wrapped functions have none."""
        return self.share >= 0.5


def read_prologues(fd: int) -> Prologues | None:
    """Reads the prologues of up to SAMPLED functions of an open file; returns None unless it is an x86-64 ELF file.

    The file may be hostile: all reads are bounded.
    """
    try:
        elf = ElfFile(in_file(fd))
        return _prologues(elf) if elf.header.machine == EM_X86_64 else None
    except ElfError:
        return None


def _prologues(elf: ElfFile) -> Prologues:
    starts: list[NDArray[np.uint64]] = [np.empty(0, np.uint64)]
    for section in elf.sections[:_MOST_SECTIONS]:
        if section.type in (SHT_SYMTAB, SHT_DYNSYM):
            table = elf.read(section.offset, min(section.size // SYMBOL.itemsize, _MOST_SYMBOLS) * SYMBOL.itemsize)
            starts.append(_functions(table[: len(table) // SYMBOL.itemsize * SYMBOL.itemsize]))
    all_starts = np.unique(np.concatenate(starts))
    sampled = all_starts[:: max(1, -(-len(all_starts) // SAMPLED))]
    prologues = [prologue for address in sampled.tolist() if (prologue := _prologue(elf, address))]
    with_frame = sum(any(setup in prologue for setup in _FRAME_SETUPS) for prologue in prologues)
    return Prologues(with_frame, len(prologues))


def _functions(table: bytes) -> NDArray[np.uint64]:
    """Returns the addresses of the functions that are defined in this file and large enough: uint64[n]."""
    symbols = np.frombuffer(table, SYMBOL)
    chosen = (symbols["info"] & 0xF == STT_FUNC) & (symbols["section"] != 0) & (symbols["size"] >= SMALLEST)
    addresses: NDArray[np.uint64] = symbols["value"][chosen].astype(np.uint64)
    return addresses


def _prologue(elf: ElfFile, address: int) -> bytes:
    for segment in elf.loads[:_MOST_SEGMENTS]:
        within = address - segment.address
        if segment.flags & PF_EXECUTE and 0 <= within <= segment.size - _PROLOGUE_BYTES:
            return elf.read(segment.offset + within, _PROLOGUE_BYTES)
    return b""
