"""Packs driver layouts and their entries for the maps of bpf/c/handles.c and waits.c."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from iaprof.bpf.driver_layout import (
    ARGUMENTS,
    MAX_GPUS,
    MOST_NAME_BYTES,
    OF_DRAWS,
    OWN_LAUNCHES,
    Action,
    Dispatch,
    Entry,
    Field,
    Layout,
    LayoutError,
    Operations,
)
from iaprof.bpf.structs import (
    ENTRY,
    LAYOUT,
    MAX_CLASSES,
    MAX_OPERATIONS,
    MAX_STEPS,
    WAIT_ENTRY,
    AddressValue,
    DescriptionValue,
    SizeKind,
    pack,
)
from iaprof.formats.header.waits import FUNCTIONS
from iaprof.formats.wire.launches import (
    LaunchFlags,
    ListEvent,
    transfer_function_number,
)

_NO_STEP = (0, 0, 0, 0, 0)
_FIRST_POINTER = max(DescriptionValue) + 1  # index of the first value for a pointer in the middle of a path
_LIST_EVENTS = {
    Action.LIST_CLOSED: ListEvent.CLOSE,
    Action.LIST_RESET: ListEvent.RESET,
    Action.LIST_GONE: ListEvent.DESTROY,
    Action.INCLUDE: ListEvent.INCLUDE,
}
_SIZE_KINDS = {
    Action.TRANSFER: SizeKind.BYTES,
    Action.TRANSFER_REGION: SizeKind.REGION,
    Action.TRANSFER_SIZES: SizeKind.SIZES,
}


def packed_layout(layout: Layout) -> bytes:
    """Packs a layout as LAYOUT.

    Raises:
        LayoutError: its paths have too many steps.
    """
    first, more = (*layout.address, layout.size if layout.window else None)[:2]
    for_address = {
        AddressValue.CLASS: layout.kernel_class,
        AddressValue.ADDRESS: first,
        AddressValue.ADDRESS_MORE: more,
    }
    start_of_memory, bytes_of_memory = layout.allocation or (None, None)
    for_description = {
        DescriptionValue.BINARY: layout.binary,
        DescriptionValue.BINARY_BYTES: layout.binary_size,
        DescriptionValue.CODE: layout.code,
        DescriptionValue.CODE_BYTES: layout.size,
        DescriptionValue.NAME: layout.name,
        DescriptionValue.ALLOCATION: start_of_memory,
        DescriptionValue.ALLOCATION_BYTES: bytes_of_memory,
        DescriptionValue.MODULE: layout.module,
    }
    step_lists = [_steps(for_address), _steps(for_description)]
    if max(map(len, step_lists)) > MAX_STEPS:
        raise LayoutError(f"its paths have more than {MAX_STEPS} steps together")
    classes = (layout.classes * MAX_CLASSES)[:MAX_CLASSES]
    steps = [
        number for listed in step_lists for step in (listed + [_NO_STEP] * MAX_STEPS)[:MAX_STEPS] for number in step
    ]
    start, end = layout.code_range or (0, 0)
    dispatch = layout.dispatch or Dispatch(0, 0, 0, (0, 0))
    of_dispatch = (dispatch.first, dispatch.many, dispatch.size, *dispatch.kernel)
    gpu, mask = (layout.gpu.path, MAX_GPUS - 1) if layout.gpu else ((0, 0, 0), 0)
    code = start, max(0, end - start)
    bound = (*layout.bound, 0, 0)[:2]
    drawn = (*layout.drawn, 0, 0)[:2]
    of_shaders = (*(layout.window or (0, 0)), *bound, len(layout.bound), layout.pipeline)
    of_draws = (*drawn, len(layout.drawn), *layout.stages, *layout.kind, layout.simd, layout.stage)
    numbers = (*classes, *map(len, step_lists), *steps, *code, *of_dispatch, *gpu, *of_shaders, *of_draws)
    offsets, names = _of_operations(layout.operations)
    return pack(LAYOUT, *numbers, *offsets, layout.stage_count, *names, mask)


_UNKNOWN_OPERATION = "blorp"


def _of_operations(operations: Operations | None) -> tuple[tuple[int, ...], list[int]]:
    """Returns the offsets, and the names as two numbers each."""
    of = operations or Operations(0, 0, 0, 0, 0, ())
    known = dict(of.names)
    texts = [known.get(number, _UNKNOWN_OPERATION).encode() for number in range(MAX_OPERATIONS)]
    names = [word for text in texts for word in struct.unpack("<2Q", text.ljust(MOST_NAME_BYTES, b"\0"))]
    return (of.function, of.kernel, of.data, of.size, of.kind), names


def _steps(
    fields: Mapping[AddressValue, Field | None] | Mapping[DescriptionValue, Field | None],
) -> list[tuple[int, ...]]:
    """Returns STEPs that lead from a handle to the fields' values; common beginnings of paths are followed once."""
    numbered = ((field, number) for number, field in fields.items() if field)
    paths = sorted((tuple(field.steps()), field.bits, number) for field, number in numbered)
    steps: list[tuple[int, ...]] = []
    held: list[tuple[int, int]] = []  # the path to the pointers that the values from _FIRST_POINTER on hold
    for path, bits, number in paths:
        *before, (last, per_gpu) = path
        while held != before[: len(held)]:
            held.pop()
        for offset, more in before[len(held) :]:
            steps.append((offset, 8, _FIRST_POINTER + len(held) - 1 if held else 0, _FIRST_POINTER + len(held), more))
            held.append((offset, more))
        steps.append((last, bits // 8, _FIRST_POINTER + len(held) - 1 if held else 0, number, per_gpu))
    return steps


def packed_entry(layout: Layout | None, entry: Entry, index: int) -> bytes:
    """Packs an entry as ENTRY; `index` is that of its layout, MAX_LAYOUTS if it has none."""
    offset = entry.offset - (layout.module_bias if layout and entry.action is Action.MODULE_GONE else 0)
    is_array = entry.count is not None
    registers = ARGUMENTS[entry.handle], ARGUMENTS[entry.count or 0]
    flags = LaunchFlags.OWN if entry.action in (*OWN_LAUNCHES, Action.OPERATION) else 0
    transfer, size_kind = transfer_function_number(entry.name), _SIZE_KINDS.get(entry.action, SizeKind.NO_NUMBER)
    event = _LIST_EVENTS.get(entry.action, ListEvent.EXECUTE)
    in_list = bool(layout and layout.has_lists)
    numbers = (*registers, is_array, flags, offset, transfer, size_kind, entry.list_offset, in_list, event)
    stages = layout.stage_count if layout and entry.action in OF_DRAWS else 0
    return pack(ENTRY, entry.address, index, *numbers, entry.nested, stages)


TIMEOUTS = {
    "zeEventHostSynchronize": 1,
    "zeCommandQueueSynchronize": 1,
    "zeFenceHostSynchronize": 1,
    "zeCommandListHostSynchronize": 1,
}
"""By name: number of the argument that is the timeout, counted from 0; functions not listed wait without a limit."""
_WITH_ARRAYS = ("clWaitForEvents",)  # functions that take an array of handles
_NUMBERS = {name: number for number, name in FUNCTIONS.items()}


def packed_wait_entry(entry: Entry) -> bytes:
    """Packs an entry as WAIT_ENTRY.

    Raises:
        LayoutError: this version does not know the function.
    """
    number = _NUMBERS.get(entry.name)
    if number is None:
        raise LayoutError(f"this iaprof does not know how to record waits in {entry.name}")
    timeout = ARGUMENTS[TIMEOUTS[entry.name]] if entry.name in TIMEOUTS else 0
    is_array = entry.name in _WITH_ARRAYS
    return pack(WAIT_ENTRY, entry.address, number, ARGUMENTS[entry.handle], timeout, is_array)
