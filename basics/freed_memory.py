"""Returns freed memory to the system: each stage of a report needs much memory, for arrays of other sizes.

Otherwise what NumPy and Arrow free stays with the process, in fragments too small for the next stage.
"""

from __future__ import annotations

import ctypes

import pyarrow as pa

from iaprof.basics.heap import Parameter, keep_freed, set_parameter

_LARGE = 16 << 20
_MOST_KEPT = 256 << 20


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
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has and needs it
    if trim is not None:
        trim(0)
