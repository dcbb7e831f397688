# SPDX-License-Identifier: Apache-2.0
"""How often functions of a file were called: uprobes that only count, without BPF and without iaprof's code.

    with Calls([Place(loader, offset)]) as calls:
        subprocess.run(program)
    calls.total()

Linux counts (perf_event_open(2), the event source `uprobe`), each CPU for itself, whatever process it is that calls:
the file must be one that only the test's programs map.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SYS_PERF_EVENT_OPEN = 298  # x86-64
_FLAG_FD_CLOEXEC = 8
_SOURCE = Path("/sys/bus/event_source/devices/uprobe/type")


@dataclass(frozen=True)
class Place:
    """An instruction in a file: a function's first."""

    name: str
    file: Path
    offset: int  # bytes from the start of the file


class Calls:
    """Counts from `with` on; after its end the numbers stay."""

    def __init__(self, places: Iterable[Place]) -> None:
        """Opens a counter per place.

        Raises:
            OSError: Linux refused, for instance as this is not root.
        """
        self._fds = {place: [_open(place, cpu) for cpu in range(os.cpu_count() or 1)] for place in places}
        self._last: dict[Place, int] = {}

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *error: object) -> None:
        self._last = self.by_place()
        for fds in self._fds.values():
            for fd in fds:
                os.close(fd)
        self._fds = {}

    def by_place(self) -> dict[Place, int]:
        """How often each was called until now."""
        return {place: sum(map(_count, fds)) for place, fds in self._fds.items()} or self._last

    def total(self) -> int:
        """How often any of them was."""
        return sum(self.by_place().values())


def _open(place: Place, cpu: int) -> int:
    path = ctypes.create_string_buffer(os.fsencode(place.file.resolve(strict=True)))
    # struct perf_event_attr up to config2: type, size, config, sample_period, sample_type, read_format, bit field,
    # wakeup_events, bp_type, config1 (the path), config2 (the offset).
    source = int(_SOURCE.read_text())
    attr = struct.pack("<IIQQQQQIIQQ", source, 72, 0, 0, 0, 0, 0, 0, 0, ctypes.addressof(path), place.offset)
    libc = ctypes.CDLL(None, use_errno=True)
    words = (ctypes.create_string_buffer(attr, len(attr)), -1, cpu, -1, ctypes.c_ulong(_FLAG_FD_CLOEXEC))
    fd = int(libc.syscall(ctypes.c_long(_SYS_PERF_EVENT_OPEN), *words))
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: a uprobe at {place.file}+{place.offset:#x}")
    return fd


def _count(fd: int) -> int:
    return int(struct.unpack("<Q", os.read(fd, 8))[0])
