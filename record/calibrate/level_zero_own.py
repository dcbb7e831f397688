"""Where a driver launches the kernels of its own with which it copies and fills; `iaprof calibrate` finds it.

A command list is an object with a virtual table. Whatever is launched passes by one of its virtual functions, which a
kernel of ours shows: it is called with that kernel's object. Here a list gets a table of its own, of pieces of code
that note the arguments and the stack and go on with the driver's. So each copy shows which calls in the driver lead to
its kernels, and those are where copies can be told from launches of programs.

This runs in the driver's process, which ends afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from iaprof.record.calibrate.calls import CALL, CALL_BYTES
from iaprof.record.calibrate.search import MAX_BIAS, Memory, Path

MAX_SLOTS = 256  # of a virtual table; NEO 26.27 has 71
_WORD = 8
_WORDS = 384  # of the stack that are noted
_NOTE = 4 * _WORD + _WORDS * _WORD
_MOST_NOTES = 64  # of one call
_INDIRECT_BYTES = 6  # call *disp32(%rax); with a prefix it would be another register, which has an argument
_BY_RAX = b"\xff\x90"


@dataclass(frozen=True)
class Note:
    """A call of a virtual function."""

    slot: int
    first: int  # argument
    second: int
    at: int  # stack pointer
    stack: tuple[int, ...]  # there: from the return address on


@dataclass(frozen=True, order=True)
class Place:
    """An instruction of the driver behind which one of its own kernels is launched: it has the arguments already."""

    address: int  # in the file
    kernel: int  # bytes from the second argument to the kernel's handle
    list: int  # bytes from the first argument to the command list's handle
    is_function: bool  # a whole function is for that, and this its beginning


ENDS_COPYING = (
    "it ends when it copies: perhaps Intel's compiler IGC (libigc2) is missing, with which it makes these kernels"
)


class OwnKernelsError(Exception):
    """It cannot be found out; the text is a clause that says why."""


class Watched:
    """A command list of which virtual functions that are called are noted."""

    def __init__(self, memory: Memory, handle: int, bias: int) -> None:
        """Looks at its table.

        Args:
            memory: of this process.
            handle: of the list.
            bias: bytes that it lies behind the list's object.
        """
        self._memory, self.object = memory, handle - bias
        self._table = memory.number(self.object) or 0
        self.functions = list(self._functions())
        self._notes = mmap.mmap(-1, _NOTE * _MOST_NOTES)
        notes = ctypes.addressof(ctypes.c_char.from_buffer(self._notes))
        self._bounds = (ctypes.c_uint64 * 2)(notes, notes + len(self._notes))
        self._start = notes
        pieces = [self._piece(slot, function) for slot, function in enumerate(self.functions)]
        self._code = mmap.mmap(-1, sum(map(len, pieces)) + 1, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._code.write(b"".join(pieces))
        code = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
        before = [memory.number(self._table - at * _WORD) or 0 for at in (2, 1)]
        starts = [code + sum(map(len, pieces[:slot])) for slot in range(len(pieces))]
        self._words = (ctypes.c_uint64 * (2 + len(pieces)))(*before, *starts)

    def _functions(self) -> Iterator[int]:
        """The functions in its table, which end with what is no code of the driver."""
        first = self._memory.mapping(self._memory.number(self._table) or 0)
        for slot in range(MAX_SLOTS):
            function = self._memory.number(self._table + slot * _WORD) or 0
            mapping = self._memory.mapping(function)
            if first is None or mapping is None or mapping.file != first.file or b"x" not in mapping.rights:
                return
            yield function

    def _piece(self, slot: int, function: int) -> bytes:
        """Notes the call, where there is room, and goes on with the function. r10, r11: nobody expects to keep them."""
        note = b"".join(
            [
                b"\x49\xc7\x02" + struct.pack("<i", slot),  # movq slot, (%r10)
                b"\x49\x89\x7a\x08\x49\x89\x72\x10\x49\x89\x62\x18",  # mov %rdi, 8(%r10); %rsi, 16; %rsp, 24
                b"\x56\x57\x51",  # push %rsi; push %rdi; push %rcx
                b"\x48\x8d\x74\x24\x18\x49\x8d\x7a\x20",  # lea 24(%rsp), %rsi; lea 32(%r10), %rdi
                b"\xb9" + struct.pack("<i", _WORDS) + b"\xfc\xf3\x48\xa5",  # mov _WORDS, %ecx; cld; rep movsq
                b"\x59\x5f\x5e",  # pop %rcx; pop %rdi; pop %rsi
                b"\x49\x81\xc2" + struct.pack("<i", _NOTE) + b"\x4d\x89\x13",  # add _NOTE, %r10; mov %r10, (%r11)
            ]
        )
        return b"".join(
            [
                b"\x49\xbb" + struct.pack("<Q", ctypes.addressof(self._bounds)),  # mov bounds, %r11
                b"\x4d\x8b\x13\x4d\x3b\x53\x08\x73" + bytes([len(note)]),  # mov (%r11), %r10; cmp 8(%r11), %r10; jae
                note,
                b"\x49\xbb" + struct.pack("<Q", function) + b"\x41\xff\xe3",  # mov function, %r11; jmp *%r11
            ]
        )

    def notes(self, call: Callable[[], None], ends: bool = False) -> list[Note]:
        """What is called while `call` runs, which may end the object."""
        self._bounds[0] = self._start
        pointer = ctypes.c_uint64.from_address(self.object)
        pointer.value = ctypes.addressof(self._words) + 2 * _WORD
        try:
            call()
        finally:
            if not ends:
                pointer.value = self._table
        end = self._bounds[0] - self._start
        return [
            Note(slot, first, second, pointer, tuple(stack))
            for at in range(0, end, _NOTE)
            for slot, first, second, pointer, *stack in [struct.unpack_from(f"<{4 + _WORDS}Q", self._notes, at)]
        ]


@dataclass(frozen=True)
class _Passed:
    """A virtual function that a program's launch passes by behind the one that the program calls."""

    kernel: int  # bytes from its second argument to the kernel's handle
    called_from: int
    frame: int  # words of the stack that the program's function takes


class OwnKernels:
    """What is found out of one device."""

    def __init__(
        self,
        memory: Memory,
        classes: list[tuple[Path, int]],
        place: Callable[[int], int | None],
        read: Callable[[int, int], bytes],
    ) -> None:
        """Begins with nothing.

        Args:
            memory: of this process.
            classes: paths from kernels' handles that lead to a virtual table, and its place.
            place: says where in the driver's file an address lies.
            read: gives so many bytes of the file: in memory, somebody's breakpoints may be in the code.
        """
        self._memory, self._classes, self._place, self._read = memory, classes, place, read
        self._lists: list[tuple[int, Watched]] = []
        self._passed: dict[int, _Passed] = {}  # by slot, in order
        self._launch = 0  # the function that a program calls
        self._notes: list[tuple[int, Note]] = []  # of copies, with the list's bias

    def learn(self, lists: list[int], launch: Callable[[int], None], kernel: int) -> None:
        """Finds out by which virtual functions launches pass.

        Args:
            lists: handles of command lists; the first is a regular one.
            launch: launches a kernel of ours on such a list.
            kernel: that kernel's handle.

        Raises:
            OwnKernelsError: by none.
        """
        for handle in lists:
            for bias in range(0, MAX_BIAS + 1, _WORD):
                self._memory.look_again()
                if self._place(self._memory.number(handle - bias) or 0) is None:
                    continue
                watched = Watched(self._memory, handle, bias)
                notes = watched.notes(lambda handle=handle: launch(handle))  # type: ignore[misc]
                passed = [note for note in notes if 0 <= kernel - note.second <= MAX_BIAS]
                if len(passed) > 1 and passed[0].first == watched.object:
                    self._learn(watched, passed, kernel)
                    self._lists.append((bias, watched))
                    break
        if len(self._lists) < len(lists):
            raise OwnKernelsError("launches pass by no virtual function of a command list")

    def _learn(self, watched: Watched, passed: list[Note], kernel: int) -> None:
        if self._lists:
            return
        by = passed[0]
        self._launch = watched.functions[by.slot]
        for note in passed[1:]:
            frame = (by.at - note.at) // _WORD
            self._passed.setdefault(note.slot, _Passed(kernel - note.second, note.stack[0], frame))

    def watch(self, number: int, call: Callable[[], None]) -> None:
        """Sees what a call launches.

        Args:
            number: which of the lists it is for.
            call: calls the driver.
        """
        bias, watched = self._lists[number]
        notes = [note for note in watched.notes(call) if note.slot in self._passed]
        self._memory.look_again()
        self._notes += [(bias, note) for note in notes if self._is_kernel(note.second + self._passed[note.slot].kernel)]

    def _is_kernel(self, handle: int) -> bool:
        return any(self._place(self._memory.follow(handle, path) or 0) == place for path, place in self._classes)

    def places(self) -> set[Place]:
        """Where the driver launches kernels of its own.

        Raises:
            OwnKernelsError: nowhere, or where it cannot be probed.
        """
        often = Counter(note.slot for _, note in self._notes)
        if not often:
            raise OwnKernelsError("its copies launch no kernel")
        slot = max(self._passed, key=lambda slot: often[slot])  # of several the first that is passed by
        return {self._place_of(note, bias) for bias, note in self._notes if note.slot == slot}

    def _place_of(self, note: Note, bias: int) -> Place:
        passed, called_from = self._passed[note.slot], note.stack[0]
        if called_from == passed.called_from:  # in the function that programs call, which copies call directly
            behind = note.stack[passed.frame] if 0 < passed.frame < _WORDS else 0
            if self._called(behind) == self._launch:
                return self._checked(behind - CALL_BYTES, 0, bias)
        elif function := self._called(called_from):
            # A function that only copies use, and that went on with the virtual one as its last deed.
            return self._checked(function, passed.kernel, bias, is_function=True)
        code = self._code_before(called_from, _INDIRECT_BYTES)
        if code == _BY_RAX + struct.pack("<i", note.slot * _WORD):
            return self._checked(called_from - _INDIRECT_BYTES, passed.kernel, bias)
        raise OwnKernelsError("its copies launch kernels in a way that is not known")

    def _code_before(self, address: int, length: int) -> bytes:
        place = self._place(address - length)
        return b"" if place is None else self._read(place, length)

    def _called(self, behind: int) -> int:
        """Which function the call before an address calls; 0 where there is no such call."""
        code = self._code_before(behind, CALL_BYTES)
        if len(code) < CALL_BYTES or code[0] != CALL:
            return 0
        return behind + int(struct.unpack("<i", code[1:])[0])

    def _checked(self, address: int, kernel: int, bias: int, is_function: bool = False) -> Place:
        place = self._place(address)
        if place is None:
            raise OwnKernelsError("its copies are launched from outside the driver")
        return Place(place, kernel, bias, is_function)
