"""Finds where a Level Zero driver launches kernels of its own, with which it copies and fills, for `iaprof calibrate`.

A command list is an object with a virtual table. Every launch calls one of its virtual functions with the kernel's
object as an argument; a launch of our own kernel shows which. Here a list gets a virtual table of its own, of machine
code that notes the arguments and the stack, and then jumps to the driver's function. So each copy shows which calls in
the driver lead to its kernels: there copies can be told from launches of programs.

This runs in the driver's process, which ends afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from ctypes import byref, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass

from iaprof.record.calibrate.code import CALL, CALL_BYTES
from iaprof.record.calibrate.level_zero_driver import Driver, DriverCall, DriverError, attempts
from iaprof.record.calibrate.search import MAX_BIAS, Memory, Path

MAX_SLOTS = 256  # of a virtual table; NEO 26.27's has 71
_WORD = 8
_WORDS = 384  # of the stack that are noted for a call
_NOTE = 4 * _WORD + _WORDS * _WORD
_MOST_NOTES = 64  # of one watched call
_INDIRECT_BYTES = 6  # of call *disp32(%rax); with a prefix it would be another register, which has an argument
_BY_RAX = b"\xff\x90"


@dataclass(frozen=True)
class CallNote:
    """A call of a virtual function."""

    slot: int
    first: int  # the first argument
    second: int  # the second argument
    stack_pointer: int
    stack: tuple[int, ...]  # words from there on, the return address first


@dataclass(frozen=True, order=True)
class LaunchPlace:
    """An instruction of the driver just before a launch of one of its own kernels: the arguments are set."""

    address: int  # place in the file
    kernel: int  # bytes from the second argument to the kernel's handle
    list: int  # bytes from the first argument to the command list's handle
    is_function: bool  # whether it begins a function whose only purpose is this launch


ENDS_COPYING = (
    "it ends when it copies: perhaps Intel's compiler IGC (libigc2) is missing, with which it makes these kernels"
)


class OwnKernelsError(Exception):
    """The places are unknown; the text is a clause that says why."""


class WatchedObject:
    """An object, such as a command list, whose calls of virtual functions are noted."""

    def __init__(self, memory: Memory, handle: int, bias: int) -> None:
        """Reads the object's virtual table, and makes its replacement.

        Args:
            memory: of this process.
            handle: of the object.
            bias: bytes from the object to the handle.
        """
        self._memory, self.object = memory, handle - bias
        self._table = memory.number(self.object) or 0
        self.functions = list(self._functions())
        self._notes = mmap.mmap(-1, _NOTE * _MOST_NOTES)
        notes = ctypes.addressof(ctypes.c_char.from_buffer(self._notes))
        self._bounds = (ctypes.c_uint64 * 2)(notes, notes + len(self._notes))
        self._start = notes
        stubs = [self._stub(slot, function) for slot, function in enumerate(self.functions)]
        self._code = mmap.mmap(-1, sum(map(len, stubs)) + 1, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._code.write(b"".join(stubs))
        code = ctypes.addressof(ctypes.c_char.from_buffer(self._code))
        before = [memory.number(self._table - at * _WORD) or 0 for at in (2, 1)]
        starts = [code + sum(map(len, stubs[:slot])) for slot in range(len(stubs))]
        self._words = (ctypes.c_uint64 * (2 + len(stubs)))(*before, *starts)

    def _functions(self) -> Iterator[int]:
        """Yields the functions of the virtual table, which ends with the first word that is not code of the driver."""
        first = self._memory.mapping(self._memory.number(self._table) or 0)
        for slot in range(MAX_SLOTS):
            function = self._memory.number(self._table + slot * _WORD) or 0
            mapping = self._memory.mapping(function)
            if first is None or mapping is None or mapping.file != first.file or b"x" not in mapping.rights:
                return
            yield function

    def _stub(self, slot: int, function: int) -> bytes:
        """Returns code that notes a call, if there is room, and jumps on. It uses r10 and r11, as calls may."""
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

    def notes(self, call: Callable[[], None], ends: bool = False) -> list[CallNote]:
        """Returns the calls while `call` runs; with `ends`, `call` destroys the object."""
        self._bounds[0] = self._start
        table_pointer = ctypes.c_uint64.from_address(self.object)
        table_pointer.value = ctypes.addressof(self._words) + 2 * _WORD
        try:
            call()
        finally:
            if not ends:
                table_pointer.value = self._table
        end = self._bounds[0] - self._start
        return [
            CallNote(slot, first, second, stack_pointer, tuple(stack))
            for at in range(0, end, _NOTE)
            for slot, first, second, stack_pointer, *stack in [struct.unpack_from(f"<{4 + _WORDS}Q", self._notes, at)]
        ]


@dataclass(frozen=True)
class _PassedFunction:
    """A virtual function that a program's launch calls after the one that the program calls."""

    kernel: int  # bytes from the second argument to the kernel's handle
    called_from: int
    frame: int  # words of the stack that the function called by the program takes


class OwnKernels:
    """Finds, on one device, where the driver launches kernels of its own."""

    def __init__(
        self,
        memory: Memory,
        classes: list[tuple[Path, int]],
        place: Callable[[int], int | None],
        read: Callable[[int, int], bytes],
    ) -> None:
        """Begins without lists.

        Args:
            memory: of this process.
            classes: paths from kernels' handles to a virtual table, and the table's place.
            place: returns the place in the driver's file of an address.
            read: reads so many bytes at a place of the file: in memory, code may have another program's breakpoints.
        """
        self._memory, self._classes, self._place, self._read = memory, classes, place, read
        self._lists: list[tuple[int, WatchedObject]] = []  # with the bytes from the object to the list's handle
        self._passed: dict[int, _PassedFunction] = {}  # by slot, in the order of calls
        self._launch = 0  # the function that programs call to launch
        self._notes: list[tuple[int, CallNote]] = []  # of copies, with the list's bias

    def learn(self, lists: list[int], launch: Callable[[int], None], kernel: int) -> None:
        """Finds the virtual functions that launches call.

        Args:
            lists: handles of command lists; the first is a regular one.
            launch: launches our kernel on a list.
            kernel: our kernel's handle.

        Raises:
            OwnKernelsError: launches call none.
        """
        for handle in lists:
            for bias in range(0, MAX_BIAS + 1, _WORD):
                self._memory.refresh()
                if self._place(self._memory.number(handle - bias) or 0) is None:
                    continue
                watched = WatchedObject(self._memory, handle, bias)
                notes = watched.notes(lambda handle=handle: launch(handle))  # type: ignore[misc]
                passed = [note for note in notes if 0 <= kernel - note.second <= MAX_BIAS]
                if len(passed) > 1 and passed[0].first == watched.object:
                    self._learn(watched, passed, kernel)
                    self._lists.append((bias, watched))
                    break
        if len(self._lists) < len(lists):
            raise OwnKernelsError("launches go through no virtual function of a command list")

    def _learn(self, watched: WatchedObject, passed: list[CallNote], kernel: int) -> None:
        if self._lists:
            return
        launch_note = passed[0]
        self._launch = watched.functions[launch_note.slot]
        for note in passed[1:]:
            frame = (launch_note.stack_pointer - note.stack_pointer) // _WORD
            self._passed.setdefault(note.slot, _PassedFunction(kernel - note.second, note.stack[0], frame))

    def watch(self, number: int, call: Callable[[], None]) -> None:
        """Notes what a call launches.

        Args:
            number: index of the list that it is for.
            call: calls the driver.
        """
        bias, watched = self._lists[number]
        notes = [note for note in watched.notes(call) if note.slot in self._passed]
        self._memory.refresh()
        self._notes += [(bias, note) for note in notes if self._is_kernel(note.second + self._passed[note.slot].kernel)]

    def _is_kernel(self, handle: int) -> bool:
        return any(self._place(self._memory.follow(handle, path) or 0) == place for path, place in self._classes)

    def places(self) -> set[LaunchPlace]:
        """Returns where the driver launches kernels of its own.

        Raises:
            OwnKernelsError: it launches none, or where it cannot be probed.
        """
        often = Counter(note.slot for _, note in self._notes)
        if not often:
            raise OwnKernelsError("its copies launch no kernel")
        slot = max(self._passed, key=lambda slot: often[slot])  # of equally frequent ones, the one called first
        return {self._place_of(note, bias) for bias, note in self._notes if note.slot == slot}

    def _place_of(self, note: CallNote, bias: int) -> LaunchPlace:
        passed, called_from = self._passed[note.slot], note.stack[0]
        if called_from == passed.called_from:  # from the function that programs call, which copies call directly, too
            return_address = note.stack[passed.frame] if 0 < passed.frame < _WORDS else 0
            if self._called(return_address) == self._launch:
                return self._launch_place(return_address - CALL_BYTES, 0, bias)
        elif function := self._called(called_from):
            # A function of copies only, which ended with a jump to the virtual function.
            return self._launch_place(function, passed.kernel, bias, is_function=True)
        code = self._code_before(called_from, _INDIRECT_BYTES)
        if code == _BY_RAX + struct.pack("<i", note.slot * _WORD):
            return self._launch_place(called_from - _INDIRECT_BYTES, passed.kernel, bias)
        raise OwnKernelsError("its copies launch kernels in an unknown way")

    def _code_before(self, address: int, length: int) -> bytes:
        place = self._place(address - length)
        return b"" if place is None else self._read(place, length)

    def _called(self, return_address: int) -> int:
        """Returns the function called by the direct call before a return address; 0 if there is no such call."""
        code = self._code_before(return_address, CALL_BYTES)
        if len(code) < CALL_BYTES or code[0] != CALL:
            return 0
        return return_address + int(struct.unpack("<i", code[1:])[0])

    def _launch_place(self, address: int, kernel: int, bias: int, is_function: bool = False) -> LaunchPlace:
        place = self._place(address)
        if place is None:
            raise OwnKernelsError("its copies are launched from outside the driver")
        return LaunchPlace(place, kernel, bias, is_function)


_BYTES = 1 << 20
_QUEUE, _LIST, _IMAGE, _MEMORY = 0xE, 0xF, 0x13, 0x15  # ZE_STRUCTURE_TYPE_..._DESC
_ASYNCHRONOUS = 2  # ZE_COMMAND_QUEUE_MODE_ASYNCHRONOUS
_PLANE = 2  # ZE_IMAGE_TYPE_2D
# ZE_IMAGE_FORMAT_LAYOUT_: 8, 16, 32, 16_16_16_16, 32_32_32_32, 8_8_8, 16_16_16
_LAYOUTS = (0, 1, 2, 6, 8, 43, 44)


def find_own_kernels(driver: Driver, own: OwnKernels, kernel: int) -> None:
    """Has the driver copy and fill in all ways, so that `own` finds where it launches kernels for that.

    Args:
        driver: the running driver.
        own: watches the calls.
        kernel: handle of a kernel of ours.

    Raises:
        OwnKernelsError: launches cannot be watched.
        DriverError: the driver refuses what all devices support.
    """
    copies = _Copies(driver)
    lists = [copies.regular(), copies.immediate()]
    own.learn(lists, lambda handle: copies.launch(handle, kernel), kernel)
    for number, handle in enumerate(lists):
        for call in copies.calls(handle):
            own.watch(number, call)


def _structure(kind: int, *values: int) -> ctypes.Array[c_uint32]:
    """Makes a descriptor without extensions, from 32-bit numbers."""
    return (c_uint32 * (4 + len(values)))(kind, 0, 0, 0, *values)


class _Copies:
    """Has a driver copy and fill in all ways. Structures and numbers are those of Level Zero's ze_api.h."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._memory = [c_void_p(), c_void_p()]
        for memory in self._memory:
            desc = _structure(_MEMORY, 0, 0)
            sizes = c_uint64(_BYTES), c_uint64(4096)
            driver.call("zeMemAllocDevice", driver.context, byref(desc), *sizes, driver.device, byref(memory))

    def regular(self) -> int:
        """Makes a command list; like all here, for compute queues."""
        handle = c_void_p()
        desc = _structure(_LIST, 0, 0)
        self._driver.call("zeCommandListCreate", self._driver.context, self._driver.device, byref(desc), byref(handle))
        return handle.value or 0

    def immediate(self) -> int:
        """Makes an immediate command list."""
        handle = c_void_p()
        desc = _structure(_QUEUE, 0, 0, 0, _ASYNCHRONOUS, 0, 0)
        self._driver.call(
            "zeCommandListCreateImmediate", self._driver.context, self._driver.device, byref(desc), byref(handle)
        )
        return handle.value or 0

    def launch(self, handle: int, kernel: int) -> None:
        """Launches a kernel."""
        self._driver.call("zeKernelSetGroupSize", c_void_p(kernel), 16, 1, 1)
        self._append("zeCommandListAppendLaunchKernel", handle, c_void_p(kernel), byref((c_uint32 * 3)(1, 1, 1)))()

    def _append(self, function: str, handle: int, *arguments: object) -> DriverCall:
        return lambda: self._driver.call(function, c_void_p(handle), *arguments, None, 0, None)

    def calls(self, handle: int) -> Iterator[DriverCall]:
        """Yields calls that copy and fill, on a list."""
        return attempts((*self._buffers(handle), *self._regions(handle), *self._images(handle)))

    def _buffers(self, handle: int) -> Iterator[DriverCall]:
        destination, source = (memory.value or 0 for memory in self._memory)
        pattern = byref(ctypes.create_string_buffer(b"pattern", 64))
        # Aligned and unaligned: the driver has other kernels for what is unaligned.
        for at, size in ((0, 1 << 16), (3, 100_001), (0, 60), (3, 5), (4, 1 << 12)):
            to = c_void_p(destination + at)
            yield self._append("zeCommandListAppendMemoryCopy", handle, to, c_void_p(source + at), c_uint64(size))
            for length in (1, 2, 4, 16, 64):
                sizes = c_uint64(length), c_uint64(size // length * length)
                yield self._append("zeCommandListAppendMemoryFill", handle, to, pattern, *sizes)
        places = c_void_p(destination), self._driver.context, c_void_p(source), c_uint64(4096)
        yield self._append("zeCommandListAppendMemoryCopyFromContext", handle, *places)

    def _regions(self, handle: int) -> Iterator[DriverCall]:
        destination, source = self._memory
        for depth in (1, 4):
            region = byref((c_uint32 * 6)(0, 0, 0, 100, 50, depth)), 128, 128 * 64 if depth > 1 else 0
            yield self._append("zeCommandListAppendMemoryCopyRegion", handle, destination, *region, source, *region)

    def _images(self, handle: int) -> Iterator[DriverCall]:
        memory = self._memory[0]
        for layout in _LAYOUTS:
            first, second = self._image(layout), self._image(layout)
            if not first or not second:
                continue
            yield self._append("zeCommandListAppendImageCopyFromMemory", handle, first, memory, None)
            yield self._append("zeCommandListAppendImageCopyToMemory", handle, memory, first, None)
            yield self._append("zeCommandListAppendImageCopy", handle, second, first)

    def _image(self, layout: int) -> c_void_p | None:
        image = c_void_p()
        # No flags; a plane of 64 by 64 pixels: the width has 64 bits.
        desc = _structure(_IMAGE, 0, _PLANE, layout, 0, 0, 1, 2, 3, 64, 0, 64, 1, 0, 0)
        try:
            self._driver.call("zeImageCreate", self._driver.context, self._driver.device, byref(desc), byref(image))
        except DriverError:
            return None
        return image
