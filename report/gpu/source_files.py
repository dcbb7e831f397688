"""Reads lines of source files, only below folders that the user names: paths come from captures, which are untrusted.

A path in DWARF can only select a regular file below one of these folders that is not hidden; links are followed if they
stay inside. The search uses the last components of the path, as many as possible: `/build/app/src/lib/tile.h` is
DIR/build/app/src/lib/tile.h, ... or DIR/tile.h.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from iaprof.basics.clean import clean
from iaprof.basics.errors import UsageError

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
)  # without O_NONBLOCK, open(2) waits at a FIFO
_MAX_FILE_BYTES = 8 << 20
_MAX_BYTES = 64 << 20  # of all files
_MAX_PATHS = 4_096  # to search for; a kernel has about ten
_MAX_NAMES = 32  # components of a path to try
_TAB = 4


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A source file."""

    path: str  # where it was found
    changed: float  # mtime, seconds since 1970
    lines: tuple[str, ...]  # printable: without control characters and tabs


class SourceFiles:
    """Finds files below the user's folders, and reads each once."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Opens the folders; earlier ones take precedence.

        Raises:
            UsageError: one of them cannot be opened as a folder.
        """
        self._folders: list[tuple[str, int]] = []
        for folder in folders:
            try:
                real = os.path.realpath(folder, strict=True)
                self._folders.append((real, os.open(real, _FOLDER)))
            except OSError as error:
                raise UsageError(f"--source-dir {folder} is not a folder that can be read: {error.strerror}") from error
        self._found: dict[str, SourceFile | None] = {}
        self._bytes_left = _MAX_BYTES

    def file(self, path: str) -> SourceFile | None:
        """Returns the file for a path in DWARF; None if there is none that may be shown."""
        if path not in self._found:
            if len(self._found) >= _MAX_PATHS:
                return None
            self._found[path] = self._search(path)
        return self._found[path]

    def line(self, path: str, number: int) -> str | None:
        """Returns a line, counted from 1; None if there is no such line or file."""
        file = self.file(path)
        return file.lines[number - 1] if file is not None and 0 < number <= len(file.lines) else None

    def newer_than(self, seconds: float) -> list[str]:
        """Returns the paths of files that were changed after a time, in seconds since 1970."""
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
        """Reads a file below a folder.

        Raises:
            OSError: there is no such file.
            ValueError: the file may not be shown.
        """
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
"""For reports without --source-dir."""


def _open_below(folder: int, names: Sequence[str]) -> int:
    """Opens a file one path component at a time, without following links.

    Raises:
        OSError: a component is a link, which was made since the path was resolved, or is missing.
    """
    here = os.dup(folder)
    try:
        for name in names[:-1]:
            below = os.open(name, _FOLDER, dir_fd=here)
            os.close(here)
            here = below
        return os.open(names[-1], _FILE, dir_fd=here)
    finally:
        os.close(here)
