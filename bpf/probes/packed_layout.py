"""Driver layouts and their entries, as bpf/c/handles.c reads them from its maps."""

from __future__ import annotations

from collections.abc import Mapping

from iaprof.bpf.probes.driver_layout import (
    ARGUMENTS,
    MAX_CLASSES,
    MAX_GPUS,
    OWN_LAUNCHES,
    Action,
    Dispatch,
    Entry,
    Field,
    Layout,
    LayoutError,
)
from iaprof.bpf.structs import ENTRY, LAYOUT, MAX_STEPS, Unit, What, Where, pack
from iaprof.formats.header.transfers import function_number
from iaprof.formats.wire.launches import (
    LaunchFlags,
    ListEvent,
)

_NO_STEP = (0, 0, 0, 0, 0)
_ON_THE_WAY = max(What) + 1  # the first of the values that hold what lies on the way
_LIST_EVENTS = {
    Action.LIST_CLOSED: ListEvent.CLOSE,
    Action.LIST_RESET: ListEvent.RESET,
    Action.LIST_GONE: ListEvent.DESTROY,
}
_UNITS = {
    Action.TRANSFER: Unit.BYTES,
    Action.TRANSFER_REGION: Unit.REGION,
    Action.TRANSFER_SIZES: Unit.SIZES,
}


def packed_layout(layout: Layout) -> bytes:
    """LAYOUT; LayoutError where its programs have no room for all of it."""
    first, more = (*layout.address, None)[:2]
    where = {Where.CLASS: layout.kernel_class, Where.ADDRESS: first, Where.ADDRESS_MORE: more}
    start_of_memory, bytes_of_memory = layout.allocation
    what = {
        What.BINARY: layout.binary,
        What.BINARY_BYTES: layout.binary_size,
        What.CODE: layout.code,
        What.CODE_BYTES: layout.size,
        What.NAME: layout.name,
        What.ALLOCATION: start_of_memory,
        What.ALLOCATION_BYTES: bytes_of_memory,
        What.MODULE: layout.module,
    }
    scripts = [_steps(where), _steps(what)]
    if max(map(len, scripts)) > MAX_STEPS:
        raise LayoutError(f"its paths have more than {MAX_STEPS} steps together")
    classes = (layout.classes * MAX_CLASSES)[:MAX_CLASSES]
    steps = [number for script in scripts for step in (script + [_NO_STEP] * MAX_STEPS)[:MAX_STEPS] for number in step]
    start, end = layout.code_range or (0, 0)
    dispatch = layout.dispatch or Dispatch(0, 0, 0, (0, 0))
    of_dispatch = (dispatch.first, dispatch.many, dispatch.size, *dispatch.kernel)
    gpu, mask = (layout.gpu.path, MAX_GPUS - 1) if layout.gpu else ((0, 0, 0), 0)
    code = start, max(0, end - start)
    return pack(LAYOUT, *classes, *map(len, scripts), *steps, *code, *of_dispatch, *gpu, mask)


def _steps(fields: Mapping[Where, Field | None] | Mapping[What, Field | None]) -> list[tuple[int, ...]]:
    """STEPs that lead from a handle to values by their numbers, and walk shared ways once."""
    numbered = ((field, number) for number, field in fields.items() if field)
    ways = sorted((tuple(field.steps()), field.bits, number) for field, number in numbered)
    steps: list[tuple[int, ...]] = []
    way: list[tuple[int, int]] = []  # of what the values for the way hold now
    for path, bits, number in ways:
        *before, (last, per_gpu) = path
        while way != before[: len(way)]:
            way.pop()
        for offset, more in before[len(way) :]:
            steps.append((offset, 8, _ON_THE_WAY + len(way) - 1 if way else 0, _ON_THE_WAY + len(way), more))
            way.append((offset, more))
        steps.append((last, bits // 8, _ON_THE_WAY + len(way) - 1 if way else 0, number, per_gpu))
    return steps


def packed_entry(layout: Layout | None, entry: Entry, index: int) -> bytes:
    """ENTRY, for the layout with this index; MAX_LAYOUTS for none."""
    offset = entry.offset - (layout.module_bias if layout and entry.action is Action.MODULE_GONE else 0)
    is_array = entry.count is not None
    registers = ARGUMENTS[entry.handle], ARGUMENTS[entry.count or 0]
    flags = LaunchFlags.OWN if entry.action in OWN_LAUNCHES else 0
    transfer, unit = function_number(entry.name), _UNITS.get(entry.action, Unit.NO_NUMBER)
    event = _LIST_EVENTS.get(entry.action, ListEvent.EXECUTE)
    in_list = bool(layout and layout.has_lists)
    numbers = (*registers, is_array, flags, offset, transfer, unit, entry.list_offset, in_list, event)
    return pack(ENTRY, entry.address, index, *numbers, entry.nested)
