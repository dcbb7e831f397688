"""Files without a build-id: whether a file is the one that was mapped.

It is if it has the same device and inode, and its change time (ctime) is from before it was mapped. Once a file is
deleted, its inode number may be given to another file, whose change time is later then. Programs can set back the
modification time of a file, but not its change time. If the wall clock was set back, files are refused.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from iaprof.formats.wire.sideband import Mappings

_CLOCK_REALTIME_COARSE = 5  # linux/time.h: what file systems take their times from
_SLACK_NS = 1_000_000  # between two readings of two clocks


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """One file, as it was when it was mapped."""

    device: int  # major number << 32 | minor number
    inode: int
    before_ns: int  # it must not have changed from this time on, CLOCK_REALTIME


@dataclass(slots=True)
class _Mapped:
    since_ns: int  # when first, CLOCK_MONOTONIC
    devices: set[int] = field(default_factory=set)


class MappedFiles:
    """The files without a build-id that a recording saw being mapped."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, int], _Mapped] = {}

    def add(self, mappings: Mappings) -> None:
        """Adds the files of mappings."""
        columns = (mappings.time, mappings.path, mappings.inode, mappings.device)
        for since, path, inode, device in zip(*columns, strict=True):
            if inode is not None and device is not None:
                mapped = self._files.setdefault((path, inode), _Mapped(since))
                mapped.since_ns = min(mapped.since_ns, since)
                mapped.devices.add(device)

    def find(self, path: str, inode: int, header: dict[str, Any]) -> FileIdentity | str:
        """The file that was mapped first with a path and inode, or why it is not known.

        Args:
            path: as its processes saw it.
            inode: its inode number.
            header: of the recording, which this machine made since its last start.
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
    """CLOCK_REALTIME less CLOCK_MONOTONIC when the recording began."""
    clock = header.get("clock")
    read = (clock.get("realtime_ns"), clock.get("monotonic_ns")) if isinstance(clock, dict) else ()
    if len(read) == 2 and isinstance(read[0], int) and isinstance(read[1], int):
        return read[0] - read[1]
    return -(1 << 62)  # nothing is believed
