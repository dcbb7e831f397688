"""Tells where a stack ends and, if it does not reach the start of its program or thread, why.

Stacks are walked by call frame information, up to a depth limit, and the capture says how each one ended. Captures
of formats before 6, and recordings on Linux kernels without BTF, have stacks that were walked by frame pointers. Code
built without frame pointers uses their register for other data, so such a stack ends there, or goes on with false
return addresses. The recorder cuts these off (record/stacks/walks.py), except in formats before 5.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol, TypeVar

from iaprof.symbols.names.address_space import NOWHERE
from iaprof.symbols.names.names import Module, ModuleKind

TRUNCATED = "[truncated]"
NO_FRAME_POINTERS = "[no frame pointers: {}]"
CUT_IN = "[cut in {}: {}]"
CUT = {
    "unfinished": "not finished in time",
    "nowhere": "its caller is in no code",
    "memory": "that part of the stack was not copied",
    "damaged": "its call frame information is damaged",
    "stuck": "no call frame information",
}
"""Why a stack was not walked to its end, by the value of `ended` in its row."""
WHOLE, DEEP = "whole", "deep"
GENERATED_CODE = "generated code"
UNKNOWN_MEMORY = "unknown memory"
_LONGEST_FILE = 255  # characters, NAME_MAX

BEGINNINGS = frozenset(
    (
        # glibc and musl: the program, and threads
        *("_start", "_start_c", "__libc_start_main", "__libc_start_main_impl", "__libc_start_call_main", "main"),
        *("generic_start_main", "_dl_start_user", "_dl_start"),
        *("start_thread", "thread_start", "start", "clone", "clone3", "__clone", "__clone3", "__clone_internal"),
        # Go: the program, threads and goroutines
        *("_rt0_amd64", "_rt0_amd64_linux", "runtime.rt0_go", "runtime.mstart", "runtime.mstart0", "runtime.mstart1"),
        *("runtime.goexit", "runtime.mcall", "runtime.systemstack", "runtime.morestack"),
    )
)
"""The functions with which programs and threads begin."""
_VERSION = re.compile(r"(@.*|\.abi0)$", re.DOTALL)  # __libc_start_main@@GLIBC_2.34; Go's assembly functions are .abi0
_LIBC = re.compile(r"(libc|libpthread|ld|ld-linux-x86-64|ld-musl-x86_64|libc\.musl-x86_64)(-[0-9.]{1,9})?\.so[0-9.]*")


class End(Enum):
    """How a stack ends."""

    WHOLE = "whole"  # where its program or thread began
    CUT = "cut"  # before that
    UNKNOWN = "unknown"  # in code that could not be read


class WalkedFrame(Protocol):
    """What `without_strays` needs to know about a frame."""

    @property
    def module(self) -> Module | None:
        """The module of its address; None if unknown."""

    @property
    def is_named(self) -> bool:
        """Whether its function has a name."""


AnyFrame = TypeVar("AnyFrame", bound=WalkedFrame)


def without_strays(frames: Sequence[AnyFrame], keeps_frame_pointers: Callable[[Module], bool | None]) -> list[AnyFrame]:
    """Returns the frames of a stack of format 4 or earlier, without false outermost ones.

    These are the frames in no mapping of code that come before the first frame in a file. If that file was built with
    frame pointers, nothing is removed: its frame pointers lead to callers.

    Args:
        frames: the outermost first.
        keeps_frame_pointers: whether a module was built with frame pointers; None if unknown.
    """
    strays = 0
    while strays < len(frames) and _is_nowhere(frames[strays]):
        strays += 1
    if strays == len(frames):  # the process's mappings are unknown
        return list(frames)
    module = frames[strays].module
    if module is None or module.kind is not ModuleKind.FILE or keeps_frame_pointers(module):
        return list(frames)
    return list(frames[strays:])


def _is_nowhere(frame: WalkedFrame) -> bool:
    module = frame.module
    if frame.is_named:
        return False
    return module is None or (module.kind is ModuleKind.GENERATED and module.path == NOWHERE)


def is_beginning(name: str) -> bool:
    """Tells whether programs or threads begin with a function of this name."""
    return _VERSION.sub("", name) in BEGINNINGS


def has_no_beginning(module: Module) -> bool:
    """Tells whether certainly no program or thread begins in the code of a module."""
    return module.kind is ModuleKind.VDSO or (module.kind is ModuleKind.GENERATED and module.path != NOWHERE)


def end_of(name: str, module: Module | None, is_outermost: bool | None, keeps_frame_pointers: bool | None) -> End:
    """Returns how a stack ends that is less deep than the limit.

    Args:
        name: of the outermost frame's function; empty if it has none.
        module: of the outermost frame; None if unknown.
        is_outermost: whether the frame's function has no caller (symbols/unwind/file_code.py); None if unknown.
        keeps_frame_pointers: whether the module was built with frame pointers; None if unknown.
    """
    if is_outermost or is_beginning(name):
        return End.WHOLE
    if module is not None and module.kind is ModuleKind.KERNEL:  # stacks of the Linux kernel need no frame pointers
        return End.WHOLE
    if is_outermost is not None:
        return End.CUT
    if module is None or module.kind is not ModuleKind.FILE:
        return End.UNKNOWN
    # The file was not read. Without debug symbols, functions that the C library does not export have no name: those in
    # which threads begin, but also others that call back, such as an inner part of qsort.
    if not name and _LIBC.fullmatch(os.path.basename(module.path)):
        return End.UNKNOWN
    return End.CUT if keeps_frame_pointers is False else End.UNKNOWN


def code_of(module: Module | None) -> str:
    """Returns the text for a module in which a stack ends."""
    if module is None:
        return UNKNOWN_MEMORY
    match module.kind:
        case ModuleKind.FILE:
            return os.path.basename(module.path)[:_LONGEST_FILE]
        case ModuleKind.GENERATED:
            return UNKNOWN_MEMORY if module.path == NOWHERE else GENERATED_CODE
    return module.path


def mark(end: End, module: Module | None, truncated: bool, ended: str | None = None) -> str | None:
    """Returns the frame to show in place of missing ones; None if none is missing, or if that is unknown.

    Args:
        end: how the stack ends.
        module: the module of its last frame.
        truncated: whether the stack is as deep as the limit.
        ended: the value of `ended` in its row, see CUT; None if it has none.
    """
    if truncated:
        return TRUNCATED
    if end is not End.CUT:
        return None
    return NO_FRAME_POINTERS.format(code_of(module)) if ended is None else CUT_IN.format(code_of(module), _why(ended))


def _why(ended: str) -> str:
    return CUT.get(ended, "cut")
