"""Where in a function to put a uprobe, so that it costs least.

Some instructions the kernel emulates (arch/x86/kernel/uprobes.c, Linux 6.1): pushes, nops, relative jumps and calls. A
uprobe there costs 1.5 us. Others, such as the endbr64 that begins a function, it executes apart, which costs 10 us.
"""

from __future__ import annotations

import re

# endbr64, and `test` of two 64-bit registers: neither changes a register, the stack or memory.
_PASSED = re.compile(rb"\xf3\x0f\x1e\xfa|[\x48-\x4f]\x85[\xc0-\xff]")
# push, with the prefix for r8 to r15; nop; jump if, near and far; jump and call.
_EMULATED = re.compile(rb"\x41?[\x50-\x57]|\x90|[\x70-\x7f]|\x0f[\x80-\x8f]|[\xe8\xe9\xeb]", re.DOTALL)
LENGTH = 32  # bytes of a function that are looked at


def probe_offset(code: bytes) -> int:
    """How many bytes behind a function's beginning to probe it: nothing has changed there since it was called.

    0, where any other instruction than those that are known comes first.
    """
    at = 0
    while passed := _PASSED.match(code, at):
        at = passed.end()
    return at if _EMULATED.match(code, at) else 0
