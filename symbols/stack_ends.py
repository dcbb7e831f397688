"""Where a stack ends, and why there, when that is not where its thread began.

A stack is walked by frame pointers, up to a limit of depth. Code that was built without frame pointers uses their
register for other things. There the walk ends, or goes on for one or two frames with whatever lies on the stack: who
knows which library that is can rebuild it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from iaprof.symbols.address_space import NOWHERE
from iaprof.symbols.modules import Module, ModuleKind

TRUNCATED = "[truncated]"
NO_FRAME_POINTERS = "[no frame pointers: {}]"
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
_UNNAMED = re.compile(r"\[.*\+0x[0-9a-f]+\]", re.DOTALL)


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
    """The frames but for the outermost that are none: what the walk took for return addresses.

    That is what lies in no mapping of code and comes before a file's code: when the walk got to the C library's first
    function, or into a library without frame pointers, it read on from a register that was no frame pointer. Behind
    code that is known to keep them nothing is left out: what they lead to is a caller, wherever it is.

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


def where_it_ends(name: str, module: Module | None, truncated: bool, keeps_frame_pointers: bool | None) -> str | None:
    """What to say in place of the frames that are missing; None where none is, or nothing is known of them.

    The C library's first functions of a thread (start_thread, __libc_start_call_main) are no exported ones: without
    its debug symbols they have no name. So an unnamed frame of the C library is taken for one of them, although it may
    be one that calls back, like the inner part of qsort: most stacks end there as they should, and to
    mark all of them would make the mark worthless.

    Args:
        name: of the outermost frame; empty or `[file+0x1234]` where its function has none.
        module: whose code that frame is; None where that is not known.
        truncated: the stack has as many frames as a recorder keeps.
        keeps_frame_pointers: what was measured of the module; None where nothing was.
    """
    if truncated:
        return TRUNCATED
    # The kernel is not walked by frame pointers, and nobody can measure what a process generates.
    if module is None or module.kind is not ModuleKind.FILE or keeps_frame_pointers is not False:
        return None
    file = os.path.basename(module.path)
    is_unnamed = not name or _UNNAMED.fullmatch(name) is not None
    if _VERSION.sub("", name) in BEGINNINGS or (is_unnamed and _LIBC.fullmatch(file)):
        return None
    return NO_FRAME_POINTERS.format(file[:_LONGEST_FILE])
