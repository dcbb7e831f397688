"""Structs that user space writes to maps of the BPF programs, as NumPy dtypes, and the enums in them.

Records that the programs send are in formats.wire.launches and formats.header.waits. programs.py generates the C
declarations of all of these: a change here needs `make bytecode`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import numpy as np

from iaprof.formats.wire.launches import MAPPING_STATE, PYTHON_LAYOUT

MAX_ARGS = 7  # of a probe
MAX_CLASSES = 8  # of a driver's kernels, by their handles
MAX_OPERATIONS = 32  # kinds of them, a power of two; the last one has no name
MAX_STEPS = 16  # of `address_steps` and of `description_steps` in LAYOUT
NO_REGISTER = 17  # as a register's index: the value 0


class ArgKind(IntEnum):
    """Where a probe's argument is."""

    NONE = 0
    CONSTANT = 1
    REGISTER = 2
    MEMORY = 3


class SizeKind(IntEnum):
    """How an argument gives the size of a copy or fill."""

    BYTES = 0  # the argument is the number of bytes
    REGION = 1  # it points to a ze_copy_region_t
    NO_NUMBER = 2  # unknown
    SIZES = 3  # it points to three size_t, whose product is the number of bytes


class AddressValue(IntEnum):
    """Indices of the values that are read at every launch: they check a handle and give its kernel's address."""

    HANDLE = 0
    CLASS = 1
    ADDRESS = 2
    ADDRESS_MORE = 3  # of a shader: its size


class DescriptionValue(IntEnum):
    """Indices of the values that describe a kernel, read at its first launch; 0 is its handle."""

    BINARY = 1
    BINARY_BYTES = 2
    CODE = 3
    CODE_BYTES = 4
    NAME = 5
    ALLOCATION = 6
    ALLOCATION_BYTES = 7
    MODULE = 8


class Phase(IntEnum):
    """The program that a tail call continues with: an index into the program-array maps."""

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
    SUBMITTED = 16
    DRAWN = 17
    OPERATED = 18
    KNOWN = 19
    KEEP = 20


ARG = np.dtype(
    [
        ("value", "<i8"),  # the constant, or the displacement
        ("kind", "u1"),  # ArgKind
        ("base", "u1"),  # index into the array that read_registers of launches.c fills; or NO_REGISTER
        ("index", "u1"),
        ("scale", "u1"),  # as a shift
        ("bits", "u1"),  # 8, 16, 32 or 64
        ("is_signed", "u1"),
        ("shift", "u1"),  # of the register's value to the right: 8 for %ah, %bh, %ch and %dh
        ("pad", "V1"),
    ]
)
PROBE = np.dtype([("args", ARG, (MAX_ARGS,))])
SETTINGS = np.dtype(
    [
        ("epoch", "<u8"),  # number of the output file
        ("generation", "<u8"),  # of the sums of short waits
        ("scoped", "<u8"),  # whether launches, copies and waits of processes in `others` come in short
    ]
)

STEP = np.dtype([("offset", "<u2"), ("bytes", "u1"), ("from", "u1"), ("to", "u1"), ("pad", "V1"), ("per_gpu", "<u2")])
"""One step along a path of pointers: values[to] = the 4 or 8 bytes at values[from] + offset + per_gpu * values[GPU]."""
LAYOUT = np.dtype(
    [
        ("classes", "<u8", (MAX_CLASSES,)),  # addresses in the driver's file; unused elements repeat the first
        ("address_step_count", "<u8"),
        ("description_step_count", "<u8"),
        ("address_steps", STEP, (MAX_STEPS,)),  # lead to AddressValue
        ("description_steps", STEP, (MAX_STEPS,)),  # lead to DescriptionValue; values that stay 0 are unknown
        ("code_start", "<u8"),  # of the driver's code, in its file
        ("code_bytes", "<u8"),
        ("first", "<u2"),  # this and the next three: driver_layout.Dispatch
        ("many", "<u2"),
        ("size", "<u2"),
        ("kernel", "<u2", (2,)),
        ("gpu", "<u2", (3,)),  # path of offsets from a launch's queue to the number of its GPU
        # driver_layout.Layout.window, 0 if there is none; then `bound` and `pipeline`.
        ("window_start", "<u8"),
        ("window_bytes", "<u8"),
        ("bound", "<u4", (2,)),
        ("bound_count", "<u4"),
        ("pipeline", "<u4"),
        ("drawn", "<u4", (2,)),  # driver_layout.Layout.drawn and stages
        ("drawn_count", "<u4"),
        ("stages", "<u2", (2,)),
        ("kind", "<u2", (3,)),  # driver_layout.Layout.kind
        ("simd", "<u2"),  # driver_layout.Layout.simd and stage
        ("stage", "<u2"),
        ("of_operations", "<u2", (5,)),  # driver_layout.Operations: function, kernel, data, size, kind
        ("stage_count", "<u2"),  # driver_layout.Layout.stage_count
        ("pad", "V2"),
        ("operation_names", "<u8", (2 * MAX_OPERATIONS,)),  # texts of 16 bytes with a zero at their end, by number
        # The low bits of a handle, which are 0, if a handle has a kernel for each GPU: there the programs put the GPU's
        # number. Else 0.
        ("gpu_mask", "<u8"),
    ]
)
ENTRY = np.dtype(
    [
        ("address", "<u8"),  # of the probe, in the driver's file
        ("layout", "<u4"),  # index into `layouts`
        ("handle", "u1"),  # offset in pt_regs of the argument that is the handle, or the array of handles
        ("count", "u1"),  # offset in pt_regs of the argument that is the array's length
        ("is_array", "u1"),
        ("flags", "u1"),  # of its launches: 0 or LaunchFlags.OWN
        ("offset", "<i2"),  # from that argument to the handle, or to the address that a kernel's module pointer has
        ("transfer", "u1"),  # number of the function that copies or fills, formats.header.transfers; 0 for others
        ("size_kind", "u1"),  # SizeKind
        ("list_offset", "<u2"),  # from the first argument to the command list's handle
        ("in_list", "u1"),  # a launch's first argument leads to a command list
        ("event", "u1"),  # ListEvent
        ("nested", "u1"),  # the driver also calls the function itself
        # Of a function that draws, or makes pipelines that draw: the number of stages that these may have; else 0.
        ("stages", "u1"),
        ("pad", "V6"),
    ]
)
WAIT_ENTRY = np.dtype(
    [
        ("address", "<u8"),  # of the probe, in the driver's file
        ("function", "u1"),  # its number, formats.header.waits
        ("handle", "u1"),  # offset in pt_regs of the argument that is the handle of what it waits for
        ("timeout", "u1"),  # offset in pt_regs of the argument that is the timeout; 0 if it has none
        ("is_array", "u1"),  # the handle's argument is the address of an array of handles
        ("pad", "V4"),
    ]
)

SPACE = np.dtype(
    [
        ("of", MAPPING_STATE),
        ("number", "<u8"),  # 15 bits
        ("shift", "<u8"),  # 64 - RuleTable.bits
    ]
)
MISSED_PATH = np.dtype(
    [
        ("id", "<u8"),  # of the stack that launches on this path get; of all paths: 0 if no rule leads on from one
        ("until", "<u8"),  # CLOCK_MONOTONIC ns; afterwards another copy is sent
        ("copies", "<u8"),  # number of copies sent of a thread's walks that end alike; if id is 0, at most MOST_COPIES
    ]
)
"""A path on which a walk lacked a rule, or all paths of a thread whose walks end alike."""
COPYING = np.dtype(
    [
        ("copies", "<u8"),  # number of those of a process's stacks,
        ("records", "<u8"),  # and of their records: pages, and one more for each
        ("last", "<u8"),  # CLOCK_MONOTONIC ns of the last one
    ]
)

PYTHON = np.dtype(
    [
        ("born", "<u8"),  # start of the process in ticks, as in /proc/PID/stat
        ("runtime", "<u8"),  # address of _PyRuntime
        ("changes", "<u8"),  # how often another code object was found at a known address
        ("layout", PYTHON_LAYOUT),
    ]
)

_CODES = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i2": "h", "i8": "q"}


def pack(dtype: np.dtype[np.void], *values: int) -> bytes:
    """Packs values into a struct: in the order of its members, with arrays and nested structs flattened, without `pad`.

    Raises:
        struct.error: there are too many or too few values, or one is too large.
    """
    return struct.pack(f"<{_format(dtype)}", *values)


def _format(dtype: np.dtype[Any]) -> str:
    if dtype.subdtype is not None:
        of, (count,) = dtype.subdtype
        return _format(of) * int(count)
    if dtype.names is not None:
        return "".join(f"{dtype[name].itemsize}x" if name == "pad" else _format(dtype[name]) for name in dtype.names)
    return _CODES[dtype.str[1:]]
