"""The heap of this process (glibc, mallopt(3))."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_*
_MOST_MAPPED = 1 << 25  # the largest M_MMAP_THRESHOLD that glibc takes, HEAP_MAX_SIZE / 2


def keep_freed(least: int) -> None:
    """Makes malloc keep up to so many freed bytes, and gives it as many now.

    Without this, malloc maps memory for each large array anew, and the kernel clears each page when it is first used:
    with a hypervisor below, that takes ten times as long as copying a page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc and musl have it
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MOST_MAPPED)
        mallopt(_TRIM_THRESHOLD, 2 * least)
        bytearray(least)
