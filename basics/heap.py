"""The heap of this process: what malloc keeps of freed memory, where the C library has mallopt(3).

Each stage of a report needs much memory, for arrays of other sizes. What NumPy and Arrow free otherwise stays with the
process, in fragments too small for the next stage.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

LARGEST_MAPPED = 32 << 20  # glibc takes no more for MMAP_THRESHOLD

_LARGE = 16 << 20
_MOST_KEPT = 256 << 20


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


def return_large_blocks_when_freed(least: int = _LARGE) -> None:
    """Makes malloc return blocks of `least` bytes and more to the system as soon as they are freed."""
    set_parameter(Parameter.MMAP_THRESHOLD, least)


def keep_freed_blocks() -> None:
    """Makes malloc keep what is freed until `return_free_memory`, but for very large blocks.

    New pages cost more than the work on small arrays. It is for work in pieces, which need arrays of the same sizes.
    Threads that start later use one heap, so that what one of them freed serves the others.
    """
    keep_freed(_MOST_KEPT)
    set_parameter(Parameter.ARENA_MAX, 1)


def return_free_memory() -> None:
    """Returns memory that is free now to the system."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has and needs it
    if trim is not None:
        trim(0)
