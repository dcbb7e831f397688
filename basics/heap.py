"""The heap of this process: mallopt(3), where the C library has it."""

from __future__ import annotations

import ctypes
from enum import IntEnum

LARGEST_MAPPED = 32 << 20  # glibc takes no more for MMAP_THRESHOLD


class Parameter(IntEnum):
    """M_* of malloc.h."""

    TRIM_THRESHOLD = -1  # malloc returns what is free at the heap's end above this
    MMAP_THRESHOLD = -3  # malloc maps larger blocks one by one, and unmaps them when they are freed
    ARENA_MAX = -8  # how many heaps threads share


def set_parameter(parameter: Parameter, value: int) -> None:
    """Changes how malloc works from now on."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc and musl have it
    if mallopt is not None:
        mallopt(parameter, value)


def keep_freed(most: int) -> None:
    """Makes malloc keep up to so many freed bytes: the kernel clears each new page, which takes longer than a copy."""
    set_parameter(Parameter.MMAP_THRESHOLD, LARGEST_MAPPED)
    set_parameter(Parameter.TRIM_THRESHOLD, most)


def take_in_advance(size: int) -> None:
    """Makes malloc have so many bytes, and keeps them."""
    keep_freed(2 * size)
    bytearray(size)
