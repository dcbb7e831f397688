"""Returns freed memory to the system: each stage of a report needs much memory, for arrays of other sizes.

Otherwise what NumPy and Arrow free stays with the process, in fragments too small for the next stage.
"""

from __future__ import annotations

import ctypes

import pyarrow as pa

_MMAP_THRESHOLD, _LARGE = -3, 16 << 20  # malloc.h's M_MMAP_THRESHOLD: malloc unmaps larger blocks when they are freed
_TRIM_THRESHOLD, _MOST_KEPT = -1, 256 << 20  # M_TRIM_THRESHOLD: malloc returns what is free at its end above this
_LARGEST = 32 << 20  # glibc takes no more for M_MMAP_THRESHOLD
_ARENA_MAX = -8  # M_ARENA_MAX: how many heaps threads share


def return_large_blocks_when_freed(least: int = _LARGE) -> None:
    """Makes malloc return blocks of `least` bytes and more to the system as soon as they are freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc and musl have it
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, least)


def keep_freed_blocks() -> None:
    """Makes malloc keep what is freed until `return_free_memory`, but for very large blocks.

    New pages cost more than the work on small arrays. It is for work in pieces, which need arrays of the same sizes.
    Threads that start later use one heap, so that what one of them freed serves the others.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
        mallopt(_ARENA_MAX, 1)


def return_free_memory() -> None:
    """Returns memory that is free now to the system."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has and needs it
    if trim is not None:
        trim(0)
