"""Makes the layout of an OpenCL driver from its processes' answers to `iaprof calibrate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iaprof.bpf.driver_layout import TRANSFERS, Action, Dispatch, Entry, Field, Layout
from iaprof.bpf.probes.functions import MAY_COPY, OPENCL_TRANSFERS, OPENCL_WAITS
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
)
from iaprof.record.calibrate.code import Code, Problem, address_of
from iaprof.record.calibrate.opencl_driver import LAUNCHES
from iaprof.record.calibrate.opencl_own import HandlePath
from iaprof.record.calibrate.search import MAX_BIAS, Path

_LENGTHS = LENGTHS | {"binary": (3,), "number": (1,)}
_NEEDED = LAUNCHES[:1]
_LAUNCHES = dict.fromkeys(LAUNCHES, (Action.LAUNCH, 1))
_MAY_COPY = dict.fromkeys(MAY_COPY, (Action.MAY_COPY, 0))  # probed only for the driver's own kernels
_WAITS = {name: (Action.WAIT, argument) for name, argument in OPENCL_WAITS.items()}
_FUNCTIONS = _LAUNCHES | OPENCL_TRANSFERS | _MAY_COPY | _WAITS
# By kind of object: the action at its end, and a name for the destructor.
_GONE = {
    "Kernel": (Action.KERNEL_GONE, "MultiDeviceKernel::~MultiDeviceKernel"),
    "Program": (Action.MODULE_GONE, "Program::~Program"),
}
_TABLE = 2  # offsets of the path from a handle to a GPU's kernel
_NEXT_GPU = (0, 8)  # what is added to them for each next GPU


@dataclass(frozen=True)
class _Destructor:
    """How an object ends: in one call of one of these functions; and the bytes from their argument to its handle."""

    functions: tuple[int, ...]
    bias: int


@dataclass(frozen=True)
class OpenCLAnswer(Answer):
    """The answer of one process."""

    gone: Mapping[str, _Destructor]  # by kind, as in _GONE
    own: frozenset[int]  # places in the file where it launches kernels of its own
    handle_paths: frozenset[HandlePath]  # paths to the handles of these
    list_bias: int  # bytes from the first argument there to a queue's handle


def read_opencl(raw: Any) -> OpenCLAnswer:
    """Checks and reads an answer; raises what `read_common` does."""
    return OpenCLAnswer(
        **read_common(raw, _FUNCTIONS, _LENGTHS),
        gone={kind: _destructor(raw["gone"][kind]) for kind in _GONE},
        own=frozenset(map(read_place, read_list(raw.get("own", ())))),
        handle_paths=frozenset(HandlePath(*map(int, path)) for path in raw.get("ways", ())),
        list_bias=int(raw.get("list", 0)),
    )


def _destructor(raw: Any) -> _Destructor:
    bias = int(raw["bias"])
    if not 0 <= bias <= MAX_BIAS or len(raw["functions"]) != 2:
        raise ValueError("gone")
    return _Destructor(tuple(map(read_place, raw["functions"])), bias)


def opencl_layout(build_id: str, code: Code, answers: Sequence[OpenCLAnswer]) -> Layout:
    """Returns the layout on which all answers agree.

    Raises:
        Problem: there is none.
        LayoutError: the layout makes no sense.
    """
    functions = common_functions(answers, _NEEDED)
    address, allocation = best_address(answers)
    module, binary = best(answers, "module"), best(answers, "binary")
    kernel_class, places = best_class([address[0][:_TABLE]], answers)
    number = best(answers, "number")
    path = _handle_path(answers)
    _, start, length = code.segment(functions[_NEEDED[0]])
    layout = Layout(
        build_id=build_id,
        driver="opencl",
        version=answers[0].version,
        entries=(
            *_entries(_LAUNCHES, functions, code),
            *_entries(OPENCL_TRANSFERS, functions, code),
            *(_entries(_MAY_COPY, functions, code) if path else ()),
            *_ends(answers, module[1][0], code),
            *_entries(_WAITS, functions, code),
            *(_own_launches(answers, path, code) if path else ()),
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
        dispatch=Dispatch(path.first, path.many, path.size, (path.kernel, path.handle)) if path else None,
    )
    return Layout.from_json(layout.to_json())


def _handle_path(answers: Sequence[OpenCLAnswer]) -> HandlePath | None:
    """Returns the path to the driver's own kernels; None if it is unknown of a device, or devices do not agree."""
    common = frozenset.intersection(*(answer.handle_paths for answer in answers))
    if any(answer.no_own for answer in answers) or len({answer.list_bias for answer in answers}) > 1:
        return None
    return min(common, default=None)


def _own_launches(answers: Sequence[OpenCLAnswer], path: HandlePath, code: Code) -> Iterator[Entry]:
    """Yields the call instructions that launch the driver's own kernels on some device."""
    for place in sorted(frozenset.union(*(answer.own for answer in answers))):
        yield Entry(OWN_KERNELS, Action.OWN_LAUNCHES, code.call(place), 1, None, path.bias, answers[0].list_bias)


def _of_gpu(path: Path, bits: int = 64) -> Field:
    return Field(path, bits, (*_NEXT_GPU, *(0 for _ in path[_TABLE:])))


def _entries(actions: Mapping[str, tuple[Action, int]], functions: Mapping[str, int], code: Code) -> Iterator[Entry]:
    """Yields the entries of functions, given the actions and arguments."""
    nested = code.called(
        {functions[name] for name, (action, _) in actions.items() if name in functions and action in TRANSFERS}
    )
    taken = set()
    for name, (action, handle) in actions.items():
        place = functions.get(name)
        if place is None or place in taken:
            continue  # one stub may stand for several unsupported functions
        taken.add(place)
        needed = {handle} if action is Action.WAIT else {0, handle}
        at = code.probe(place, needed, keeps_stack=place in nested or action is Action.WAIT)
        yield Entry(name, action, at, handle, nested=place in nested)


def _ends(answers: Sequence[OpenCLAnswer], module_bias: int, code: Code) -> Iterator[Entry]:
    """Yields the entries of destructors of kernels and programs.

    Args:
        answers: of all devices.
        module_bias: bytes from what a kernel points to, to the handle of its program.
        code: the driver's code.
    """
    for kind, (action, name) in _GONE.items():
        destructors = {answer.gone[kind] for answer in answers}
        if len(destructors) > 1:
            raise Problem(f"devices disagree on what ends a {kind.lower()}")
        (destructor,) = destructors
        offset = destructor.bias if action is Action.KERNEL_GONE else max(destructor.bias - module_bias, 0)
        first, second = destructor.functions
        # The second destructor frees memory, too. It may contain the first one's code, or call it.
        both = destructor.functions if not code.calls(second, first) else (first,)
        for place in both:
            yield Entry(name, action, code.probe(place, {0}, keeps_memory=False), 0, None, offset)
