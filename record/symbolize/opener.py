"""Opens files that recorded processes name, with their rights, in the debug-ELF collector's child (collector_child.py).

Used at the end of a recording, for one file after the other. A file that cannot be opened in time costs its names only.

A file without a build-id is the one that was mapped if it has the same device and inode, and its change time (ctime) is
older than the mapping. After a file is deleted, its inode number can be reused for another file, which then has a later
change time. Programs can set a file's modification time back, but not its change time. If the wall clock was set back,
files are refused.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.file_names import as_text, possible_names
from iaprof.formats.wire.process_maps import mappings, maps_of
from iaprof.formats.wire.sideband import Mappings
from iaprof.record.kernels.collector import start_child
from iaprof.record.kernels.collector_child import ABSENT, ANOTHER, FORBIDDEN, NOT_REGULAR
from iaprof.sandbox.worker import Closing, Worker

TIMEOUT_S = 2.0
_LAST_WAIT_S = 0.2  # for a killed child to end: a file system in user space may keep it
MAX_HANGS = 8  # of one user, whose file system in user space may hang at every file
LATE, DIED = "opening it took too long", "the process that opens it died"
OTHERS_LATE = "other files of its user took too long to open"
ELSEWHERE = (ABSENT, ANOTHER)
"""Reasons that tell nothing of the file, as it is not at this place now."""
UNREADABLE = (FORBIDDEN, NOT_REGULAR)
"""Reasons for which its process cannot read the file."""


class Rights(NamedTuple):
    """With whose rights a file is opened."""

    uid: int
    gid: int
    account: str = ""  # which answers for that user's process; empty if only the user is known

    @property
    def answerable(self) -> str:
        """Who is answerable for what the files do."""
        return self.account or f"user {self.uid}"


class Opener(Closing):
    """The child process that opens files; also a context manager. The child starts when it is needed."""

    def __init__(self) -> None:
        self._child: Worker | None = None
        self._hangs: Counter[str] = Counter()  # by account

    def open(
        self,
        path: str,
        rights: Rights,
        pid: int = 0,
        owner: int | None = None,
        below: int | str | None = None,
        same: FileIdentity | None = None,
    ) -> int | str:
        """Opens a regular file below the root of a process, or below ours.

        Args:
            path: absolute, as the process saw it.
            rights: the user and group to open it as.
            pid: the process with the root; 0 for ours.
            owner: the user that the file must belong to; None for any.
            below: the root in place of an ended process's: a descriptor, or the path of a folder.
            same: the file it must be; None for any.

        Returns:
            A descriptor for reading, which the caller closes; or why the file was not opened.
        """
        request: dict[str, Any] = {"pid": pid, "owner": owner, "same": _numbers(same)}
        if isinstance(below, str):
            request["below"] = below.encode("utf-8", "surrogateescape").hex()
        file_or_reason: int | str = ABSENT
        for name in possible_names(path):
            file_or_reason = self._ask(
                request | {"path": name.hex()}, rights, below if isinstance(below, int) else None
            )
            if file_or_reason != ABSENT:
                break
        return file_or_reason

    def open_mapped(
        self, pid: int, path: str, inode: int, rights: Rights, same: FileIdentity | None = None
    ) -> int | str:
        """Opens the file that a running process has mapped from a path, even if it was deleted since.

        Args:
            pid: the process.
            path: of the mapping.
            inode: of the file; 0 if unknown.
            rights: see `open`.
            same: see `open`.
        """
        for mapping in mappings(maps_of(pid)):
            if as_text(mapping.name) in (path, f"{path} (deleted)") and inode in (0, mapping.inode):
                return self._ask({"pid": pid, "mapped": mapping.span, "same": _numbers(same)}, rights)
        return "it is not mapped any more"

    def open_mapping(self, pid: int, start: int, end: int, rights: Rights, same: FileIdentity) -> int | str:
        """Opens the file that a running process has mapped at an address; see `open_mapped`."""
        return self._ask({"pid": pid, "mapped": f"{start:x}-{end:x}", "same": _numbers(same)}, rights)

    def _ask(self, request: dict[str, Any], rights: Rights, root: int | None = None) -> int | str:
        if self._hangs[rights.answerable] >= MAX_HANGS:
            return OTHERS_LATE
        self.start()
        assert self._child is not None
        request |= {"open": True, "uid": rights.uid, "gid": rights.gid}
        try:
            self._child.send(request, [] if root is None else [root])
            answer, fds = self._child.within(TIMEOUT_S, self._child.receive)
        except (OSError, ValueError) as error:
            self._hangs[rights.answerable] += 1
            self.close()
            return LATE if isinstance(error, TimeoutError) else DIED
        if fds and "refused" not in answer:
            return fds[0]
        for fd in fds:
            os.close(fd)
        return str(answer.get("refused", "it cannot be opened"))

    def start(self) -> None:
        """Starts the child, which otherwise starts when it is first needed.

        Raises:
            OSError: it cannot be started.
        """
        if self._child is None:
            self._child = start_child()

    def forget_hangs(self) -> None:
        """Forgets which users' files took too long."""
        self._hangs.clear()

    def close(self) -> None:
        """Ends the child; the next call starts another one."""
        if self._child is not None:
            self._child.close(_LAST_WAIT_S)
            self._child = None


def _numbers(same: FileIdentity | None) -> list[int] | None:
    return None if same is None else [same.device, same.inode, same.before_ns]


_CLOCK_REALTIME_COARSE = 5  # linux/time.h; file systems take their times from it
MOST_FILES = 1 << 18
_SLACK_NS = 1_000_000  # between two readings of two clocks


class FileIdentity(NamedTuple):
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
