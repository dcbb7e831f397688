"""Gives up a child process's user root and its capabilities, and limits its resources, before it reads hostile data."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Mapping

NOBODY = 65534
_PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
_CAPABILITY_VERSION_3 = 0x2008_0522  # linux/capability.h


def give_up_privileges(limits: Mapping[int, int], user: tuple[int, int] = (NOBODY, NOBODY)) -> None:
    """Changes the user from root to nobody or another, drops all capabilities for good, and sets resource limits.

    Call it while the process has only one thread, because other threads would keep their capabilities.

    Args:
        limits: values by resource.RLIMIT_*. Lower limits that are in force stay.
        user: uid and gid, in place of root. If this is root, too, as with sudo in a root shell, it is nobody:
            reading root's files takes no capability.

    Raises:
        OSError: the kernel refuses.
    """
    if os.geteuid() == 0:
        user = user if user[0] else (NOBODY, NOBODY)
        # A user namespace may lack the user nobody; then dropping the capabilities has to suffice.
        with contextlib.suppress(OSError):
            os.setgroups([])
        with contextlib.suppress(OSError):
            os.setresgid(*[user[1]] * 3)
        with contextlib.suppress(OSError):
            os.setresuid(*[user[0]] * 3)
    libc = ctypes.CDLL(None)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) != 0:
        raise OSError("the kernel refuses PR_SET_NO_NEW_PRIVS")
    if libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()) != 0:
        raise OSError("capabilities cannot be given up")
    for kind, limit in limits.items():
        # Also respects the soft limit, as the parent may have limited its own memory to less.
        value = min([limit, *(each for each in resource.getrlimit(kind) if each != resource.RLIM_INFINITY)])
        resource.setrlimit(kind, (value, value))
