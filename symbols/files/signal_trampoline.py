"""Finds the code to which signal handlers return, and names it `__restore_rt`, as the C libraries do in their sources.

glibc and musl give the Linux kernel this code, which makes the system call rt_sigreturn, with each handler. Stripped
libraries have no symbol for it, and in others it begins behind the address that stands for a handler's caller: a stack
has the address of its first instruction as the return address, and the instruction that did the call is looked for one
byte before. gdb shows `<signal handler called>` here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.elf import STT_FUNC
from iaprof.formats.elf_tables import SYMBOL
from iaprof.symbols.files.elf import Elf, SymbolTable
from iaprof.symbols.unwind.cfi import CallFrames
from iaprof.symbols.unwind.dwarf_reader import Bytes, CfiError

NAME = b"__restore_rt"
MOST_ADDRESSES = 1 << 15  # a fraction of a second
_CODE = b"\x48\xc7\xc0\x0f\x00\x00\x00\x0f\x05"  # mov $15, %rax; syscall
_BEFORE = 1  # byte before the code, which belongs to it


def signal_trampolines(elf: Elf, content: Bytes, addresses: NDArray[np.uint64]) -> SymbolTable:
    """Returns, as functions, the code to which signal handlers return, where an address is in it.

    Args:
        elf: the file with the code.
        content: of the same file.
        addresses: uint64[n], virtual addresses in the file; for more than MOST_ADDRESSES, no code is found.
    """
    around = len(_CODE) - 1 + _BEFORE
    starts = set()
    for address in addresses.tolist() if len(addresses) <= MOST_ADDRESSES else ():
        first = max(address - around + _BEFORE, 0)
        at = elf.at(first, address + _BEFORE + len(_CODE) - first).find(_CODE)
        if at >= 0:
            starts.add(first + at)
    symbols = np.zeros(len(starts), SYMBOL)
    for row, start in enumerate(sorted(starts)):
        if _may_end_handlers(content, start):
            symbols[row] = (0, STT_FUNC, 0, 0, start - _BEFORE, _BEFORE + len(_CODE))
    return SymbolTable(symbols[symbols["size"] > 0], symbols["value"][symbols["size"] > 0], NAME)


def _may_end_handlers(content: Bytes, address: int) -> bool:
    """Tells whether call frame information says that a signal handler returns to an address, or does not cover it."""
    try:
        function = CallFrames(content).function(address)
    except CfiError:
        return True
    return function is None or function.cie.is_signal_frame
