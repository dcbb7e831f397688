"""Makes the layout of a Level Zero driver from its processes' answers to `iaprof calibrate`."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iaprof.bpf.driver_layout import TRANSFERS, Action, Entry, Field, Layout
from iaprof.bpf.probes.functions import LEVEL_ZERO_TRANSFERS, LEVEL_ZERO_WAITS
from iaprof.record.calibrate.answer import (
    LENGTHS,
    OWN_KERNELS,
    Answer,
    best,
    best_address,
    best_class,
    common_functions,
    read_common,
    read_list,
    read_place,
    read_places,
)
from iaprof.record.calibrate.code import Code, address_of
from iaprof.record.calibrate.level_zero_own import LaunchPlace
from iaprof.record.calibrate.search import MAX_BIAS

# Action, argument with the handle or with an array of handles, and argument with the array's length.
_ENTRIES = {
    "zeCommandListAppendLaunchKernel": (Action.LAUNCH, 1, None),
    "zeCommandListAppendLaunchCooperativeKernel": (Action.LAUNCH, 1, None),
    "zeCommandListAppendLaunchKernelIndirect": (Action.LAUNCH, 1, None),
    "zeCommandListAppendLaunchMultipleKernelsIndirect": (Action.LAUNCH_MANY, 2, 1),
    "zeCommandListAppendLaunchKernelWithParameters": (Action.LAUNCH, 1, None),
    "zeCommandListAppendLaunchKernelWithArguments": (Action.LAUNCH, 1, None),
    "zeCommandListUpdateMutableCommandKernelsExp": (Action.LAUNCH_MANY, 3, 1),
    "zexCommandListAppendVariableLaunchKernel": (Action.LAUNCH, 1, None),
    **{name: (action, argument, None) for name, (action, argument) in LEVEL_ZERO_TRANSFERS.items()},
    "zeKernelDestroy": (Action.KERNEL_GONE, 0, None),
    "zeModuleDestroy": (Action.MODULE_GONE, 0, None),
    "zeCommandQueueExecuteCommandLists": (Action.EXECUTE, 2, 1),
    "zeCommandListImmediateAppendCommandListsExp": (Action.EXECUTE, 2, 1),
    "zeCommandListImmediateAppendCommandListsWithParameters": (Action.EXECUTE, 2, 1),
    "zeCommandListClose": (Action.LIST_CLOSED, 0, None),
    "zeCommandListReset": (Action.LIST_RESET, 0, None),
    "zeCommandListDestroy": (Action.LIST_GONE, 0, None),
    **dict.fromkeys(LEVEL_ZERO_WAITS, (Action.WAIT, 0, None)),
}
_JUMP = re.compile(rb"(?:\xf3\x0f\x1e\xfa)?\xe9(.{4})", re.DOTALL)
_NEEDED = ("zeCommandListAppendLaunchKernel", "zeKernelDestroy")


@dataclass(frozen=True)
class LevelZeroAnswer(Answer):
    """The answer of one process."""

    exports: Mapping[str, int]  # by name: places of exported functions
    own: tuple[LaunchPlace, ...]  # where it launches kernels of its own


def read_level_zero(raw: Any) -> LevelZeroAnswer:
    """Checks and reads an answer; raises what `read_common` does."""
    return LevelZeroAnswer(
        **read_common(raw, _ENTRIES, LENGTHS),
        exports=read_places(raw.get("exports", {}), _ENTRIES),
        own=tuple(_places(raw.get("own", ()))),
    )


def _places(raw: Any) -> Iterator[LaunchPlace]:
    for raw_place in read_list(raw):
        address, kernel, of_list, is_function = raw_place
        if not all(0 <= int(bias) <= MAX_BIAS for bias in (kernel, of_list)):
            raise ValueError("own")
        yield LaunchPlace(read_place(address), int(kernel), int(of_list), bool(is_function))


def level_zero_layout(build_id: str, code: Code, answers: Sequence[LevelZeroAnswer]) -> Layout:
    """Returns the layout on which all answers agree.

    Raises:
        Problem: there is none.
        LayoutError: the layout makes no sense.
    """
    functions = common_functions(answers, _NEEDED)
    address, allocation = best_address(answers)
    module, binary = best(answers, "module"), best(answers, "binary")
    # An object on the path to the address, but not the last one, the allocation: with a GPU, the driver has allocations
    # of another class.
    on_the_way = (address[0][:length] for length in range(len(address[0]) - 2, -1, -1))
    kernel_class, places = best_class(on_the_way, answers)
    layout = Layout(
        build_id=build_id,
        driver="level_zero",
        version=answers[0].version,
        entries=(*_entries(functions, answers[0].exports, code), *_own_launches(answers, code)),
        address=tuple(map(Field, address)),
        size=Field(best(answers, "size")[0], bits=32),
        code=Field(best(answers, "code")[0]),
        name=Field(best(answers, "name")[0]),
        allocation=(Field(allocation[0]), Field(allocation[1])),
        kernel_class=Field(kernel_class),
        classes=tuple(address_of(code.elf, place, executable=False) for place in places),
        module=Field(module[0]),
        module_bias=module[1][0],
        binary=Field(binary[0]),
        binary_size=Field(binary[1]),
    )
    return Layout.from_json(layout.to_json())


def _entries(functions: Mapping[str, int], exports: Mapping[str, int], code: Code) -> Iterator[Entry]:
    taken = set()
    for name, (action, _, _) in _ENTRIES.items():
        place = functions.get(name)
        if place is None or place in taken:
            continue  # one stub may stand for several unsupported functions
        taken.add(place)
        yield _entry(name, place, code)
        # A copy by a function without a probe would get the stack of the thread's copy before it.
        if (
            action in TRANSFERS
            and (export := exports.get(name, place)) not in taken
            and not _jumps(export, place, code)
        ):
            taken.add(export)
            yield _entry(name, export, code)


def _jumps(export: int, place: int, code: Code) -> bool:
    """Whether an exported function does nothing but jump to the one at `place`."""
    match = _JUMP.match(code.beginning(export))
    return match is not None and export + match.end() + int(struct.unpack("<i", match[1])[0]) == place


def _entry(name: str, place: int, code: Code) -> Entry:
    action, handle, count = _ENTRIES[name]
    # Argument 0 is the list, which leads to the GPU; argument 1 of a wait is its timeout.
    needed = {0, 1} if action is Action.WAIT else {0, handle, handle if count is None else count}
    return Entry(name, action, code.probe(place, needed, keeps_stack=action is Action.WAIT), handle, count)


def _own_launches(answers: Sequence[LevelZeroAnswer], code: Code) -> Iterator[Entry]:
    """Yields where some device launches the driver's own kernels; nothing if that is unknown of a device."""
    if any(answer.no_own for answer in answers):
        return
    for place in sorted({place for answer in answers for place in answer.own}):
        at = code.probe(place.address, {0, 1}) if place.is_function else code.call(place.address)
        yield Entry(OWN_KERNELS, Action.OWN_LAUNCH, at, 1, None, place.kernel, place.list)
