"""The layout of an OpenCL driver, of what its processes answer to `iaprof calibrate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iaprof.bpf.probes.driver_layout import TRANSFERS, Action, Dispatch, Entry, Field, Layout
from iaprof.bpf.probes.transfers import MAY_COPY, OPENCL as TRANSFERRING
from iaprof.bpf.probes.waits import OPENCL as WAITING
from iaprof.record.calibrate.answer import (
    OWN_KERNELS,
    PARTS,
    Answer,
    Code,
    Problem,
    address_of,
    best,
    best_address,
    best_class,
    common_functions,
    read_candidates,
    read_list,
    read_no_own,
    read_place,
    read_places,
    read_version,
)
from iaprof.record.calibrate.opencl_driver import LAUNCHES
from iaprof.record.calibrate.opencl_own import Way
from iaprof.record.calibrate.search import MAX_BIAS, Path

_PARTS = PARTS | {"binary": (3,), "number": (1,)}
_NEEDED = LAUNCHES[:1]
_LAUNCHES = dict.fromkeys(LAUNCHES, (Action.LAUNCH, 1))
_MAY_COPY = dict.fromkeys(MAY_COPY, (Action.MAY_COPY, 0))  # which matters only for the driver's own kernels
_WAITS = {name: (Action.WAIT, argument) for name, argument in WAITING.items()}
_FUNCTIONS = _LAUNCHES | TRANSFERRING | _MAY_COPY | _WAITS
# What ends them, and how people may call it.
_GONE = {
    "Kernel": (Action.KERNEL_GONE, "MultiDeviceKernel::~MultiDeviceKernel"),
    "Program": (Action.MODULE_GONE, "Program::~Program"),
}
_TABLE = 2  # offsets that lead from a handle to a GPU's kernel
_NEXT_GPU = (0, 8)  # how they grow from GPU to GPU


@dataclass(frozen=True)
class _Destructor:
    """What ends an object: functions of which one is called, once, and bytes from it to its handle."""

    functions: tuple[int, ...]
    bias: int


@dataclass(frozen=True)
class OpenCLAnswer(Answer):
    """Of one process."""

    gone: Mapping[str, _Destructor]  # as _GONE
    own: frozenset[int]  # from where it launches kernels of its own: places in the file
    ways: frozenset[Way]  # to these
    list_bias: int  # bytes that a queue's handle lies behind the first argument there


def read_opencl(told: Any) -> OpenCLAnswer:
    """Checks an answer.

    Raises:
        Problem: it says why there is none.
        ValueError, KeyError, TypeError, AttributeError, OverflowError: it makes no sense.
    """
    return OpenCLAnswer(
        version=read_version(told),
        functions=read_places(told["functions"], _FUNCTIONS),
        candidates=read_candidates(told["candidates"], _PARTS),
        no_own=read_no_own(told),
        gone={kind: _destructor(told["gone"][kind]) for kind in _GONE},
        own=frozenset(map(read_place, read_list(told.get("own", ())))),
        ways=frozenset(Way(*map(int, way)) for way in told.get("ways", ())),
        list_bias=int(told.get("list", 0)),
    )


def _destructor(told: Any) -> _Destructor:
    bias = int(told["bias"])
    if not 0 <= bias <= MAX_BIAS or len(told["functions"]) != 2:
        raise ValueError("gone")
    return _Destructor(tuple(map(read_place, told["functions"])), bias)


def opencl_layout(build_id: str, code: Code, answers: Sequence[OpenCLAnswer]) -> Layout:
    """The layout on which all agree.

    Raises:
        Problem: there is none.
        LayoutError: it makes no sense.
    """
    functions = common_functions(answers, _NEEDED)
    address, allocation = best_address(answers)
    module, binary = best(answers, "module"), best(answers, "binary")
    kernel_class, places = best_class([address[0][:_TABLE]], answers)
    number = best(answers, "number")
    way = _way(answers)
    _, start, length = code.segment(functions[_NEEDED[0]])
    layout = Layout(
        build_id=build_id,
        driver="opencl",
        version=answers[0].version,
        entries=(
            *_entries(_LAUNCHES, functions, code),
            *_entries(TRANSFERRING, functions, code),
            *(_entries(_MAY_COPY, functions, code) if way else ()),
            *_ends(answers, module[1][0], code),
            *_entries(_WAITS, functions, code),
            *(_own_launches(answers, way, code) if way else ()),
        ),
        address=tuple(map(_of_gpu, address)),
        size=_of_gpu(best(answers, "size")[0], bits=32),
        code=_of_gpu(best(answers, "code")[0]),
        name=_of_gpu(best(answers, "name")[0]),
        allocation=(_of_gpu(allocation[0]), _of_gpu(allocation[1])),
        kernel_class=_of_gpu(kernel_class),
        classes=tuple(address_of(code.elf, place, executable=False) for place in places),
        module=Field(module[0]),
        module_bias=max(module[1][0] - answers[0].gone["Program"].bias, 0),
        binary=Field(binary[0], per_gpu=binary[2]),
        binary_size=Field(binary[1], per_gpu=binary[2]),
        gpu=Field(number[0], bits=32),
        code_range=(start, start + length),
        dispatch=Dispatch(way.first, way.many, way.size, (way.kernel, way.handle)) if way else None,
    )
    return Layout.from_json(layout.to_json())


def _way(answers: Sequence[OpenCLAnswer]) -> Way | None:
    """To the driver's own kernels; None if that is not known of one of the devices, or they do not agree."""
    common = frozenset.intersection(*(answer.ways for answer in answers))
    if any(answer.no_own for answer in answers) or len({answer.list_bias for answer in answers}) > 1:
        return None
    return min(common, default=None)


def _own_launches(answers: Sequence[OpenCLAnswer], way: Way, code: Code) -> Iterator[Entry]:
    """Where any of the devices launches kernels of the driver's own: call instructions."""
    for place in sorted(frozenset.union(*(answer.own for answer in answers))):
        yield Entry(OWN_KERNELS, Action.OWN_LAUNCHES, code.call(place), 1, None, way.bias, answers[0].list_bias)


def _of_gpu(path: Path, bits: int = 64) -> Field:
    return Field(path, bits, (*_NEXT_GPU, *(0 for _ in path[_TABLE:])))


def _entries(of: Mapping[str, tuple[Action, int]], functions: Mapping[str, int], code: Code) -> Iterator[Entry]:
    """Those of some functions, of which the action and the argument are given."""
    nested = code.called(
        {functions[name] for name, (action, _) in of.items() if name in functions and action in TRANSFERS}
    )
    taken = set()
    for name, (action, handle) in of.items():
        place = functions.get(name)
        if place is None or place in taken:
            continue  # where a function is not supported, one stub may stand for several
        taken.add(place)
        needed = {handle} if action is Action.WAIT else {0, handle}
        at = code.probe(place, needed, keeps_stack=place in nested or action is Action.WAIT)
        yield Entry(name, action, at, handle, nested=place in nested)


def _ends(answers: Sequence[OpenCLAnswer], module_bias: int, code: Code) -> Iterator[Entry]:
    """What ends kernels and programs.

    Args:
        answers: of all devices.
        module_bias: bytes from where a kernel points to the handle of its program.
        code: of the driver.
    """
    for kind, (action, name) in _GONE.items():
        found = {answer.gone[kind] for answer in answers}
        if len(found) > 1:
            raise Problem(f"devices do not agree what ends a {kind.lower()}")
        (ends,) = found
        offset = ends.bias if action is Action.KERNEL_GONE else max(ends.bias - module_bias, 0)
        destructor, deletes = ends.functions
        # The second frees memory, too. It may have all of the first in itself, or call it.
        both = ends.functions if not code.calls(deletes, destructor) else (destructor,)
        for place in both:
            yield Entry(name, action, code.probe(place, {0}, keeps_memory=False), 0, None, offset)
