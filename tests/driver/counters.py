# SPDX-License-Identifier: Apache-2.0
"""Linux's own count of how often an instruction of a file is executed, by whichever process: perf's, without BPF."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_PERF_EVENT_OPEN = 298


@contextlib.contextmanager
def counting(library: Path, offset: int) -> Iterator[list[int]]:
    """Descriptors of perf's counters of a uprobe, one for each CPU: without BPF."""
    kind = int(Path("/sys/bus/event_source/devices/uprobe/type").read_text())
    path = ctypes.create_string_buffer(os.fsencode(library))
    # struct perf_event_attr: type, size, config; config1 and config2 are the path and the offset in the file
    attributes = bytearray(128)
    struct.pack_into("<II", attributes, 0, kind, len(attributes))
    struct.pack_into("<QQ", attributes, 56, ctypes.addressof(path), offset)
    fds = []
    try:
        for cpu in sorted(os.sched_getaffinity(0)):
            block = (ctypes.c_char * len(attributes)).from_buffer(attributes)
            fd = ctypes.CDLL(None, use_errno=True).syscall(_PERF_EVENT_OPEN, block, -1, cpu, -1, 8)
            assert fd >= 0, os.strerror(ctypes.get_errno())
            fds.append(fd)
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def counted(fds: list[int]) -> int:
    return sum(struct.unpack("<Q", os.read(fd, 8))[0] for fd in fds)
