"""What the code of an ELF file tells about stacks through it.

Whether its functions keep frame pointers, which of them have no caller, and which addresses no call returns to; names
are not needed for it. x86-64 only.
"""

from __future__ import annotations

import re
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
from iaprof.formats.distinct import distinct
from iaprof.formats.elf_tables import SYMBOL
from iaprof.symbols.unwind.cfi import Bytes, CallFrames, CfiError

SAMPLED = 256  # functions
SMALLEST = 64  # bytes of a function: smaller ones need no frame in any build
_PROLOGUE_BYTES = 24
_FRAME_SETUPS = (b"\x55\x48\x89\xe5", b"\x55\x48\x8b\xec")  # push %rbp; and the two encodings of mov %rsp,%rbp
_MOST_SECTIONS, _MOST_SEGMENTS = 1024, 64
_MOST_SYMBOLS = 1 << 18  # of a table

MOST_ADDRESSES = 1 << 15  # that are looked at: one second
_MOST_FUNCTION_BYTES = 1 << 14  # of a function that may end a thread; glibc's has 1 KiB
# mov $60,%r32 (the number of exit); a few instructions; syscall; jmp back, as exit does not return.
_ENDS_THREAD = re.compile(rb"[\xb8-\xbf]\x3c\x00\x00\x00.{0,24}?\x0f\x05\xeb[\x80-\xff]", re.DOTALL)

BYTES_BEFORE, BYTES_FROM = 8, 8  # the bytes before an address and from it on that have to be known
# Intel's Software Developer's Manual, volume 2: E8 is a relative call. FF with reg 2 in its ModRM byte is an indirect
# call; the ModRM and SIB bytes say how many bytes of displacement follow.
_BASE_5 = bytes(range(0x05, 0x100, 8))  # SIB bytes after which a displacement follows
_CALL = re.compile(
    rb"(?:\xe8.{4}"
    rb"|\xff(?:[\x10-\x13\x16\x17\xd0-\xd7]"
    rb"|\x14[^" + re.escape(_BASE_5) + rb"]"
    rb"|[\x50-\x53\x55-\x57]."
    rb"|\x54.{2}"
    rb"|[\x15\x90-\x93\x95-\x97].{4}"
    rb"|\x14[" + re.escape(_BASE_5) + rb"].{4}"
    rb"|\x94.{5}))\Z",
    re.DOTALL,
)
_LONGEST_CALL = 7
_SIGNAL_RETURN = bytes.fromhex("48c7c00f0000000f")  # mov $15,%rax; the syscall's first byte
_RELATIVE_CALL, _NOP = b"\xe8", b"\x90"


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
    all_starts = distinct(np.concatenate(starts))
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


def outermost(content: Bytes, addresses: NDArray[np.uint64]) -> NDArray[np.bool_] | None:
    """Tells for each address whether its function has no caller: bool[n].

    Returns None if the file has no call frame information, or for more than MOST_ADDRESSES addresses.

    Args:
        content: of the ELF file with the code.
        addresses: uint64[n], virtual addresses in the file; for a return address, that of the byte before it.
    """
    if len(addresses) > MOST_ADDRESSES:
        return None
    try:
        frames = CallFrames(content)
    except CfiError:
        return None
    if not frames.has_functions:
        return None
    ends_thread: dict[int, bool] = {}  # by the start of a function
    return np.array([_has_no_caller(frames, address, ends_thread) for address in addresses.tolist()], bool)


def _has_no_caller(frames: CallFrames, address: int, ends_thread: dict[int, bool]) -> bool:
    try:
        function = frames.function(address)
        row = frames.row_in(function, address)
    except CfiError:
        return False
    if function is None or (row is not None and row.is_outermost):
        return row is not None
    if function.start not in ends_thread:
        code = frames.at(function.start, function.size) if function.size <= _MOST_FUNCTION_BYTES else b""
        ends_thread[function.start] = _ENDS_THREAD.search(code) is not None
    return ends_thread[function.start]


def ends_a_call(before: bytes) -> bool:
    """Tells whether the bytes before an address end with a call instruction, relative or indirect, of any length."""
    return any(_CALL.match(before, at) for at in range(max(len(before) - _LONGEST_CALL, 0), len(before) - 1))


def begins_goroutine(before: bytes, after: bytes) -> bool:
    """Tells whether a goroutine begins there: Go pushes the address after runtime.goexit's first nop on its stack."""
    return before.endswith(_NOP) and after.startswith(_RELATIVE_CALL)


def can_be_returned_to(before: bytes, after: bytes) -> bool:
    """Tells whether a call ends at an address, or code returns there without a call.

    Args:
        before: the BYTES_BEFORE bytes before the address.
        after: the BYTES_FROM bytes from it on.
    """
    return ends_a_call(before) or begins_goroutine(before, after) or after.startswith(_SIGNAL_RETURN)


def without_call(elf: ElfFile, addresses: NDArray[np.uint64]) -> NDArray[np.bool_] | None:
    """Tells for each address whether no call ends after it: bool[n]; None for more than MOST_ADDRESSES addresses.

    Args:
        elf: the file with the code.
        addresses: uint64[n], virtual addresses in the file; for a return address, that of the byte before it.
    """
    if len(addresses) > MOST_ADDRESSES:
        return None
    return np.array([_is_without(elf, address + 1) for address in addresses.tolist()], bool)


def _is_without(elf: ElfFile, address: int) -> bool:
    around = elf.at(max(address - BYTES_BEFORE, 0), BYTES_BEFORE + BYTES_FROM)
    before, after = around[:BYTES_BEFORE], around[BYTES_BEFORE:]
    return any(around) and not can_be_returned_to(before, after)
