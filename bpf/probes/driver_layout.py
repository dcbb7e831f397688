"""Where an unpatched driver keeps what its launches are about: entry points, and paths from a kernel's handle.

A layout belongs to one build of a driver. Those that ship, and those that `iaprof calibrate` found, are JSON files
named by build-id. What is read by them is checked again at each launch (handles.c): a layout can fail, but not mislead.
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
from iaprof.formats.header.transfers import function_number

SHIPPED = Path(__file__).with_name("layouts")
CACHE = Path("/var/cache/iaprof/layouts")
MAX_ENTRIES = 128
MAX_PATH = 6  # offsets; handles.c has room for the five pointers on the way
MAX_CLASSES = 8
MAX_GPUS = 8  # in three bits of a handle
MAX_OFFSET = 0x7FFF  # bytes; handles.c has 16 bits for them, and a sign
ARGUMENTS = (112, 104, 96, 88, 72, 64)
"""Where struct pt_regs has a function's arguments: offsets of di, si, dx, cx, r8 and r9."""
_BUILD_ID = re.compile(r"[0-9a-f]{16,64}")
_MAX_FILE_BYTES = 1 << 16


class LayoutError(IaprofError):
    """A layout cannot be used; the text says why."""


class Action(StrEnum):
    """What a call of an entry point means."""

    LAUNCH = "launch"
    LAUNCH_MANY = "launch-many"  # an array of kernels
    KERNEL_GONE = "kernel-gone"  # the handle's memory may soon be another kernel's
    MODULE_GONE = "module-gone"
    EXECUTE = "execute"  # an array of command lists
    LIST_CLOSED = "list-closed"
    LIST_RESET = "list-reset"
    LIST_GONE = "list-gone"
    # Copies and fills. How many bytes: an argument, a ze_copy_region_t or three size_t to which an argument points, or
    # not known.
    TRANSFER = "transfer"
    TRANSFER_REGION = "transfer-region"
    TRANSFER_SIZES = "transfer-sizes"
    TRANSFER_UNKNOWN = "transfer-unknown"
    MAY_COPY = "may-copy"  # no transfer: kernels of the driver's own that it launches are of no transfer before
    OWN_LAUNCH = "own-launch"  # of a kernel of the driver's own; inside the driver
    OWN_LAUNCHES = "own-launches"  # of several, as the layout's `dispatch` says
    WAIT = "wait"  # until the GPU is done; the stack pointer is as it was at the function's first instruction


_OF_ARRAYS = (Action.LAUNCH_MANY, Action.EXECUTE)
TRANSFERS = (Action.TRANSFER, Action.TRANSFER_REGION, Action.TRANSFER_SIZES, Action.TRANSFER_UNKNOWN)
OWN_LAUNCHES = (Action.OWN_LAUNCH, Action.OWN_LAUNCHES)


@dataclass(frozen=True)
class Entry:
    """A function of the driver that programs' calls really reach.

    `address` is the virtual address, in the file, of the instruction to probe: there, the arguments that are named here
    and a launch's first are still in their registers.
    Arguments are counted from 0, as the System V ABI has them in rdi, rsi, rdx, rcx, r8 and r9.
    """

    name: str
    action: Action
    address: int
    # Which argument is the handle: of a kernel, module or list, or of what is waited for, or an array of handles;
    # or the bytes of TRANSFER, the region of TRANSFER_REGION or the numbers of TRANSFER_SIZES; 0 of TRANSFER_UNKNOWN;
    # of OWN_LAUNCHES what leads to the kernels.
    handle: int
    count: int | None = None  # LAUNCH_MANY, EXECUTE: which argument is the array's length, 32 bits
    # KERNEL_GONE, OWN_LAUNCH: bytes from that argument to the handle; OWN_LAUNCHES: from where `dispatch` leads
    offset: int = 0
    list_offset: int = 0  # OWN_LAUNCH(ES): bytes from the first argument to the handle of the command list or queue
    # Transfers: other functions of the driver call it, too. A call that returns into the driver is theirs; the stack
    # pointer is as it was at the function's first instruction.
    nested: bool = False

    @property
    def is_wait(self) -> bool:
        """Whether it waits for the GPU."""
        return self.action is Action.WAIT


@dataclass(frozen=True)
class Field:
    """A value that a kernel's handle h leads to: at path (a, b, c) lies what is at *(*(h + a) + b) + c."""

    path: tuple[int, ...]
    bits: int = 64  # or 32
    # Where a handle has a kernel for each GPU: bytes by which the offsets grow from GPU to GPU; empty for 0 everywhere.
    per_gpu: tuple[int, ...] = ()

    def steps(self) -> Iterator[tuple[int, int]]:
        """Each offset, and how much it grows per GPU."""
        yield from zip(self.path, self.per_gpu or (0,) * len(self.path), strict=True)


@dataclass(frozen=True)
class Dispatch:
    """Kernels of the driver's own that are launched together: structures in a row, to which an argument leads."""

    first: int  # bytes from what the argument points to, to the pointer to the first
    many: int  # likewise, to their number, 8 bits
    size: int  # bytes of each
    kernel: tuple[int, int]  # *(*(structure + a) + b) and the entry's offset are the kernel's handle


@dataclass(frozen=True)
class Layout:
    """One build of a driver. All fields start at a kernel's handle."""

    build_id: str  # lower-case hexadecimal
    driver: str  # level_zero or opencl
    version: str  # of the driver, as a person would say it
    entries: tuple[Entry, ...]
    address: tuple[Field, ...]  # one or two, whose sum is the GPU address of the first instruction
    size: Field  # bytes of code
    code: Field  # pointer to the code in the process's memory
    name: Field  # pointer to the kernel's name, which ends with a zero byte
    allocation: tuple[Field, Field]  # GPU address and bytes of the memory in which the code lies
    kernel_class: Field  # a pointer into the driver itself that tells what h is: its virtual table
    classes: tuple[int, ...]  # virtual addresses, in the file, that it may point to
    module: Field | None = None  # pointer to the module
    module_bias: int = 0  # bytes that the handle of a module, as programs have it, lies behind where that points
    binary: Field | None = None  # pointer to the module's zebin
    binary_size: Field | None = None  # bytes of it
    # A handle may have a kernel for each GPU: the number of the GPU that a launch is for, from its first argument; 32
    # bits, three offsets, below MAX_GPUS. The lowest bits of such a handle are 0.
    gpu: Field | None = None
    code_range: tuple[int, int] | None = None  # virtual addresses, in the file, where its code begins and ends
    dispatch: Dispatch | None = None  # of OWN_LAUNCHES

    @property
    def has_lists(self) -> bool:
        """Whether a launch's first argument is a command list, whose executions are known."""
        return any(entry.action is Action.EXECUTE for entry in self.entries)

    @property
    def has_own_kernels(self) -> bool:
        """Whether it leads to the kernels with which the driver copies and fills."""
        return any(entry.action in OWN_LAUNCHES for entry in self.entries)

    def to_json(self) -> str:
        """As text, for a file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Reads and checks what `to_json` wrote.

        Raises:
            LayoutError: it is not that.
        """
        try:
            return _layout(json.loads(text))
        except LayoutError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LayoutError(f"it is no driver's layout ({type(error).__name__}: {error})") from error


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
        name=_field(of["name"]),
        allocation=(_field(of["allocation"][0]), _field(of["allocation"][1])),
        kernel_class=_field(of["kernel_class"]),
        classes=tuple(_number(address, 1 << 48) for address in of["classes"]),
        module=_field(of["module"]) if of["module"] else None,
        module_bias=_number(of.get("module_bias", 0), MAX_OFFSET + 1),
        binary=_field(of["binary"]) if of["binary"] else None,
        binary_size=_field(of["binary_size"]) if of["binary_size"] else None,
        gpu=_field(of["gpu"]) if of.get("gpu") else None,
        code_range=_range(of["code_range"]) if of.get("code_range") else None,
        dispatch=_dispatch(of["dispatch"]) if of.get("dispatch") else None,
    )
    if not _BUILD_ID.fullmatch(layout.build_id):
        raise LayoutError("its build-id is none")
    if not 1 <= len(entries) <= MAX_ENTRIES or not 1 <= len(layout.classes) <= MAX_CLASSES:
        raise LayoutError("it has no entry points, or too many")
    if len(layout.address) not in (1, 2) or (layout.binary is None) != (layout.binary_size is None):
        raise LayoutError("it is incomplete")
    actions = {entry.action for entry in entries}
    if Action.KERNEL_GONE not in actions or (layout.module and Action.MODULE_GONE not in actions):
        raise LayoutError("it does not say what ends a kernel or a module, whose place another may take")
    if any((entry.action in _OF_ARRAYS) != (entry.count is not None) for entry in entries):
        raise LayoutError("an entry point has no count of what it is given, or one too many")
    if any(entry.action in TRANSFERS and not function_number(entry.name) for entry in entries):
        raise LayoutError("it has copies by functions that this iaprof does not know")
    if layout.gpu and (len(layout.gpu.path), layout.gpu.bits) != (3, 32):
        raise LayoutError("its way to the number of a GPU is of another length")
    if (Action.OWN_LAUNCHES in actions and not layout.dispatch) or (
        any(entry.nested for entry in entries) and not layout.code_range
    ):
        raise LayoutError("it does not say what its copies need")
    return layout


def _range(of: Any) -> tuple[int, int]:
    start, end = (_number(address, 1 << 48) for address in of)
    return start, end


def _dispatch(of: Mapping[str, Any]) -> Dispatch:
    first, many, size, a, b = (
        _number(number, MAX_OFFSET + 1) for number in (of["first"], of["many"], of["size"], *of["kernel"])
    )
    return Dispatch(first, many, size, (a, b))


def _field(of: Mapping[str, Any]) -> Field:
    path = tuple(_number(offset, MAX_OFFSET + 1) for offset in of["path"])
    if not 1 <= len(path) <= MAX_PATH or of["bits"] not in (32, 64):
        raise LayoutError("a path of it is too long, or of no known width")
    per_gpu = tuple(_number(more, MAX_OFFSET + 1) for more in of.get("per_gpu", ()))
    if len(per_gpu) not in (0, len(path)):
        raise LayoutError("a path of it does not say what it is for each GPU")
    return Field(path, of["bits"], per_gpu)


def _number(value: object, end: int) -> int:
    if not isinstance(value, int) or not 0 <= value < end:
        raise LayoutError(f"{value!r} is out of range")
    return value


def find_layout(build_id: str) -> Layout | None:
    """The layout of a build: the one that ships, else the one that was calibrated on this machine; None for neither.

    Raises:
        LayoutError: there is one that cannot be used, or that a stranger could have written.
    """
    if not _BUILD_ID.fullmatch(build_id):
        return None
    for folder in (SHIPPED, CACHE):
        path = folder / f"{build_id}.json"
        try:
            text = _read(path, of_anybody=folder is SHIPPED)
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
    """The build-ids of which `find_layout` has a layout."""
    known = set()
    for path in (*SHIPPED.glob("*.json"), *CACHE.glob("*.json")):
        with contextlib.suppress(LayoutError):
            if layout := find_layout(path.stem):
                known.add(layout.build_id)
    return frozenset(known)


def _read(path: Path, of_anybody: bool) -> bytes:
    """What the file says, no more than a layout has; it is not waited for, should it be no file."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or (is_untrusted(status) and not of_anybody):
            raise LayoutError(f"{path} is not believed: others than root and you can change it; remove it")
        return file.read(_MAX_FILE_BYTES)
