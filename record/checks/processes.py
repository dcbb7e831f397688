"""Files that processes have mapped, and opening files of anybody's without waiting for them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from iaprof.bpf.processes import running_pids

_MOST_BYTES = 16 << 20  # of one process's list of mappings
_LONGEST_NAME = 120


@dataclass(frozen=True)
class MappedFile:
    """A file, as some process sees it."""

    pid: int
    path: str
    location: str  # where it can be opened


def mapped(name: re.Pattern[bytes]) -> Iterator[MappedFile]:
    """Executable mappings, one for each process and file, of files whose name (without its folder) matches."""
    line = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ..x. \S+ \S+ \S+ +(/.*)$", re.MULTILINE)
    for pid in running_pids():
        seen = set()
        for found in line.finditer(read_some(f"/proc/{pid}/maps", _MOST_BYTES)):
            path = found[3].removesuffix(b" (deleted)")
            if path not in seen and name.fullmatch(os.path.basename(path)):
                seen.add(path)
                # map_files has the same numbers without leading zeros
                location = f"/proc/{pid}/map_files/{int(found[1], 16):x}-{int(found[2], 16):x}"
                yield MappedFile(pid, path.decode("utf-8", "backslashreplace"), location)


@contextlib.contextmanager
def opened(location: str) -> Iterator[int | None]:
    """A descriptor of a regular file; None when it is none, or cannot be opened."""
    try:
        fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        yield None
        return
    try:
        yield fd if stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        os.close(fd)


def read_some(path: str, most: int) -> bytes:
    """The beginning of a file below /proc; nothing when it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            parts = []
            while most > 0 and (part := file.read(min(most, 1 << 16))):
                parts.append(part)
                most -= len(part)
            return b"".join(parts)
    except OSError:
        return b""


def shortened(path: str) -> str:
    """A path of a length that can be read."""
    if len(path) <= _LONGEST_NAME:
        return path
    half = (_LONGEST_NAME - 3) // 2
    return f"{path[:half]}...{path[-half:]}"
