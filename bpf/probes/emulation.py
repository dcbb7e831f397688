"""Finds probes at instructions that the kernel does not emulate (arch/x86/kernel/uprobes.c).

At such an instruction, the kernel single-steps a copy of it, which takes 2 to 10 us instead of a few hundred ns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

# push, also of r8 to r15; nop; conditional jumps, short and near; jmp and call. Linux 6.1 and later.
EMULATED = re.compile(rb"\x41?[\x50-\x57]|\x90|[\x70-\x7f]|\x0f[\x80-\x8f]|[\xe8\xe9\xeb]", re.DOTALL)
_LONG_NOP = re.compile(rb"\x66*(?:\x90|\x0f\x1f)", re.DOTALL)  # emulated by newer kernels, such as Linux 6.18
_LONGEST = 15  # maximum length of an instruction in bytes


def single_stepped(file_fd: int, offsets: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Returns the names of the places in a file whose instruction no kernel emulates, without duplicates.

    Args:
        file_fd: the open file.
        offsets: name and file offset of each place.

    Raises:
        OSError: the file cannot be read.
    """
    stepped = (name for name, offset in offsets if not _may_be_emulated(os.pread(file_fd, _LONGEST, offset)))
    return tuple(dict.fromkeys(stepped))


def _may_be_emulated(code: bytes) -> bool:
    return bool(EMULATED.match(code) or _LONG_NOP.match(code))
