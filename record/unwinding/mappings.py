"""The executable mappings of running processes, with numbers for the files in them.

Processes with the same mappings share a number of their space: a forked child needs no rules of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from iaprof.basics.errors import IaprofError
from iaprof.formats.wire.process_maps import EXECUTABLE, mappings, maps_of
from iaprof.record.symbolize.mapped_files import FileIdentity
from iaprof.record.symbolize.opener import LATER, Opener, Rights
from iaprof.symbols.files.vdso import open_vdso
from iaprof.symbols.unwind.code import Mapping
from iaprof.symbols.unwind.walk import PAGE

_LOCATIONS = 4  # of a file, where it may be opened
_NO_FILE = -1
_ALWAYS_NS = 1 << 62  # before which a file has to have changed last: a program may be built anew while it runs


class ImageGone(IaprofError):
    """A file is not mapped any more where it was, or cannot be opened now."""


@dataclass
class Image:
    """A file that is mapped somewhere, or the vDSO."""

    device: int  # major number << 32 | minor number
    inode: int  # 0 of the vDSO
    may_be_python: bool  # by its name
    places: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # pid, start and end of mappings, the last the latest


class Images:
    """Files by number."""

    def __init__(self, opener: Opener) -> None:
        """Args: opens files; it stays the caller's."""
        self._opener = opener
        self._numbers: dict[tuple[int, int], int] = {}  # by device and inode
        self._images: list[Image] = []

    def number(self, device: int, inode: int, name: bytes, pid: int, start: int, end: int) -> int:
        """The number of what is mapped there; _NO_FILE for memory of no file."""
        if not inode and name != b"[vdso]":
            return _NO_FILE
        number = self._numbers.setdefault((device, inode), len(self._images))
        if number == len(self._images):
            self._images.append(Image(device, inode, _may_be_python(name.rpartition(b"/")[2])))
        places = self._images[number].places
        if (pid, start, end) not in places:
            places.append((pid, start, end))
            del places[:-_LOCATIONS]
        return number

    def may_be_python(self, number: int) -> bool:
        """Whether an image has an interpreter's name."""
        return self._images[number].may_be_python

    def open(self, number: int) -> int | None:
        """A descriptor, which the caller closes; None if the file can be read by nobody.

        Raises:
            ImageGone: no process has it mapped any more where it was; or it took too long, and at another time may not.
        """
        if not 0 <= number < len(self._images):
            raise ImageGone
        image = self._images[number]
        if not image.inode:
            return open_vdso()
        same = FileIdentity(image.device, image.inode, _ALWAYS_NS)
        for pid, start, end in reversed(image.places):
            rights = rights_of(pid)
            opened = None if rights is None else self._opener.open_mapping(pid, start, end, rights, same)
            if isinstance(opened, int):
                return opened
            if opened in LATER:
                raise ImageGone
            if (start, end) in _spans(pid, image):
                return None
        raise ImageGone


def _spans(pid: int, image: Image) -> Iterator[tuple[int, int]]:
    """Where a process has a file mapped now."""
    for mapping in mappings(maps_of(pid), EXECUTABLE):
        if mapping.file == (image.device, image.inode):
            yield mapping.start, mapping.end


def _may_be_python(name: bytes) -> bool:
    """By a file's name; an extension module has the interpreter's in its own, and is none."""
    return b"python" in name and b".cpython-" not in name


def rights_of(pid: int) -> Rights | None:
    """A process's user and group; None if it has ended."""
    try:
        status = os.stat(f"/proc/{pid}")
    except OSError:
        return None
    return Rights(status.st_uid, status.st_gid)


def executable(pid: int, images: Images) -> tuple[Mapping, ...]:
    """A process's executable mappings, sorted; none if it has ended."""
    return tuple(
        Mapping(each.start, each.end, each.offset, images.number(*each.file, each.name, pid, each.start, each.end))
        for each in mappings(maps_of(pid), EXECUTABLE)
    )


class Memory:
    """Reads the memory of a process, a page at a time."""

    def __init__(self, pid: int) -> None:
        self._path = f"/proc/{pid}/mem"

    def page(self, address: int) -> bytes:
        """A page; empty if it cannot be read."""
        try:
            with open(self._path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), PAGE, address)
        except (OSError, OverflowError):
            return b""
