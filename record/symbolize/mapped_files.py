"""Files without a build-id: whether a file is the one that was mapped.

It is if it has the same device and inode, and its change time (ctime) is older than the mapping. After a file is
deleted, its inode number can be reused for another file, which then has a later change time. Programs can set a file's
modification time back, but not its change time. If the wall clock was set back, files are refused.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.sideband import Mappings

_CLOCK_REALTIME_COARSE = 5  # linux/time.h; file systems take their times from it
MOST_FILES = 1 << 18
_SLACK_NS = 1_000_000  # between two readings of two clocks


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file, as it was when it was mapped."""

    device: int  # major number << 32 | minor number
    inode: int
    before_ns: int  # CLOCK_REALTIME; the file must not have changed at this time or later


@dataclass(slots=True)
class _Mapped:
    since_ns: int  # of the first mapping, CLOCK_MONOTONIC
    devices: set[int] = field(default_factory=set)


class MappedFiles:
    """The files without a build-id that were mapped in a recording."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, int], _Mapped] = {}

    def add(self, mappings: Mappings, chosen: NDArray[np.bool_] | None = None) -> None:
        """Adds the files of chosen mappings; beyond MOST_FILES, none that is new.

        Args:
            mappings: n of them.
            chosen: bool[n]; None for all.
        """
        rows = zip(mappings.time, mappings.path, mappings.inode, mappings.device, strict=True)
        for since, path, inode, device in rows if chosen is None else itertools.compress(rows, chosen):
            if inode is not None and device is not None:
                if len(self._files) >= MOST_FILES and (path, inode) not in self._files:
                    continue
                mapped = self._files.setdefault((path, inode), _Mapped(since))
                mapped.since_ns = min(mapped.since_ns, since)
                mapped.devices.add(device)

    def find(self, path: str, inode: int, header: dict[str, Any]) -> FileIdentity | str:
        """Returns the file that was mapped first with a path and inode, or why it is not known.

        Args:
            path: of the file in its processes.
            inode: its inode number.
            header: of the recording, made on this machine since its last start.
        """
        mapped = self._files.get((path, inode))
        if mapped is None:
            return "it has no build-id, and the recording does not say which file was mapped"
        if len(mapped.devices) > 1:
            return "it has no build-id, and files of this path and inode were mapped from several devices"
        # The wall clock may have been set since: the smaller difference makes the stricter test.
        offset = min(time.time_ns() - time.monotonic_ns(), _offset(header))
        tick = int(time.clock_getres(_CLOCK_REALTIME_COARSE) * 1e9)
        (device,) = mapped.devices
        return FileIdentity(device, inode, mapped.since_ns + offset - tick - _SLACK_NS)


def _offset(header: dict[str, Any]) -> int:
    """Returns CLOCK_REALTIME minus CLOCK_MONOTONIC at the start of the recording."""
    clock = header.get("clock")
    read = (clock.get("realtime_ns"), clock.get("monotonic_ns")) if isinstance(clock, dict) else ()
    if len(read) == 2 and isinstance(read[0], int) and isinstance(read[1], int):
        return read[0] - read[1]
    return -(1 << 62)  # so that every file is refused
