"""Keeping little memory that is not used: the stages of a report need much of it, one after the other.

What NumPy and Arrow free would otherwise stay with the process, in pieces of which none fits the next stage.
"""

from __future__ import annotations

import ctypes

import pyarrow as pa

_MMAP_THRESHOLD, _LARGE = -3, 16 << 20  # M_MMAP_THRESHOLD of malloc.h: what is larger goes back when it is freed


def keep_little() -> None:
    """Has malloc give back at once what was large."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's and musl's
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)


def give_back() -> None:
    """Gives back what is free now."""
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it, and only glibc needs it
    if trim is not None:
        trim(0)
