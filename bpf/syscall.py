"""System calls for which Python has no function: syscall(2) itself, and bpf(2).

Source of the numbers: x86-64's system call table and include/uapi/linux/bpf.h, Linux 6.18.
"""

from __future__ import annotations

import ctypes
import os

BPF_MAP_CREATE = 0
BPF_MAP_LOOKUP_ELEM = 1
BPF_MAP_UPDATE_ELEM = 2
BPF_MAP_DELETE_ELEM = 3
BPF_PROG_LOAD = 5
BPF_OBJ_GET_INFO_BY_FD = 15
BPF_MAP_LOOKUP_BATCH = 24
BPF_MAP_UPDATE_BATCH = 26
BPF_MAP_DELETE_BATCH = 27
BPF_LINK_CREATE = 28
_SYS_BPF = 321

_libc = ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *args: object) -> int:
    """Makes a raw system call and returns its result.

    Raises:
        OSError: the call failed.
    """
    result: int = _libc.syscall(ctypes.c_long(number), *args)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def bpf(command: int, attributes: bytes) -> int:
    """Runs a command of the `bpf` system call; see its manual page in section 2.

    Args:
        command: `enum bpf_cmd`.
        attributes: the beginning of `union bpf_attr` that the command takes; the rest is 0.

    Raises:
        OSError: the call failed.
    """
    return bpf_in_place(command, ctypes.create_string_buffer(attributes, max(len(attributes), 64)))


def bpf_in_place(command: int, union: ctypes.Array[ctypes.c_char]) -> int:
    """Runs a command, like `bpf`, that also writes to `union bpf_attr`."""
    return syscall(_SYS_BPF, ctypes.c_int(command), union, ctypes.c_uint(len(union)))
