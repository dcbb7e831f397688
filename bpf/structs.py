"""What user space writes for the BPF programs: structs in their maps, as NumPy dtypes, and numbers in these, as enums.

What the programs send is in formats.wire.launches and formats.header.waits. declarations.py makes the programs' own
declarations of all of these, by the same names: a change here needs `make bytecode`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import numpy as np

from iaprof.bpf.probes.driver_layout import MAX_CLASSES
from iaprof.formats.wire.launches import GENERATION

MAX_ARGS = 5  # of a probe
MAX_STEPS = 16  # of all the paths of a layout that are walked one after the other
NO_REGISTER = 17  # stands for 0


class ArgKind(IntEnum):
    """How a probe's argument is found."""

    NONE = 0
    CONSTANT = 1
    REGISTER = 2
    MEMORY = 3


class Unit(IntEnum):
    """What an argument says of how much is copied."""

    BYTES = 0
    REGION = 1
    NO_NUMBER = 2
    SIZES = 3


class Where(IntEnum):
    """Numbers of the values by which it is told where a kernel is."""

    HANDLE = 0
    CLASS = 1
    ADDRESS = 2
    ADDRESS_MORE = 3


class What(IntEnum):
    """Numbers of the values that describe a kernel; 0 is its handle."""

    BINARY = 1
    BINARY_BYTES = 2
    CODE = 3
    CODE_BYTES = 4
    NAME = 5
    ALLOCATION = 6
    ALLOCATION_BYTES = 7
    MODULE = 8


class Phase(IntEnum):
    """Which program goes on after another: an index into the maps of programs."""

    WALK = 0
    MISS = 1
    COPY = 2
    STATE = 3
    PYTHON = 4
    CODES = 5
    LAUNCHED = 6
    HANDLE_LAUNCHED = 7
    DESCRIBE = 8
    SAMPLED = 9
    EXECUTED = 10
    PROBED_EXECUTED = 11
    TRANSFERRED = 12
    WAIT_BEGUN = 13
    WAITED = 14
    DISPATCHED = 15


ARG = np.dtype(
    [
        ("value", "<i8"),  # the constant, or the displacement
        ("kind", "u1"),  # ArgKind
        ("base", "u1"),  # index into the registers as read_registers of launches.c has them; or NO_REGISTER
        ("index", "u1"),
        ("scale", "u1"),  # as a shift
        ("bits", "u1"),  # 8, 16, 32 or 64
        ("is_signed", "u1"),
        ("shift", "u1"),  # 8 for %ah, %bh, %ch and %dh
        ("pad", "V1"),
    ]
)
PROBE = np.dtype([("args", ARG, (MAX_ARGS,))])
SETTINGS = np.dtype([("epoch", "<u8"), ("scoped", "<u8")])  # of the output file; whether `others` holds anything

STEP = np.dtype([("offset", "<u2"), ("bytes", "u1"), ("from", "u1"), ("to", "u1"), ("pad", "V1"), ("per_gpu", "<u2")])
"""values[to] = the 4 or 8 bytes that lie at values[from] + offset + per_gpu * values[GPU]."""
LAYOUT = np.dtype(
    [
        ("classes", "<u8", (MAX_CLASSES,)),  # addresses in the driver's file; the first again where there are fewer
        ("where_steps", "<u8"),
        ("what_steps", "<u8"),
        ("where", STEP, (MAX_STEPS,)),  # to Where
        ("what", STEP, (MAX_STEPS,)),  # to What; what stays 0 is not known
        ("code_start", "<u8"),  # in the driver's file
        ("code_bytes", "<u8"),
        ("first", "<u2"),  # kernels of the driver's own that are launched together: copies.c
        ("many", "<u2"),
        ("size", "<u2"),
        ("kernel", "<u2", (2,)),
        ("gpu", "<u2", (3,)),  # a path from a launch's queue to the number of its GPU
        # 0, or where a handle has a kernel for each GPU: bits of a handle that are 0, and have that number
        ("gpu_mask", "<u8"),
    ]
)
ENTRY = np.dtype(
    [
        ("address", "<u8"),  # of the probe, in the driver's file
        ("layout", "<u4"),
        ("handle", "u1"),  # which argument, by its offset in pt_regs
        ("count", "u1"),  # so for an array of handles
        ("is_array", "u1"),
        ("flags", "u1"),  # of its launches: LaunchFlags.OWN
        ("offset", "<i2"),  # from that argument to the handle, or to where a kernel's pointer to its module leads
        ("transfer", "u1"),  # which function copies or fills: formats.header.transfers; 0: none
        ("unit", "u1"),  # Unit
        ("list_offset", "<u2"),  # from the first argument to the command list's handle
        ("in_list", "u1"),  # a launch's first argument leads to a command list
        ("event", "u1"),  # ListEvent
        ("nested", "u1"),  # the driver calls it itself, too
        ("pad", "V7"),
    ]
)
WAIT_ENTRY = np.dtype(
    [
        ("address", "<u8"),  # of the probe, in the driver's file
        ("function", "u1"),  # formats.header.waits
        ("handle", "u1"),  # which argument says for what it waits, by its offset in pt_regs
        ("timeout", "u1"),  # likewise, for how long at most; 0 where there is no such argument
        ("is_array", "u1"),  # the handle's is the address of handles
        ("pad", "V4"),
    ]
)

SPACE = np.dtype(
    [
        ("of", GENERATION),
        ("number", "<u8"),  # 15 bits
        # 64 less the binary logarithm of how many buckets are used: the fewer, the more of them are in the caches
        ("shift", "<u8"),
    ]
)
WAY = np.dtype(
    [
        ("id", "<u8"),
        ("until", "<u8"),  # after that time another copy is sent
        ("copies", "<u8"),  # of all such paths; no more than MOST_COPIES are sent
    ]
)

PYTHON_OFFSETS = (  # symbols.python.layout.Layout; what a version does not have is 0
    *("interpreters_head", "threads_head", "interpreter_next", "thread_next", "thread_id", "thread_frame"),
    *("thread_cframe", "cframe_previous", "frame_code", "frame_previous", "frame_instruction", "frame_owner"),
    *("frame_is_entry", "code_filename", "code_qualname", "code_linetable", "code_first_line", "code_version"),
    *("bytes_length", "bytes_data", "frame_bytes"),
)
PYTHON_LAYOUT = np.dtype([*((name, "<u2") for name in PYTHON_OFFSETS), ("pad", "V6")])
PYTHON = np.dtype(
    [
        ("born", "<u8"),  # when the process was, in ticks, as /proc tells it
        ("runtime", "<u8"),
        ("changes", "<u8"),  # how often another code object was found at an address
        ("layout", PYTHON_LAYOUT),
    ]
)

_CODES = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i2": "h", "i8": "q"}


def pack(dtype: np.dtype[np.void], *values: int) -> bytes:
    """A struct with these values, those of arrays and of structs in it one after the other, without `pad`.

    Raises:
        struct.error: they are too many, too few or too large.
    """
    return struct.pack(f"<{_format(dtype)}", *values)


def _format(dtype: np.dtype[Any]) -> str:
    if dtype.subdtype is not None:
        of, (count,) = dtype.subdtype
        return _format(of) * int(count)
    if dtype.names is not None:
        return "".join(f"{dtype[name].itemsize}x" if name == "pad" else _format(dtype[name]) for name in dtype.names)
    return _CODES[dtype.str[1:]]
