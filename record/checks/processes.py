"""Finds files that processes have mapped, and opens anyone's files without blocking."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from iaprof.bpf.accounts import may_read
from iaprof.bpf.processes import running_pids, user_of
from iaprof.formats.wire.process_maps import lines, mappings, maps_of
from iaprof.sandbox.answering import ANSWERING

_LONGEST_NAME = 120


@dataclass(frozen=True)
class MappedFile:
    """A file that a process has mapped."""

    pid: int
    path: str
    location: str  # a path where it can be opened


def mapped(name: re.Pattern[bytes]) -> Iterator[MappedFile]:
    """Yields files with executable mappings whose name (without folder) matches, once for each process.

    Those of file systems of other users, or that do not answer, are left out: opening them could take forever.
    """
    line = lines(rb"/.*", rights=rb"..x.")
    for pid in running_pids():
        seen = set()
        for mapping in mappings(maps_of(pid), line):
            path = mapping.name.removesuffix(b" (deleted)")
            if path not in seen and name.fullmatch(os.path.basename(path)):
                seen.add(path)
                location = f"/proc/{pid}/map_files/{mapping.span}"
                if may_read(pid, mapping.device, user_of) and ANSWERING.answers(mapping.device, location):
                    yield MappedFile(pid, path.decode("utf-8", "backslashreplace"), location)


@contextlib.contextmanager
def opened(location: str) -> Iterator[int | None]:
    """Opens a regular file; yields None if it is not regular, or cannot be opened."""
    try:
        fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        yield None
        return
    try:
        yield fd if stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        os.close(fd)


def shortened(path: str) -> str:
    """Shortens a path so that it can be read."""
    if len(path) <= _LONGEST_NAME:
        return path
    half = (_LONGEST_NAME - 3) // 2
    return f"{path[:half]}...{path[-half:]}"
