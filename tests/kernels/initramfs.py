# SPDX-License-Identifier: Apache-2.0
"""Makes an initramfs of this machine's files, each at its own path, so that this machine's programs run in it.

    archive = Initramfs()
    archive.add(Path(sys.executable))            # with the libraries to which it is linked
    archive.text("/init", "#!/usr/bin/python3\\n...", 0o755)
    archive.write(Path("initramfs.cpio"))

The format is cpio's "newc", which the kernel unpacks (Documentation/driver-api/early-userspace/buffer-format.rst).
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

_ELF = b"\x7fELF"
_LINKS = 40  # maximum number of symbolic links in a path, the kernel's own limit
_LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)


class Initramfs:
    """The files of an initramfs, by path."""

    def __init__(self) -> None:
        self._files: dict[str, Path | bytes] = {}  # contents of files and links are read when they are written
        self._modes: dict[str, int] = {}

    def add(self, path: Path, but: Callable[[Path], bool] = lambda path: False) -> None:
        """Adds a file, or a folder except the files for which `but` is true, with the libraries of its programs."""
        self._link_libraries(self._add(path, but))

    def text(self, path: str, content: str, mode: int = 0o644) -> None:
        """Adds a file with this text."""
        self.content(path, content.encode(), mode)

    def content(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Adds a file with this content."""
        self._add_folders(Path(path).parent)
        self._files[path], self._modes[path] = content, stat.S_IFREG | mode

    def folder(self, path: str) -> None:
        """Adds an empty folder."""
        self._add_folders(Path(path))

    def write(self, archive: Path) -> None:
        """Writes the archive."""
        with archive.open("wb") as file:
            for number, path in enumerate(sorted(self._files), 1):
                _write_entry(file, number, path.lstrip("/"), self._modes[path], self._content(path))
            _write_entry(file, 0, "TRAILER!!!", 0, b"")

    def _content(self, path: str) -> bytes:
        found, mode = self._files[path], self._modes[path]
        if isinstance(found, bytes):
            return found
        if stat.S_ISLNK(mode):
            return os.fsencode(os.readlink(found))
        return found.read_bytes() if stat.S_ISREG(mode) else b""

    def _add(self, path: Path, but: Callable[[Path], bool]) -> list[Path]:
        """Adds a file or a folder's content; returns the programs and libraries among it."""
        real = self._add_path(path)
        if real.is_dir():
            inside = [each for each in sorted(real.iterdir()) if not but(each)]
            return [elf for each in inside for elf in self._add(each, but)]
        return [real] if _is_elf(real) else []

    def _add_path(self, path: Path) -> Path:
        """Adds a file or folder, with the links in its path and their targets; returns its path without links."""
        here = Path("/")
        parts = list(path.absolute().parts[1:])
        links = 0
        while parts:
            part = parts.pop(0)
            here = here.parent if part == ".." else here / part
            mode = here.lstat().st_mode
            self._files[str(here)], self._modes[str(here)] = here, mode
            if stat.S_ISLNK(mode):
                links += 1
                assert links <= _LINKS, path
                target = Path(os.readlink(here))
                here = Path("/") if target.is_absolute() else here.parent
                parts = [*(part for part in target.parts if part != "/"), *parts]
        return here

    def _add_folders(self, path: Path) -> None:
        for folder in (path, *path.parents):
            if str(folder) != "/" and str(folder) not in self._files:
                self._files[str(folder)], self._modes[str(folder)] = b"", stat.S_IFDIR | 0o755

    def _link_libraries(self, elfs: Iterable[Path]) -> None:
        for elf in elfs:
            # ldd may fail: a program with its own dynamic linker comes with its libraries, too.
            done = subprocess.run(["ldd", elf], capture_output=True, text=True)
            for library in _LIBRARY.findall(done.stdout):
                if library not in self._files:
                    self._add_path(Path(library))


def _is_elf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == _ELF


def _write_entry(file: BinaryIO, inode: int, name: str, mode: int, content: bytes) -> None:
    name_bytes = os.fsencode(name) + b"\0"
    numbers = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name_bytes), 0)
    file.write(b"070701" + b"".join(b"%08X" % number for number in numbers) + name_bytes)
    file.write(b"\0" * (-(110 + len(name_bytes)) % 4) + content + b"\0" * (-len(content) % 4))
