"""Lines of source files, for captures of strangers: nothing is read but what the user laid out for it.

Which file a line is in says the capture's DWARF. So a path from there names only regular files below folders that the
user named, and none that is hidden; links are followed as long as they stay there. A path is looked for by its last
names, the more of them the better: `/build/app/src/lib/tile.h` is DIR/build/app/src/lib/tile.h, ... or DIR/tile.h.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from iaprof.basics.errors import UsageError
from iaprof.formats.profile import clean

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a FIFO's open would wait
_MAX_FILE_BYTES = 8 << 20  # bytes of one file
_MAX_BYTES = 64 << 20
_MAX_PATHS = 4_096  # that are looked for; a kernel has some ten
_MAX_NAMES = 32  # of a path that are tried
_TAB = 4


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that was found."""

    path: str  # where
    changed: float  # seconds since 1970
    lines: tuple[str, ...]  # ready to be printed: no control characters, no tabs


class SourceFiles:
    """Finds files below some folders; each is read once."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Opens the folders, the first of which has precedence.

        Raises:
            UsageError: one of them is none.
        """
        self._folders: list[tuple[str, int]] = []
        for folder in folders:
            try:
                real = os.path.realpath(folder, strict=True)
                self._folders.append((real, os.open(real, _FOLDER)))
            except OSError as error:
                raise UsageError(f"--source-dir {folder} is no folder that can be read: {error.strerror}") from error
        self._found: dict[str, SourceFile | None] = {}
        self._bytes_left = _MAX_BYTES

    def file(self, path: str) -> SourceFile | None:
        """The file that DWARF calls `path`; None where there is none that may be shown."""
        if path not in self._found:
            if len(self._found) >= _MAX_PATHS:
                return None
            self._found[path] = self._search(path)
        return self._found[path]

    def line(self, path: str, number: int) -> str | None:
        """A line, from 1 on; None where there is no such line or file."""
        file = self.file(path)
        return file.lines[number - 1] if file is not None and 0 < number <= len(file.lines) else None

    def newer_than(self, seconds: float) -> list[str]:
        """The files that were changed after a time, in seconds since 1970."""
        return [file.path for file in self._found.values() if file is not None and file.changed > seconds]

    def _search(self, path: str) -> SourceFile | None:
        names = [name for name in posixpath.normpath(path).split("/") if name]
        hidden = [at for at, name in enumerate(names) if name.startswith(".")]  # `..` among them
        longest = max(len(names) - _MAX_NAMES, hidden[-1] + 1 if hidden else 0)
        for real, folder in self._folders:
            for first in range(longest, len(names)):
                with contextlib.suppress(OSError, ValueError):
                    return self._read(real, folder, names[first:])
        return None

    def _read(self, real: str, folder: int, names: Sequence[str]) -> SourceFile:
        """Reads a file below a folder; OSError where there is none, ValueError where it may not be shown."""
        target = os.path.realpath(os.path.join(real, *names), strict=True)
        inside = os.path.relpath(target, real).split("/")
        if any(name.startswith(".") for name in inside):  # `..` among them: a link leads outside
            raise ValueError(target)
        with open(_open_below(folder, inside), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > min(_MAX_FILE_BYTES, self._bytes_left):
                raise ValueError(target)
            data = file.read(status.st_size)
        self._bytes_left -= len(data)
        lines = data.decode("utf-8", "replace").split("\n")
        return SourceFile(target, status.st_mtime, tuple(clean(line.rstrip().expandtabs(_TAB)) for line in lines))


NO_SOURCES = SourceFiles(())
"""Where the user named no folder."""


def _open_below(folder: int, names: Sequence[str]) -> int:
    """Opens a file name by name, through no link: whoever makes one meanwhile gets an OSError here."""
    here = os.dup(folder)
    try:
        for name in names[:-1]:
            below = os.open(name, _FOLDER, dir_fd=here)
            os.close(here)
            here = below
        return os.open(names[-1], _FILE, dir_fd=here)
    finally:
        os.close(here)
