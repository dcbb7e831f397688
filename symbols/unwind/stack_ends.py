"""Where a stack ends, and why, if it ends before the start of its program or thread.

Stacks are walked by call frame information, up to a limit of depth, and the capture says how each one ended. Captures
of formats before 6, and recordings on kernels without BTF, have stacks that were walked by frame pointers. Code built
without these uses their register for other things, so a stack ends there. False return addresses beyond that are cut
when a capture is made (record/stacks/walks.py); formats before 5 have them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol, TypeVar

from iaprof.symbols.names.address_space import NOWHERE
from iaprof.symbols.names.modules import Module, ModuleKind

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
"""Why a stack was not walked to its end, by what the capture says of it."""
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
"""The functions with which threads begin."""
_VERSION = re.compile(r"(@.*|\.abi0)$", re.DOTALL)  # __libc_start_main@@GLIBC_2.34; Go's assembly functions are .abi0
_LIBC = re.compile(r"(libc|libpthread|ld|ld-linux-x86-64|ld-musl-x86_64|libc\.musl-x86_64)(-[0-9.]{1,9})?\.so[0-9.]*")


class End(Enum):
    """How a stack ends."""

    WHOLE = "whole"  # where its program or thread began
    CUT = "cut"  # before that
    UNKNOWN = "unknown"  # in code that could not be read


class WalkedFrame(Protocol):
    """A frame of a stack, as far as it matters how it came to be there."""

    @property
    def module(self) -> Module | None:
        """Where its address is; None where that is not known."""

    @property
    def is_named(self) -> bool:
        """Whether its function is known."""


Each = TypeVar("Each", bound=WalkedFrame)


def without_strays(frames: Sequence[Each], keeps_frame_pointers: Callable[[Module], bool | None]) -> list[Each]:
    """The frames of a stack of an earlier format, without the outermost ones that are false.

    Those are the frames in no mapping of code that come before the first frame in a file. If that file is known to keep
    frame pointers, nothing is left out: its frame pointers lead to callers.

    Args:
        frames: the outermost first.
        keeps_frame_pointers: what was measured of a module; None where nothing was.
    """
    strays = 0
    while strays < len(frames) and _is_nowhere(frames[strays]):
        strays += 1
    if strays == len(frames):  # nothing is known of this process's mappings
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
    """Whether a function of this name is one with which programs or threads begin."""
    return _VERSION.sub("", name) in BEGINNINGS


def has_no_beginning(module: Module) -> bool:
    """Whether no program or thread begins in code of a module, whatever it is."""
    return module.kind is ModuleKind.VDSO or (module.kind is ModuleKind.GENERATED and module.path != NOWHERE)


def end_of(name: str, module: Module | None, is_outermost: bool | None, keeps_frame_pointers: bool | None) -> End:
    """How a stack ends that is not as deep as the limit.

    Args:
        name: of the function of the outermost frame; empty where it has none.
        module: whose code that frame is; None where that is not known.
        is_outermost: what the file says of the frame (symbols.outermost); None where nobody could read that.
        keeps_frame_pointers: what was measured of the module; None where nothing was.
    """
    if is_outermost or is_beginning(name):
        return End.WHOLE
    if module is not None and module.kind is ModuleKind.KERNEL:  # which is not walked by frame pointers
        return End.WHOLE
    if is_outermost is not None:
        return End.CUT
    if module is None or module.kind is not ModuleKind.FILE:
        return End.UNKNOWN
    # The file was not read. The C library does not export the functions in which threads begin, so without debug
    # symbols they have no name; nor has a function that calls back, such as the inner part of qsort.
    if not name and _LIBC.fullmatch(os.path.basename(module.path)):
        return End.UNKNOWN
    return End.CUT if keeps_frame_pointers is False else End.UNKNOWN


def code_of(module: Module | None) -> str:
    """How a module is called if a stack ends in it."""
    if module is None:
        return UNKNOWN_MEMORY
    match module.kind:
        case ModuleKind.FILE:
            return os.path.basename(module.path)[:_LONGEST_FILE]
        case ModuleKind.GENERATED:
            return UNKNOWN_MEMORY if module.path == NOWHERE else GENERATED_CODE
    return module.path


def mark(end: End, module: Module | None, truncated: bool, ended: str | None = None) -> str | None:
    """The frame to show in place of missing ones; None if none is missing, or if that is not known.

    Args:
        end: how the stack ends.
        module: in whose code.
        truncated: whether it is as deep as the limit.
        ended: what the capture says of that, see CUT; None if it says nothing.
    """
    if truncated:
        return TRUNCATED
    if end is not End.CUT:
        return None
    return NO_FRAME_POINTERS.format(code_of(module)) if ended is None else CUT_IN.format(code_of(module), _why(ended))


def _why(ended: str) -> str:
    return CUT.get(ended, "cut")
