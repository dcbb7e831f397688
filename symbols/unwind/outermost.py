"""Which code has no caller: where programs and threads begin, found without names.

Call frame information marks some functions: their return address is undefined (_start, and what clone's child runs).
These call two functions of the C library: the one that calls main, and the one that calls a thread's function. Only
debug files have their names, but they end the thread themselves, with the system call exit and a jump back to it.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from iaprof.symbols.unwind.cfi import CallFrames
from iaprof.symbols.unwind.dwarf_reader import Bytes, CfiError

MOST_ADDRESSES = 1 << 15  # one second
_MOST_FUNCTION_BYTES = 1 << 14  # of one that may end a thread: that of glibc has 1 KiB
# mov $60,%r32 (the number of exit); a few instructions; syscall; jmp back, as exit does not return.
_ENDS_THREAD = re.compile(rb"[\xb8-\xbf]\x3c\x00\x00\x00.{0,24}?\x0f\x05\xeb[\x80-\xff]", re.DOTALL)


def outermost(content: Bytes, addresses: NDArray[np.uint64]) -> NDArray[np.bool_] | None:
    """Whether the code at each address has no caller: bool[n].

    None if the file has no call frame information, or for more than MOST_ADDRESSES addresses.

    Args:
        content: of the ELF file whose code it is.
        addresses: uint64[n], as its program header has them; of a return address the byte before it.
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
