"""Watches the direct calls in a driver's code, for `iaprof calibrate` to see what a call of the driver leads to.

The first byte of each call instruction becomes a breakpoint. Its signal handler, in machine code, notes the call if
its first argument is the watched one, and does what the instruction did. A byte 0xE8 counts as a call if it leads to
the beginning of a function, by the driver's unwinding information. Other bytes can do so by chance: of 64,250 in
OpenCL's 26.27.39122 one does. That instruction then does something else, which most likely ends the process.

This runs in the driver's process, which ends afterwards: breakpoints and their handler stay until then, as the
driver's other threads may reach them at any time.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.elf import PF_EXECUTE, PT_GNU_EH_FRAME, PT_LOAD, ElfFile, in_memory
from iaprof.record.calibrate.code import CALL, CALL_BYTES, calls_in
from iaprof.record.calibrate.search import Memory

WINDOW = 8192  # bytes noted from where the second argument points
_BREAKPOINT = 0xCC
_WORDS = 4  # of a note, before the window
_NOTE = _WORDS * 8 + WINDOW
_MOST_NOTES = 2_000  # of one watched call
_SORTED = b"\x01\x1b\x03\x3b"  # how .eh_frame_hdr begins if it has a table of 32-bit offsets from there
_SIGINFO, _NODEFER = 4, 0x40000000
_NO_FUNCTIONS = "it does not say where its functions begin"
_PAGE = 4096
_READ_WRITE_RUN = 7
_kept: list[Traps] = []  # breakpoints need their handler as long as the process runs
_START_OF_STACK = 28  # field in /proc/PID/stat, in which field 3 comes after the name


class TrapsError(Exception):
    """Calls cannot be watched; the text is a clause that says why."""


@dataclass(frozen=True)
class Call:
    """A call with the watched first argument."""

    site: int  # address of the instruction
    function: int  # address of the called function
    second: int  # the second argument
    window: bytes  # memory from there on, if it is on the stack


class Traps:
    """Watches all direct calls of a driver; a process may have one of these."""

    def __init__(self, memory: Memory, file: bytes, address: int) -> None:
        """Puts breakpoints into the driver's code.

        Args:
            memory: of this process.
            file: the content of the driver's file.
            address: an address in the driver.

        Raises:
            TrapsError: the beginnings of its functions are unknown, or its code cannot be changed.
        """
        code, functions = _code_and_functions(file)
        memory.refresh()
        self._base = _base(memory, address)
        sites = _calls(file, code, functions)
        self._notes = mmap.mmap(-1, _NOTE * _MOST_NOTES)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._notes))
        # Shared with the handler: where the next note goes, where the notes end, the watched argument, and the last
        # address on the stack from which a window fits.
        self._bounds = (ctypes.c_uint64 * 4)(self._start, self._start, 0, _end_of_stack(memory) - WINDOW)
        _kept.append(self)
        self._handler = mmap.mmap(-1, _PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._handler.write(_handler(ctypes.addressof(self._bounds)))
        self._handle_signals()
        self._set(code, sites)

    def _handle_signals(self) -> None:
        handler = ctypes.addressof(ctypes.c_char.from_buffer(self._handler))
        # struct sigaction of the C library: handler, 128 bytes of signals, flags, and what the library fills in.
        action = struct.pack("<Q128siiQ", handler, b"", _SIGINFO | _NODEFER, 0, 0)
        if ctypes.CDLL(None).sigaction(signal.SIGTRAP, action, None):
            raise TrapsError("its process takes no signals")

    def _set(self, code: tuple[int, int, int], sites: NDArray[np.int64]) -> None:
        _, start, length = code
        first = (self._base + start) // _PAGE * _PAGE
        after = self._base + start + length
        if ctypes.CDLL(None).mprotect(
            ctypes.c_void_p(first), ctypes.c_size_t(-(-(after - first) // _PAGE) * _PAGE), _READ_WRITE_RUN
        ):
            raise TrapsError("its code cannot be changed")
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(self._base + start))
        if (memory[sites - start] != CALL).any():
            raise TrapsError("somebody has breakpoints in it")
        memory[sites - start] = _BREAKPOINT

    def calls(self, first: int, call: Callable[[], None]) -> list[Call]:
        """Returns the calls with a first argument while `call` runs, in order.

        Raises:
            TrapsError: there are too many to note.
        """
        self._bounds[2] = first
        self._bounds[0] = self._start
        self._bounds[1] = self._start + len(self._notes)
        try:
            call()
        finally:
            self._bounds[1] = self._start
        end = self._bounds[0] - self._start
        if end > len(self._notes):
            raise TrapsError("it makes too many calls to trace")
        calls = []
        for at in range(0, end, _NOTE):
            return_address, function, second, has_window = struct.unpack_from(f"<{_WORDS}Q", self._notes, at)
            window = self._notes[at + _WORDS * 8 : at + _NOTE] if has_window else b""
            calls.append(Call(return_address - CALL_BYTES, function, second, window))
        return calls


def _code_and_functions(file: bytes) -> tuple[tuple[int, int, int], NDArray[np.int64]]:
    """Returns the segment of code (place in the file, address, bytes), and the addresses where functions begin.

    Raises:
        TrapsError: the file does not say.
    """
    try:
        return _headers(file)
    except (ValueError, struct.error):  # offsets that lead out of the file
        raise TrapsError(_NO_FUNCTIONS) from None


def _headers(file: bytes) -> tuple[tuple[int, int, int], NDArray[np.int64]]:
    code, functions = None, None
    for segment in ElfFile(in_memory(file)).segments:
        place = segment.offset
        if segment.type == PT_LOAD and segment.flags & PF_EXECUTE:
            code = (place, segment.address, segment.size)
        if segment.type == PT_GNU_EH_FRAME and file[place : place + 4] == _SORTED:
            (count,) = struct.unpack_from("<I", file, place + 8)
            functions = segment.address + np.frombuffer(file, "<i4", 2 * count, place + 12)[::2].astype(np.int64)
    if code is None or functions is None:
        raise TrapsError(_NO_FUNCTIONS)
    return code, functions


def _calls(file: bytes, code: tuple[int, int, int], functions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the addresses of the instructions that call a function."""
    place, address, length = code
    sites, called = calls_in(np.frombuffer(file, np.uint8, length, place), address)
    call_sites: NDArray[np.int64] = sites[np.isin(called, functions)]
    return call_sites


def _base(memory: Memory, address: int) -> int:
    """Returns the load address of the driver: its first mapping has the beginning of the file."""
    mapping = driver = memory.mapping(address)
    while mapping is not None and mapping.offset:
        mapping = memory.mapping(mapping.start - 1)
    if mapping is None or driver is None or mapping.file != driver.file:
        raise TrapsError("its file is not mapped as a whole")
    return mapping.start


def _end_of_stack(memory: Memory) -> int:
    with open("/proc/self/stat", "rb") as file:
        start = int(file.read().rsplit(b")", 1)[1].split()[_START_OF_STACK - 3])
    mapping = memory.mapping(start)
    if mapping is None:
        raise TrapsError("its stack is not where Linux puts it")
    return mapping.end


def _handler(bounds: int) -> bytes:
    """Returns the signal handler's code; rdx points to the registers in the kernel's struct ucontext."""
    window = b"".join(
        [
            b"\x4c\x39\xce\x72\x17",  # cmp %r9, %rsi; jb behind
            b"\x49\x3b\x73\x18\x77\x11",  # cmp 24(%r11), %rsi; ja behind
            b"\x48\xff\x47\x18",  # incq 24(%rdi)
            b"\x48\x83\xc7\x20",  # add $32, %rdi
            b"\xb9" + struct.pack("<i", WINDOW // 8) + b"\xfc\xf3\x48\xa5",  # mov $WINDOW/8, %ecx; cld; rep movsq
        ]
    )
    note = b"".join(
        [
            b"\x4c\x89\x07",  # mov %r8, (%rdi): return address
            b"\x48\x89\x4f\x08",  # mov %rcx, 8(%rdi): called function
            b"\x48\x8b\x72\x70\x48\x89\x77\x10",  # mov 112(%rdx), %rsi; mov %rsi, 16(%rdi): rsi
            b"\x48\xc7\x47\x18\x00\x00\x00\x00",  # movq $0, 24(%rdi)
            window,
        ]
    )
    noting = b"".join(
        [
            b"\xbf" + struct.pack("<i", _NOTE),  # mov $_NOTE, %edi
            b"\xf0\x49\x0f\xc1\x3b",  # lock xadd %rdi, (%r11)
            b"\x49\x3b\x7b\x08\x73" + bytes([len(note)]),  # cmp 8(%r11), %rdi; jae behind
            note,
        ]
    )
    return b"".join(
        [
            b"\x48\x8b\x82\xa8\x00\x00\x00",  # mov 168(%rdx), %rax: rip, after the breakpoint
            b"\x48\x63\x08\x4c\x8d\x40\x04\x4c\x01\xc1",  # movslq (%rax), %rcx; lea 4(%rax), %r8; add %r8, %rcx
            b"\x4c\x8b\x8a\xa0\x00\x00\x00\x49\x83\xe9\x08",  # mov 160(%rdx), %r9; sub $8, %r9: rsp
            b"\x4d\x89\x01\x4c\x89\x8a\xa0\x00\x00\x00",  # mov %r8, (%r9); mov %r9, 160(%rdx)
            b"\x48\x89\x8a\xa8\x00\x00\x00",  # mov %rcx, 168(%rdx)
            b"\x4c\x8b\x52\x68",  # mov 104(%rdx), %r10: rdi
            b"\x49\xbb" + struct.pack("<Q", bounds),  # mov bounds, %r11
            b"\x4d\x3b\x53\x10\x75" + bytes([len(noting)]),  # cmp 16(%r11), %r10; jne behind
            noting,
            b"\xc3",
        ]
    )
