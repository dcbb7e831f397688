"""Finds code without a caller, where programs and threads begin, without needing names.

Call frame information marks some functions by an undefined return address: _start, and the code that clone's child
runs. These call two functions of the C library: the one that calls main, and the one that calls a thread's function.
Only debug files have the names of these two, but their code is recognisable: it ends the thread itself, with the system
call exit and a jump back to it.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from iaprof.symbols.unwind.cfi import CallFrames
from iaprof.symbols.unwind.dwarf_reader import Bytes, CfiError

MOST_ADDRESSES = 1 << 15  # one second
_MOST_FUNCTION_BYTES = 1 << 14  # of a function that may end a thread; glibc's has 1 KiB
# mov $60,%r32 (the number of exit); a few instructions; syscall; jmp back, as exit does not return.
_ENDS_THREAD = re.compile(rb"[\xb8-\xbf]\x3c\x00\x00\x00.{0,24}?\x0f\x05\xeb[\x80-\xff]", re.DOTALL)


def outermost(content: Bytes, addresses: NDArray[np.uint64]) -> NDArray[np.bool_] | None:
    """Tells for each address whether its function has no caller: bool[n].

    Returns None if the file has no call frame information, or for more than MOST_ADDRESSES addresses.

    Args:
        content: of the ELF file with the code.
        addresses: uint64[n], virtual addresses in the file; for a return address, that of the byte before it.
    """
    if len(addresses) > MOST_ADDRESSES:
        return None
    try:
        frames = CallFrames(content)
    except CfiError:
        return None
    if not frames.has_functions:
        return None
    ends_thread: dict[int, bool] = {}  # by the start of a function
    return np.array([_has_no_caller(frames, address, ends_thread) for address in addresses.tolist()], bool)


def _has_no_caller(frames: CallFrames, address: int, ends_thread: dict[int, bool]) -> bool:
    try:
        function = frames.function(address)
        row = frames.row_in(function, address)
    except CfiError:
        return False
    if function is None or (row is not None and row.is_outermost):
        return row is not None
    if function.start not in ends_thread:
        code = frames.at(function.start, function.size) if function.size <= _MOST_FUNCTION_BYTES else b""
        ends_thread[function.start] = _ENDS_THREAD.search(code) is not None
    return ends_thread[function.start]
