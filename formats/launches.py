"""The records that the BPF programs send, as NumPy dtypes: what bpf/launches.c declares, byte for byte."""

from __future__ import annotations

from enum import IntEnum, IntFlag

import numpy as np

NAME_BYTES = 64
PATH_BYTES = 4096

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


def stack_dtype(depth: int) -> np.dtype[np.void]:
    """The dtype of one stack record whose program was built with STACK_DEPTH = `depth`."""
    return np.dtype([("id", "<u8"), ("time", "<u8"), ("pid", "<u4"), ("depth", "<u4"), ("ips", "<u8", (depth,))])


class LaunchFlags(IntFlag):
    """What could not be read of a launch, or was not to be."""

    BAD_ARGS = 1
    NO_STACK = 2
    NO_NAME = 4
    OTHER = 8  # of a process that was not to be recorded: without stack, name and comm
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
