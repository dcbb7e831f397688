"""The earlier files of an output name: how they are named, and which of them are removed to make room.

`cap.parquet` has `cap.20261121-0554231.parquet`, also from recordings before this one: a service that restarts must not
fill the disk. Only regular files with such a name in the output's folder count, and links are not followed.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import regular_file, regular_files, remove, rename
from iaprof.basics.quantities import in_bytes
from iaprof.formats.header.budgets import REMOVED_FILES, RemovedFiles

_MOST_OF_A_TIME = 1000  # files whose names have the same time
Tell = Callable[[str], None]


def spool_path(output: Path) -> Path:
    """Returns the path of the spool of a capture."""
    return output.with_name(output.name + ".spool")


def free_name(output: Path, when: float) -> Path:
    """Returns an unused name: `cap.20261121-0554231.parquet` for `cap.parquet`. After the dash: time to 0.1 s.

    Args:
        output: the name that the user gave.
        when: the end of the recording in that file, seconds since 1970.

    Raises:
        IaprofError: there are too many files of that time.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(when)) + f"{int(when * 10) % 10}"
    for suffix in ("", *(f"-{number}" for number in range(2, _MOST_OF_A_TIME))):
        path = output.with_name(f"{output.stem}.{stamp}{suffix}{output.suffix}")
        if not os.path.lexists(path) and not os.path.lexists(spool_path(path)):
            return path
    raise IaprofError(f"the folder of {output} has too many files of that name")


def keep_earlier(output: Path) -> Path | None:
    """Gives a finished file that has the output's name the name of an earlier file, by when it was last changed.

    Returns:
        The new path; None if there is no such file.

    Raises:
        IaprofError: the file cannot be renamed; or what has the name is not a file of its own, but a link, for example.
    """
    try:
        found = regular_file(output)
        if found is None:
            if os.path.lexists(output):
                raise IaprofError(f"{output} is not a file: name another one with -o")
            return None
        path = free_name(output, min(max(found.st_mtime, 0), time.time()))
        rename(output, path)
    except OSError as error:
        raise IaprofError(f"{output} exists and cannot be renamed ({error.strerror}): move it away") from error
    return path


@dataclass(frozen=True)
class _PartFile:
    changed_ns: int
    path: Path
    bytes: int


class PartFiles:
    """Removes earlier files, the oldest first, so that what is left keeps to the limits that the user set."""

    def __init__(self, output: Path, most_files: int | None, most_bytes: int | None, tell: Tell, warn: Tell) -> None:
        """Removes nothing yet.

        Args:
            output: the name that the user gave.
            most_files: of this recording, with the last one, which is still to come; None for any number.
            most_bytes: of all files with such a name; None for any number.
            tell: gets a sentence for each file that is removed.
            warn: gets a sentence if files cannot be removed, once.
        """
        self._output, self._most_files, self._most_bytes = output, most_files, most_bytes
        self._tell, self._warn = tell, warn
        self._own: deque[Path] = deque()  # of this recording
        self._refused: set[Path] = set()
        self.removed = RemovedFiles()

    def header(self) -> dict[str, Any]:
        """Returns the members of an output file's header; none if there are no limits."""
        limited = self._most_files is not None or self._most_bytes is not None
        return {REMOVED_FILES: self.removed.to_json()} if limited else {}

    def add(self, path: Path) -> None:
        """Takes note of a file of this recording that is finished, and removes files that are too many."""
        self._own.append(path)
        while self._most_files is not None and len(self._own) > max(self._most_files - 1, 0):
            oldest = self._own.popleft()
            if (found := _status(oldest)) is not None:
                self._remove(_PartFile(found.st_mtime_ns, oldest, found.st_size), "--max-files")
        self.make_room()

    def make_room(self) -> None:
        """Removes files until the others fit into `most_bytes`."""
        if self._most_bytes is None:
            return
        try:
            files = sorted(self._all(), key=lambda file: (file.changed_ns, file.path.name))
        except OSError as error:
            self._warn_once(self._output.absolute().parent, f"--max-total: the folder cannot be read: {error.strerror}")
            return
        total = sum(file.bytes for file in files)
        for file in files:
            if total <= self._most_bytes:
                return
            if file is files[-1] and file.bytes > self._most_bytes:
                text = f"--max-total: {file.path.name} alone has {in_bytes(file.bytes)}, which is more than may be kept"
                self._warn_once(self._output, text)
            if self._remove(file, "--max-total"):
                total -= file.bytes

    def _all(self) -> Iterator[_PartFile]:
        name = re.compile(
            rf"{re.escape(self._output.stem)}\.\d{{8}}-\d{{7}}(-\d{{1,3}})?{re.escape(self._output.suffix)}"
        )
        for each, status in regular_files(self._output):
            if name.fullmatch(each):
                yield _PartFile(status.st_mtime_ns, self._output.with_name(each), status.st_size)

    def _remove(self, file: _PartFile, why: str) -> bool:
        """Removes a file, and counts it; returns whether it is gone."""
        try:
            remove(file.path)
        except OSError as error:
            self._warn_once(file.path, f"{why}: {file.path} cannot be removed: {error.strerror}")
            return False
        self.removed = self.removed.with_file(file.bytes)
        self._tell(f"{why}: removed {file.path.name}, {in_bytes(file.bytes)}")
        return True

    def _warn_once(self, about: Path, text: str) -> None:
        if about not in self._refused:
            self._refused.add(about)
            self._warn(text)


def _status(path: Path) -> os.stat_result | None:
    try:
        return regular_file(path)
    except OSError:
        return None
