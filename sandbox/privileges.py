"""What a child gives up before it touches what strangers wrote: root's user, capabilities, and what it may use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Mapping

NOBODY = 65534
_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
_CAPABILITY_VERSION_3 = 0x2008_0522  # linux/capability.h


def give_up_privileges(limits: Mapping[int, int]) -> None:
    """Makes this process nobody's if it is root's, takes its capabilities for good, and limits what it may use.

    To be called while there is one thread: others would keep their capabilities.

    Args:
        limits: by resource.RLIMIT_*. A limit that is lower already stays.

    Raises:
        OSError: the kernel refuses.
    """
    if os.geteuid() == 0:
        # In a user namespace nobody may not exist; then giving up the capabilities is what can be done.
        with contextlib.suppress(OSError):
            os.setgroups([])
        with contextlib.suppress(OSError):
            os.setresgid(NOBODY, NOBODY, NOBODY)
        with contextlib.suppress(OSError):
            os.setresuid(NOBODY, NOBODY, NOBODY)
    libc = ctypes.CDLL(None)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) != 0:
        raise OSError("the kernel refuses PR_SET_NO_NEW_PRIVS")
    if libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()) != 0:
        raise OSError("capabilities cannot be given up")
    for kind, limit in limits.items():
        # The soft one is inherited, too: who started this may have limited its own memory to less.
        value = min([limit, *(each for each in resource.getrlimit(kind) if each != resource.RLIM_INFINITY)])
        resource.setrlimit(kind, (value, value))
