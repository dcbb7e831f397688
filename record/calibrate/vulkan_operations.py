"""Finds, for `iaprof calibrate`, where Mesa's Vulkan driver copies, blits and clears with kernels of its own.

All of these are operations of its blorp, which has a table of functions in the device, behind the device's address: one
takes an operation, and writes its commands; another one gives the GPU a kernel that was compiled. The process puts
functions of its own into that table, which note the arguments and call the driver's. The truth is what the driver then
writes: commands with the kernel's start, and its code in the GPU's memory. Nothing is submitted.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

from iaprof.record.calibrate.level_zero_driver import DriverError
from iaprof.record.calibrate.search import Memory
from iaprof.record.calibrate.vulkan_driver import Device

_WORD = 8
_DEVICE_BYTES = 0x20000  # that are searched for the table
_FIRST_FUNCTION = range(2, 9)  # words from the device's address to the table's first function
_FEWEST_FUNCTIONS, _MOST_FUNCTIONS = 3, 12
_ARGUMENTS = 10  # of a function that are noted, of which four are on the stack
_OF_CODE, _OF_SIZE, _OF_KERNEL, _OF_DATA = 4, 5, 8, 9  # arguments of the function that gives the GPU a kernel
_OPERATION = 0x1000  # bytes of an operation that are searched
_COMPILED = 0x100  # of what the compiler says of a kernel
_MOST_KERNEL_BYTES = 1 << 20
_MOST_KINDS = 31
_FEWEST_KERNELS = 3  # that the operations have to have together
_UNKNOWN = "its copies and clears are done in a way that iaprof does not know"
_Function = ctypes.CFUNCTYPE(c_uint64, *[c_uint64] * _ARGUMENTS)


@dataclass(frozen=True)
class _Call:
    """A call of a function in the table, when it began."""

    number: int  # of the function in the table
    arguments: Sequence[int]
    first: bytes  # what the first argument points to
    second: bytes
    code: bytes  # if it may be a kernel that the GPU is given


@dataclass
class _Operation:
    """What the driver did for one call of a program."""

    kind: str
    commands: int
    kernels: set[int]  # starts of kernels, in the commands: the kernel's own, and perhaps of variants of it
    calls: list[_Call]
    uploads: list[tuple[_Call, int, int]] = field(default_factory=list)  # with the kernel's start, and its data


def find_operations(
    device: Device,
    memory: Memory,
    kernels_of: Callable[[int, Callable[[int], None]], set[int]],
    code_at: Callable[[int], int],
    place: Callable[[int], int | None],
) -> dict[str, Any]:
    """Finds what VulkanAnswer.operations has.

    Args:
        device: the device.
        memory: of this process.
        kernels_of: has a function write commands into a command buffer; returns the starts of the kernels in them.
        code_at: returns where this process has the code of a kernel, given its start, in the GPU's memory.
        place: returns the place in the driver's file of an address.

    Raises:
        DriverError: they cannot be proved.
    """
    calls = device.operations()
    for table, first, functions in _tables(device, memory):
        with _noted(memory, table, first, functions) as noted:
            if not list(_of_table(table, _do(device, memory, kernels_of, noted, *calls[0]))):
                continue
            done = [_do(device, memory, kernels_of, noted, *call) for call in calls]
            return _answer(memory, code_at, place, table, first, functions, done)
    raise DriverError(_UNKNOWN)


def _tables(device: Device, memory: Memory) -> Iterator[tuple[int, int, Sequence[int]]]:
    """Yields what may be the table: its address, the offset of its first function, and its functions."""
    memory.refresh()
    content = b""
    while len(content) < _DEVICE_BYTES and (more := memory.read(device.handle + len(content), 0x1000)):
        content += more
    words = struct.unpack_from(f"<{len(content) // _WORD}Q", content)
    driver = memory.mapping(device.function("vkCmdDispatch"))

    def is_function(word: int) -> bool:
        mapping = memory.mapping(word)
        return bool(mapping and driver and mapping.file == driver.file and b"x" in mapping.rights)

    for at, word in enumerate(words[: -_MOST_FUNCTIONS - _FIRST_FUNCTION.stop]):
        if word != device.handle:
            continue
        first = next((number for number in _FIRST_FUNCTION if is_function(words[at + number])), None)
        if first is None:
            continue
        functions = []
        for candidate in words[at + first : at + first + _MOST_FUNCTIONS]:
            if not is_function(candidate):
                break
            functions.append(candidate)
        if len(functions) >= _FEWEST_FUNCTIONS:
            yield device.handle + _WORD * at, _WORD * first, functions


@contextmanager
def _noted(memory: Memory, table: int, first: int, functions: Sequence[int]) -> Iterator[list[_Call]]:
    """Has the calls of the functions in a table noted."""
    calls: list[_Call] = []

    def watching(number: int, function: int) -> Any:
        original = _Function(function)

        def note(*arguments: int) -> int:
            size = arguments[_OF_SIZE] & 0xFFFFFFFF
            code = memory.read(arguments[_OF_CODE], size) if size <= _MOST_KERNEL_BYTES else b""
            contents = (memory.read(arguments[0], 2 * _WORD), memory.read(arguments[1], _OPERATION))
            calls.append(_Call(number, arguments, *contents, code))
            result: int = original(*arguments)
            return result

        return _Function(note)

    ours = [watching(number, function) for number, function in enumerate(functions)]
    places = range(table + first, table + first + _WORD * len(functions), _WORD)
    try:
        for place, function in zip(places, ours, strict=True):
            c_uint64.from_address(place).value = ctypes.cast(function, c_void_p).value or 0
        yield calls
    finally:
        for place, original in zip(places, functions, strict=True):
            c_uint64.from_address(place).value = original


def _do(
    device: Device,
    memory: Memory,
    kernels_of: Callable[[int, Callable[[int], None]], set[int]],
    noted: list[_Call],
    kind: str,
    function: str,
    arguments: Sequence[int],
) -> _Operation:
    commands = device.commands()
    device.begin(commands)
    noted.clear()
    kernels = kernels_of(commands, lambda commands: device.record(function, commands, arguments))
    operation = _Operation(kind, commands, kernels, list(noted))
    for call in noted:
        start, data = (memory.read(call.arguments[number], _WORD) for number in (_OF_KERNEL, _OF_DATA))
        if len(start) == len(data) == _WORD:
            operation.uploads.append((call, _u32(start, 0), _u64(data, 0)))
    return operation


def _answer(
    memory: Memory,
    code_at: Callable[[int], int],
    place: Callable[[int], int | None],
    table: int,
    first: int,
    functions: Sequence[int],
    done: Sequence[_Operation],
) -> dict[str, Any]:
    number, kernel, executing = _executing(table, len(functions), done)
    pairs = list(zip(executing, done, strict=True))
    uploads = _uploads(memory, code_at, kernel, pairs)
    datas = [
        at
        for at in range(0, _OPERATION, _WORD)
        if all(_u64(executing[which].second, at) == data for which, _, _, data in uploads)
    ]
    contents = [(memory.read(data, _COMPILED), len(call.code)) for _, call, _, data in uploads]
    sizes = [
        at
        for at in range(0, min(len(content) for content, _ in contents) - 3, 4)
        if all(_u32(content, at) == size for content, size in contents)
    ]
    kinds = [at for at in range(0, _OPERATION, 4) if _tells_kinds(at, pairs)]
    if len(datas) != 1 or not sizes or not kinds or len({size for _, size in contents}) < _FEWEST_KERNELS:
        raise DriverError("its operations do not lead to what is known of their kernels")
    names = {_u32(call.second, kinds[0]): operation.kind for call, operation in pairs}
    of_upload = place(functions[uploads[0][1].number])
    of_operation = place(functions[executing[0].number])
    if of_operation is None or of_upload is None:
        raise DriverError(_UNKNOWN)
    return {
        "function": first + _WORD * number,
        "kernel": kernel,
        "data": datas[0],
        "size": sizes[0],
        "kind": kinds[0],
        "names": sorted(names.items()),
        "places": [of_operation, of_upload],
    }


def _of_table(table: int, operation: _Operation) -> Iterator[_Call]:
    """Yields the calls that get the table and the command buffer."""
    batch = struct.pack("<QQ", table, operation.commands)
    yield from (call for call in operation.calls if call.first == batch)


def _executing(table: int, functions: int, done: Sequence[_Operation]) -> tuple[int, int, list[_Call]]:
    """Returns which function does operations, the offset in these of the kernel's start, and its calls."""
    found = []
    for number in range(functions):
        calls = [[call for call in _of_table(table, of) if call.number == number] for of in done]
        if any(len(each) != 1 or len(each[0].second) < _OPERATION for each in calls):
            continue
        executing = [each[0] for each in calls]
        for at in range(0, _OPERATION, 4):
            starts = [_u32(call.second, at) for call in executing]
            if (
                all(start in of.kernels for start, of in zip(starts, done, strict=True))
                and len(set(starts)) > _FEWEST_KERNELS
            ):
                found.append((number, at, executing))
    if len(found) != 1:
        raise DriverError("its operations do not lead to their kernels")
    return found[0]


def _uploads(
    memory: Memory, code_at: Callable[[int], int], kernel: int, pairs: Sequence[tuple[_Call, _Operation]]
) -> list[tuple[int, _Call, int, int]]:
    """Returns the calls that gave the GPU the kernels of operations: the operation's number, start and data of each."""
    found = [
        (number, call, start, data)
        for number, (executing, operation) in enumerate(pairs)
        for call, start, data in operation.uploads
        if call.code
        and start == _u32(executing.second, kernel)
        and memory.read(code_at(start), len(call.code)) == call.code
    ]
    if len({call.number for _, call, _, _ in found}) != 1 or len({start for _, _, start, _ in found}) < _FEWEST_KERNELS:
        raise DriverError("it is not known how its own kernels come to the GPU")
    return found


def _tells_kinds(at: int, pairs: Sequence[tuple[_Call, _Operation]]) -> bool:
    """Whether the numbers at an offset of operations tell copies, blits and clears apart."""
    kinds: dict[int, set[str]] = {}
    for call, operation in pairs:
        kinds.setdefault(_u32(call.second, at), set()).add(operation.kind)
    of_each = [kind for each in kinds.values() for kind in each]
    return (
        max(kinds) < _MOST_KINDS
        and all(len(each) == 1 for each in kinds.values())
        and of_each.count("copy") == of_each.count("blit") == 1
    )


def _u32(content: bytes, at: int) -> int:
    return int.from_bytes(content[at : at + 4], "little")


def _u64(content: bytes, at: int) -> int:
    return int.from_bytes(content[at : at + 8], "little")
