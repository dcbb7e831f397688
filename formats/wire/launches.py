"""Records of the BPF programs, as NumPy dtypes: what bpf/c/launches.c and handles.c declare, byte for byte."""

from __future__ import annotations

from enum import IntEnum, IntFlag

import numpy as np

NAME_BYTES = 64
PATH_BYTES = 4096
MAX_DEPTH = 256  # addresses of a stack, a power of two
PAGE_BYTES = 4096
KEPT_SHIFT = 8
PIECE_BYTES = (16 << 10) - 80  # with what goes before it, and the ring buffer's header, 16 KiB

LAUNCH = np.dtype(
    [
        ("time", "<u8"),  # CLOCK_MONOTONIC, ns
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("cpu", "<u4"),
        ("flags", "<u4"),  # LaunchFlags
        ("iba", "<u8"),  # instruction base address, as the runtime says
        ("address", "<u8"),  # GPU address of the kernel's first instruction
        ("size", "<u8"),  # bytes
        ("stack", "<u8"),  # stack id, 0 for none
        ("list", "<u8"),  # handle of the command list that it was appended to; 0 where that is not known
        ("comm", "S16"),
        ("name", f"S{NAME_BYTES}"),  # the kernel's, cut at 63 bytes; empty where the runtime's pointer led nowhere
    ]
)

COMPILED = np.dtype(
    [
        ("time", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("uid", "<u4"),  # real uid and gid, in the initial user namespace, of who fired the probe
        ("gid", "<u4"),
        ("path", f"S{PATH_BYTES}"),
    ]
)

LISTS_A_RECORD = 8
LIST_EVENT = np.dtype(
    [
        ("time", "<u8"),  # CLOCK_MONOTONIC, ns
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("cpu", "<u4"),
        ("flags", "<u4"),  # LaunchFlags
        ("event", "<u4"),  # ListEvent
        ("count", "<u4"),  # of `lists` that count
        ("queue", "<u8"),  # handle of what executes: a queue, or an immediate command list; 0 in other events
        ("stack", "<u8"),  # stack id, 0 for none
        ("comm", "S16"),
        ("lists", "<u8", (LISTS_A_RECORD,)),  # handles of command lists
    ]
)


class ListEvent(IntEnum):
    """What happened to command lists."""

    EXECUTE = 0
    CLOSE = 1
    RESET = 2  # from then on the list is empty
    DESTROY = 3  # from then on its handle may be another list's


PIECE = np.dtype(
    [
        ("time", "<u8"),  # of the launch at which the kernel was described
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("module", "<u8"),  # its handle; 0 where that is not known
        ("module_time", "<u8"),  # of the launch at which it was described first: a handle may be used again
        ("address", "<u8"),  # GPU address of the kernel's first instruction
        ("size", "<u8"),  # bytes of the kernel
        ("offset", "<u8"),  # of this piece in the whole
        ("total", "<u8"),  # bytes of the whole
        ("what", "<u4"),  # PieceOf
        ("bytes", "<u4"),  # of `data` that count
        ("data", f"V{PIECE_BYTES}"),
    ]
)


class PieceOf(IntEnum):
    """What a PIECE is a piece of."""

    NAME = 0  # the kernel's name; in one piece
    CODE = 1  # the kernel's instructions
    MODULE = 2  # the zebin that the kernel came in, as the driver keeps it


COPY = np.dtype(
    [
        ("id", "<u8"),  # of the stack
        ("time", "<u8"),
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("generation", "<u8", (4,)),  # of the process's mappings: born, mm, exec_vm, loads
        ("way", "<u8"),  # key in the map of copies that are on their way
        ("start", "<u8", (8,)),  # registers where the walk began: ip, sp, bp, bx, r12 to r15
        ("end", "<u8", (3,)),  # where it ended: ip, sp, bp
        ("depth", "<u4"),  # addresses, that of the end included
        ("is_exact", "<u2"),  # the end's is an instruction's, no return address
        ("is_sample", "u1"),  # of a CPU sample, not of a launch
        ("has_python", "u1"),  # frames of Python were found
        ("address", "<u8"),  # of the page; 0 of the last record, which has none
        ("page", f"V{PAGE_BYTES}"),
    ]
)


CPU_SAMPLE = np.dtype(
    [
        ("time", "<u8"),  # CLOCK_MONOTONIC, ns
        ("pid", "<u4"),
        ("tid", "<u4"),
        ("stack", "<u8"),  # stack ids, 0 for none
        ("kernel_stack", "<u8"),
        ("cpu", "<u4"),
        ("flags", "<u4"),  # LaunchFlags
    ]
)


def stack_dtype(depth: int) -> np.dtype[np.void]:
    """The dtype of one stack record whose program was loaded with STACK_DEPTH = `depth`."""
    return np.dtype(
        [
            ("id", "<u8"),
            ("time", "<u8"),
            ("pid", "<u4"),
            ("depth", "<u4"),
            # formats.unwind_rules.Walked; from KEPT_SHIFT on, how many addresses that BPF sent with this id go before
            ("walked", "<u8"),
            ("guessed", "<u8", (MAX_DEPTH // 64,)),  # bits: addresses that were found without call frame information
            ("interrupted", "<u8", (MAX_DEPTH // 64,)),  # bits: no return addresses, signals came there
            ("ips", "<u8", (depth,)),  # innermost first
        ]
    )


MAX_PYTHON = 256  # frames of Python of a stack, and ends of evaluation loops among them
CODE_TEXT_BYTES, CODE_TABLE_BYTES = 320, 3104
PYTHON_STACK = np.dtype(
    [
        ("id", "<u8"),  # of the stack
        ("time", "<u8"),
        ("pid", "<u4"),
        ("depth", "<u4"),  # addresses of the C stack that BPF walked
        ("count", "<u4"),  # of frames
        ("state", "<u2"),  # PythonState
        ("kept", "<u2"),  # of user space: so many addresses that BPF walked go before
        ("sp", "<u8"),  # of the innermost frame of C
        ("cfas", "<u8", (MAX_DEPTH,)),  # where the caller of each address has its frame
        # The innermost first. Where code is 0: what ends a loop's frames, and where that lies on the C stack.
        ("frames", np.dtype([("code", "<u8"), ("instruction", "<u8")]), (MAX_PYTHON,)),
    ]
)
"""Frames of Python of a stack, as BPF sends them besides it."""
CODE = np.dtype(
    [
        ("time", "<u8"),
        ("pid", "<u4"),
        ("first_line", "<i4"),
        ("code", "<u8"),  # its address
        ("identity", "<u8"),  # differs between code objects that were at one address
        ("offset", "<u8"),  # of what is here of the bytes object; the texts count only where this is 0
        ("filename", "u1", (CODE_TEXT_BYTES,)),  # of the str object, from its start
        ("qualname", "u1", (CODE_TEXT_BYTES,)),
        ("table", "u1", (CODE_TABLE_BYTES,)),  # of the bytes object with the lines
    ]
)
"""A code object of Python."""


INTERPRETER = b"python  "
"""Begins the learner's messages about interpreters, JSON. No stack has it as its id."""


class PythonState(IntEnum):
    """How a walk through frames of Python ended."""

    NONE = 0  # no interpreter is known, or the thread runs nothing in it
    WHOLE = 1
    DEEP = 2  # there are more than MAX_PYTHON
    DAMAGED = 3  # memory that could not be read


class LaunchFlags(IntFlag):
    """What could not be read of a launch, or was not to be."""

    BAD_ARGS = 1
    NO_STACK = 2
    NO_NAME = 4
    OTHER = 8  # of a process that was not to be recorded: without stack, name and comm
    PRESUMED = 32  # its stack is that of another launch, whose copy was on its way: they ended alike
    TRANSFER = 64  # a copy or a fill, no kernel: no row of kind `launch`
    OWN = 128  # of a kernel of the driver's own, with which it copies and fills
    CARRIED = 16  # happened before this file was begun, and is in the one before it, too


class Counter(IntEnum):
    """Index into the programs' per-CPU counters."""

    LAUNCHES = 0
    LAUNCHES_LOST = 1
    BAD_ARGS = 2
    STACKS = 3
    STACKS_LOST = 4
    STACKS_FAILED = 5
    STACKS_COLLIDED = 6
    COMPILED = 7
    COMPILED_LOST = 8
    PROBE_NS = 9
    OTHERS = 10
    STACKS_TRUNCATED = 11
    HANDLES_UNREADABLE = 12
    HANDLES_UNKNOWN = 13
    HANDLES_ASTRAY = 14
    HANDLES_CHANGED = 15
    KERNELS = 16
    PIECES_LOST = 17
    STACKS_MISSED = 18
    STACKS_PRESUMED = 19
    COPIES_LOST = 20
    SAMPLES = 21
    SAMPLES_LOST = 22
    SAMPLE_NS = 23
    CODES_SENT = 24
    CODES_LOST = 25
    PYTHON_LOST = 26
    EXECUTIONS = 27
    LIST_EVENTS = 28
    LISTS_LOST = 29
    TRANSFERS = 30
    WAITS = 31
    WAITS_LOST = 32
    WAITS_INSIDE = 33
    WAITS_ASTRAY = 34
    WAIT_POLLS = 35
    WAIT_NS = 36
