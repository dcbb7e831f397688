"""Driver layouts: an unpatched driver's entry points, and the paths of pointers from a kernel's handle to its data.

A layout belongs to one build of a driver. Layouts that ship, and those that `iaprof calibrate` finds, are JSON files
named by build-id. handles.c checks at each launch what it reads with a layout: a wrong layout fails, but does not
mislead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import is_untrusted
from iaprof.bpf.structs import MAX_CLASSES, MAX_OPERATIONS
from iaprof.formats.wire.launches import transfer_function_number

SHIPPED = Path(__file__).with_name("layouts")
CACHE = Path("/var/cache/iaprof/layouts")
MAX_ENTRIES = 128
MAX_PATH = 6  # offsets per path; handles.c can hold the five pointers in between
MAX_GPUS = 8  # their numbers are stored in three bits of a handle
MAX_OFFSET = 0x7FFF  # bytes; fits the signed 16-bit fields of handles.c
MAX_BOUND_OFFSET = 0x1FFFF  # bytes of a command buffer; fits the 32-bit fields of handles.c
MAX_WINDOW = 1 << 32  # bytes
MOST_NAME_BYTES = 16  # of an operation's name
REVISION = 2
"""Of what calibrating finds of a Vulkan driver: raised when it finds more."""
STAGES = ("vertex", "control", "evaluation", "geometry", "fragment", "compute", "task", "mesh")
"""Mesa's order: control and evaluation are those of tessellation. No draw has the one of compute."""
STAGES_WITHOUT_MESH = 5  # the first of these, with which a draw without mesh shaders is made
ARGUMENTS = (112, 104, 96, 88, 72, 64)
"""Offsets of a function's arguments in struct pt_regs: di, si, dx, cx, r8 and r9."""
_BUILD_ID = re.compile(r"[0-9a-f]{16,64}")
_MAX_FILE_BYTES = 1 << 16


class LayoutError(IaprofError):
    """A layout cannot be used; the text says why."""


class Action(StrEnum):
    """What a call of an entry point does."""

    LAUNCH = "launch"  # launches a kernel
    LAUNCH_MANY = "launch-many"  # launches an array of kernels
    DRAW = "draw"  # launches the shaders that a command buffer draws with
    KERNEL_GONE = "kernel-gone"  # destroys a kernel; another kernel may get the handle's memory
    MODULE_GONE = "module-gone"  # destroys a module
    SHADER_GONE = "shader-gone"  # destroys a pipeline, and its shader, which is the launches' handle
    NAMED = "named"  # names an object: VkDebugUtilsObjectNameInfoEXT
    # Makes pipelines of an array of VkComputePipelineCreateInfo, or VkGraphicsPipelineCreateInfo; the stack pointer is
    # as it was at the function's first instruction. And its return: what was the last argument points to them.
    MAKE = "make"
    MAKE_TO_DRAW = "make-to-draw"
    MADE = "made"
    MADE_TO_DRAW = "made-to-draw"
    EXECUTE = "execute"  # executes an array of command lists
    SUBMIT = "submit"  # executes the command lists of an array of VkSubmitInfo2
    INCLUDE = "include"  # makes an array of command lists part of the list that is the first argument
    LIST_CLOSED = "list-closed"
    LIST_RESET = "list-reset"
    LIST_GONE = "list-gone"
    # Copies or fills. The number of bytes is an argument, or that of a ze_copy_region_t or three size_t to which an
    # argument points, or unknown.
    TRANSFER = "transfer"
    TRANSFER_REGION = "transfer-region"
    TRANSFER_SIZES = "transfer-sizes"
    TRANSFER_UNKNOWN = "transfer-unknown"
    MAY_COPY = "may-copy"  # no transfer, but may launch the driver's own kernels, which then belong to no transfer
    OWN_LAUNCH = "own-launch"  # launches one of the driver's own kernels; called inside the driver
    OWN_LAUNCHES = "own-launches"  # launches several of them, where the layout's `dispatch` leads
    # Of Mesa: does an operation of blorp, which copies and clears, with one of the driver's own kernels (Operations).
    OPERATION = "operation"
    # Gives the GPU such a kernel; the stack pointer is as it was at the function's first instruction. And its return.
    UPLOAD = "upload"
    UPLOADED = "uploaded"
    WAIT = "wait"  # waits for the GPU; the stack pointer is as it was at the function's first instruction


MADE_BY = {Action.MAKE: Action.MADE, Action.MAKE_TO_DRAW: Action.MADE_TO_DRAW}
OF_DRAWS = (Action.DRAW, Action.MAKE_TO_DRAW, Action.MADE_TO_DRAW)
_WITH_ARRAYS = (Action.LAUNCH_MANY, Action.EXECUTE, Action.SUBMIT, Action.INCLUDE, *MADE_BY)
TRANSFERS = (Action.TRANSFER, Action.TRANSFER_REGION, Action.TRANSFER_SIZES, Action.TRANSFER_UNKNOWN)
OWN_LAUNCHES = (Action.OWN_LAUNCH, Action.OWN_LAUNCHES)
OF_OPERATIONS = (Action.OPERATION, Action.UPLOAD, Action.UPLOADED)
_ONLY_OF_WINDOWS = {
    *(Action.SHADER_GONE, Action.NAMED, Action.SUBMIT, Action.INCLUDE, *OF_DRAWS, *MADE_BY, Action.MADE),
    *OF_OPERATIONS,
}
_OF_WINDOWS = {*_ONLY_OF_WINDOWS, Action.LAUNCH, Action.LIST_CLOSED, Action.LIST_RESET, Action.LIST_GONE}


@dataclass(frozen=True)
class Entry:
    """A function of the driver in which programs' calls arrive.

    `address` is the virtual address, in the file, of the instruction to probe, where the arguments that are given here,
    and the first argument of a launch, are still in their registers. Arguments are counted from 0: the System V ABI
    passes them in rdi, rsi, rdx, rcx, r8 and r9.
    """

    name: str
    action: Action
    address: int
    # Number of the argument that is the handle (of a kernel, module, list, or the object waited for) or an array of
    # handles. TRANSFER: the number of bytes. TRANSFER_REGION: the region. TRANSFER_SIZES: the three numbers.
    # TRANSFER_UNKNOWN: 0. OWN_LAUNCHES: the argument from which `dispatch` leads to the kernels.
    handle: int
    count: int | None = None  # LAUNCH_MANY, EXECUTE: number of the argument that is the array's length, 32 bits
    # KERNEL_GONE, OWN_LAUNCH: bytes from that argument to the handle. OWN_LAUNCHES: from the end of `dispatch` to it.
    offset: int = 0
    list_offset: int = 0  # OWN_LAUNCH(ES): bytes from the first argument to the handle of the command list or queue
    # Transfers: whether other functions of the driver also call this one. Calls that return into the driver are
    # ignored; the stack pointer is as it was at the function's first instruction.
    nested: bool = False

    @property
    def is_wait(self) -> bool:
        """Whether it waits for the GPU."""
        return self.action is Action.WAIT


@dataclass(frozen=True)
class Field:
    """A value at the end of a path of pointers: from handle h, path (a, b, c) leads to address *(*(h + a) + b) + c."""

    path: tuple[int, ...]
    bits: int = 64  # or 32
    # If a handle has a kernel for each GPU: bytes by which each offset grows from GPU to GPU; empty for all 0.
    per_gpu: tuple[int, ...] = ()

    def steps(self) -> Iterator[tuple[int, int]]:
        """Yields each offset, and its growth per GPU."""
        yield from zip(self.path, self.per_gpu or (0,) * len(self.path), strict=True)


@dataclass(frozen=True)
class Dispatch:
    """Where OWN_LAUNCHES finds its kernels: in an array of structures."""

    first: int  # offset, from the address in the argument, of the pointer to the first structure
    many: int  # offset, from the same address, of the number of structures, 8 bits
    size: int  # bytes of a structure
    kernel: tuple[int, int]  # (a, b): *(*(structure + a) + b) plus the entry's offset is the kernel's handle


@dataclass(frozen=True)
class Operations:
    """Where an operation of Mesa's blorp has its kernel: offsets in the function's second argument, unless said else.

    The first argument points to the driver's table of functions for blorp, followed by the command buffer.
    """

    function: int  # offset in that table of the pointer to the function, which tells that the arguments are these
    kernel: int  # of the first instruction's offset from the window, 32 bits
    data: int  # of the pointer to what the compiler says of the kernel; 0 is there if the operation has no kernel
    size: int  # offset in that of the bytes of code, 32 bits
    kind: int  # of the number of the operation, 32 bits
    names: tuple[tuple[int, str], ...]  # by this number; the launches of others have a name without the kind


@dataclass(frozen=True)
class Layout:
    """The layout of one build of a driver. All fields start at a kernel's handle.

    A Vulkan driver has shaders in place of kernels. A launch's argument is a command buffer, from which `bound` leads
    to the shader, which is the handle. All code lies in one range of the GPU's address space, from which `address`
    counts.
    """

    build_id: str  # lower-case hexadecimal
    driver: str  # level_zero, opencl or vulkan
    version: str  # of the driver, for people
    entries: tuple[Entry, ...]
    address: tuple[Field, ...]  # one or two, whose sum is the GPU address of the first instruction
    size: Field  # bytes of code
    code: Field  # pointer to the code in the process's memory
    name: Field | None  # pointer to the kernel's name, which ends with a zero byte; None with `window`
    # GPU address and size in bytes of the allocation that contains the code; None with `window`.
    allocation: tuple[Field, Field] | None
    kernel_class: Field  # pointer to the virtual table of the kernel's C++ class, which identifies a handle
    classes: tuple[int, ...]  # virtual addresses, in the file, that this pointer may have
    module: Field | None = None  # pointer to the module
    module_bias: int = 0  # offset of a module's handle, as programs have it, from the address in that pointer
    binary: Field | None = None  # pointer to the module's zebin
    binary_size: Field | None = None  # bytes of the zebin
    # If a handle has a kernel for each GPU: the number of a launch's GPU, from the launch's first argument; three
    # offsets, 32 bits, below MAX_GPUS. The lowest bits of such a handle are 0.
    gpu: Field | None = None
    code_range: tuple[int, int] | None = None  # start and end of the driver's code, virtual addresses in the file
    dispatch: Dispatch | None = None  # for OWN_LAUNCHES
    window: tuple[int, int] | None = None  # GPU address and bytes of the range in which all code lies; of Vulkan only
    bound: tuple[int, ...] = ()  # with `window`: path of one or two offsets from a launch's argument to the handle
    pipeline: int = 0  # with `window`: offset in a pipeline of the pointer to its shader
    # With `window`: path of one or two offsets from a draw's command buffer to an array of pointers to the shaders of
    # STAGES, or the first STAGES_WITHOUT_MESH, 0 where there is none; empty if draws are not recorded.
    drawn: tuple[int, ...] = ()
    # With `drawn`: offset, in a pipeline that draws, of the first pointer to a shader, and bytes from one to the next;
    # it has as many as that array, some of which may point elsewhere.
    stages: tuple[int, int] = (0, 0)
    stage: int = 0  # with `drawn`: offset in a shader that draws of its number in STAGES, 32 bits; 0 if unknown
    # With `drawn`: offset, in a pipeline, of the 32 bits that say of which kind it is, and these in a pipeline that
    # dispatches and in one that draws.
    kind: tuple[int, int, int] = (0, 0, 0)
    simd: int = 0  # with `window`: offset in a shader that dispatches of its number of lanes, 32 bits; 0 if unknown
    mesh: bool = False  # with `drawn`: whether the array has all of STAGES
    operations: Operations | None = None  # for OPERATION

    revision: int = 0  # with `window`: REVISION of the iaprof that made it

    @property
    def is_outdated(self) -> bool:
        """Whether this iaprof may find more in the driver, and does so by itself."""
        return bool(self.window) and self.revision < REVISION

    @property
    def has_lists(self) -> bool:
        """Whether a launch's first argument is a command list, and executions of lists are recorded."""
        return any(entry.action in (Action.EXECUTE, Action.SUBMIT) for entry in self.entries)

    @property
    def has_draws(self) -> bool:
        """Whether draws are recorded."""
        return any(entry.action is Action.DRAW for entry in self.entries)

    @property
    def has_own_kernels(self) -> bool:
        """Whether launches of the kernels with which the driver copies and fills are recorded."""
        return any(entry.action in OWN_LAUNCHES for entry in self.entries)

    @property
    def stage_count(self) -> int:
        """Number of stages that the shaders of draws may have."""
        return len(STAGES) if self.mesh else STAGES_WITHOUT_MESH

    @property
    def has_operations(self) -> bool:
        """Whether launches of the kernels with which Mesa's driver copies and clears are recorded."""
        return any(entry.action is Action.OPERATION for entry in self.entries)

    def to_json(self) -> str:
        """Returns the layout as JSON, the content of a layout file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Reads and checks the output of `to_json`.

        Raises:
            LayoutError: the text is not a layout.
        """
        try:
            return _layout(json.loads(text))
        except LayoutError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LayoutError(f"it is not a driver's layout ({type(error).__name__}: {error})") from error


def _layout(of: Mapping[str, Any]) -> Layout:
    entries = tuple(
        Entry(
            str(entry["name"]),
            Action(entry["action"]),
            _number(entry["address"], 1 << 48),
            _number(entry["handle"], 6),
            None if entry["count"] is None else _number(entry["count"], 6),
            _number(entry.get("offset", 0), MAX_OFFSET + 1),
            _number(entry.get("list_offset", 0), MAX_OFFSET + 1),
            bool(entry.get("nested", False)),
        )
        for entry in of["entries"]
    )
    layout = Layout(
        build_id=of["build_id"],
        driver=str(of["driver"]),
        version=str(of["version"]),
        entries=entries,
        address=tuple(map(_field, of["address"])),
        size=_field(of["size"]),
        code=_field(of["code"]),
        name=_field(of["name"]) if of["name"] else None,
        allocation=(_field(of["allocation"][0]), _field(of["allocation"][1])) if of["allocation"] else None,
        kernel_class=_field(of["kernel_class"]),
        classes=tuple(_number(address, 1 << 48) for address in of["classes"]),
        module=_field(of["module"]) if of["module"] else None,
        module_bias=_number(of.get("module_bias", 0), MAX_OFFSET + 1),
        binary=_field(of["binary"]) if of["binary"] else None,
        binary_size=_field(of["binary_size"]) if of["binary_size"] else None,
        gpu=_field(of["gpu"]) if of.get("gpu") else None,
        code_range=_range(of["code_range"]) if of.get("code_range") else None,
        dispatch=_dispatch(of["dispatch"]) if of.get("dispatch") else None,
        window=_window(of["window"]) if of.get("window") else None,
        bound=tuple(_number(offset, MAX_BOUND_OFFSET + 1) for offset in of.get("bound", ())),
        pipeline=_number(of.get("pipeline", 0), MAX_OFFSET + 1),
        drawn=tuple(_number(offset, MAX_BOUND_OFFSET + 1) for offset in of.get("drawn", ())),
        stages=_offsets(of.get("stages", (0, 0)), 2),
        stage=_number(of.get("stage", 0), MAX_OFFSET + 1),
        kind=_offsets(of.get("kind", (0, 0, 0)), 3),
        simd=_number(of.get("simd", 0), MAX_OFFSET + 1),
        mesh=bool(of.get("mesh", False)),
        operations=_operations(of["operations"]) if of.get("operations") else None,
        revision=_number(of.get("revision", 0), 1 << 16),
    )
    if not _BUILD_ID.fullmatch(layout.build_id):
        raise LayoutError("its build-id is not valid")
    if not 1 <= len(entries) <= MAX_ENTRIES or not 1 <= len(layout.classes) <= MAX_CLASSES:
        raise LayoutError("it has no entry points, or too many")
    if len(layout.address) not in (1, 2) or (layout.binary is None) != (layout.binary_size is None):
        raise LayoutError("it is incomplete")
    actions = {entry.action for entry in entries}
    if layout.window:
        if len(layout.bound) not in (1, 2) or len(layout.address) != 1 or layout.module or layout.gpu:
            raise LayoutError("it does not say how command buffers lead to shaders")
        if actions - _OF_WINDOWS:
            raise LayoutError("it has functions that Vulkan does not have")
        if len(layout.drawn) > 2 or (Action.DRAW in actions and not layout.drawn):
            raise LayoutError("it does not say how command buffers lead to the shaders with which they draw")
        if actions & set(OF_OPERATIONS) and not layout.operations:
            raise LayoutError("it does not say how the driver's own operations lead to their kernels")
        if Action.MADE_TO_DRAW in actions and not layout.stage:
            raise LayoutError("it does not say which stage a shader is")
    elif not layout.name or not layout.allocation or layout.bound or layout.drawn or actions & _ONLY_OF_WINDOWS:
        raise LayoutError("it is incomplete")
    if not actions & {Action.KERNEL_GONE, Action.SHADER_GONE} or (layout.module and Action.MODULE_GONE not in actions):
        raise LayoutError("it does not say what ends a kernel or a module, whose place another may take")
    if any((entry.action in _WITH_ARRAYS) != (entry.count is not None) for entry in entries):
        raise LayoutError("an entry point has no count of what it is given, or one too many")
    if any(entry.action in TRANSFERS and not transfer_function_number(entry.name) for entry in entries):
        raise LayoutError("it has copies by functions that this iaprof does not know")
    if layout.gpu and (len(layout.gpu.path), layout.gpu.bits) != (3, 32):
        raise LayoutError("its way to the number of a GPU is of another length")
    if (Action.OWN_LAUNCHES in actions and not layout.dispatch) or (
        any(entry.nested for entry in entries) and not layout.code_range
    ):
        raise LayoutError("it does not say what its copies need")
    return layout


def _window(of: Any) -> tuple[int, int]:
    start, size = of
    start, size = _number(start, 1 << 48), _number(size, MAX_WINDOW + 1)
    if not start or start % MAX_WINDOW or not size:
        raise LayoutError("its range of code does not begin where it can")
    return start, size


def _offsets(of: Any, many: int) -> Any:
    if len(of) != many:
        raise LayoutError("it does not say where pipelines have their shaders")
    return tuple(_number(offset, MAX_OFFSET + 1) for offset in of)


def _range(of: Any) -> tuple[int, int]:
    start, end = (_number(address, 1 << 48) for address in of)
    return start, end


def _dispatch(of: Mapping[str, Any]) -> Dispatch:
    first, many, size, a, b = (
        _number(number, MAX_OFFSET + 1) for number in (of["first"], of["many"], of["size"], *of["kernel"])
    )
    return Dispatch(first, many, size, (a, b))


def _operations(of: Mapping[str, Any]) -> Operations:
    function, kernel, data, size, kind = (
        _number(of[name], MAX_OFFSET + 1) for name in ("function", "kernel", "data", "size", "kind")
    )
    names = tuple((_number(number, MAX_OPERATIONS - 1), str(name)) for number, name in of["names"])
    if any(not name.isprintable() or not 0 < len(name.encode()) < MOST_NAME_BYTES for _, name in names):
        raise LayoutError("a name of its operations is no name")
    return Operations(function, kernel, data, size, kind, names)


def _field(of: Mapping[str, Any]) -> Field:
    path = tuple(_number(offset, MAX_OFFSET + 1) for offset in of["path"])
    if not 1 <= len(path) <= MAX_PATH or of["bits"] not in (32, 64):
        raise LayoutError("a path of it is too long, or its values have an unknown width")
    per_gpu = tuple(_number(more, MAX_OFFSET + 1) for more in of.get("per_gpu", ()))
    if len(per_gpu) not in (0, len(path)):
        raise LayoutError("a path of it does not say what it is for each GPU")
    return Field(path, of["bits"], per_gpu)


def _number(value: object, end: int) -> int:
    if not isinstance(value, int) or not 0 <= value < end:
        raise LayoutError(f"{value!r} is out of range")
    return value


def find_layout(build_id: str) -> Layout | None:
    """Returns the layout of a build: the one that ships, or one calibrated on this machine; None if there is neither.

    Raises:
        LayoutError: the file cannot be used, or others than root and this user can change it.
    """
    if not _BUILD_ID.fullmatch(build_id):
        return None
    for folder in (SHIPPED, CACHE):
        path = folder / f"{build_id}.json"
        try:
            text = _read(path, trust_any_owner=folder is SHIPPED)
        except OSError:
            continue
        try:
            layout = Layout.from_json(text)
        except LayoutError as error:
            raise LayoutError(f"{path}: {error}; remove it, and run 'iaprof calibrate'") from error
        if layout.build_id == build_id:
            return layout
    return None


def known_builds() -> frozenset[str]:
    """Returns the build-ids for which `find_layout` has a layout."""
    known = set()
    for path in (*SHIPPED.glob("*.json"), *CACHE.glob("*.json")):
        with contextlib.suppress(LayoutError):
            if layout := find_layout(path.stem):
                known.add(layout.build_id)
    return frozenset(known)


def _read(path: Path, trust_any_owner: bool) -> bytes:
    """Reads a layout file, up to _MAX_FILE_BYTES; does not block if the path is a FIFO or device."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or (is_untrusted(status) and not trust_any_owner):
            raise LayoutError(f"{path} is not trusted: users other than root and you can change it; remove it")
        return file.read(_MAX_FILE_BYTES)
