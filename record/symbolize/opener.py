"""Opens files that profiled processes name, with their rights, in the debug-ELF collector's child (collector_child.py).

Used at the end of a recording, for one file after the other. A file that cannot be opened in time costs its names only.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from iaprof.formats.file_names import as_text, possible_names
from iaprof.formats.wire.process_maps import mappings, maps_of
from iaprof.record.kernels.collector import start_child
from iaprof.record.kernels.collector_child import ABSENT, ANOTHER, FORBIDDEN, NOT_REGULAR
from iaprof.record.symbolize.mapped_files import FileIdentity
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


@dataclass(frozen=True, slots=True)
class Rights:
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
