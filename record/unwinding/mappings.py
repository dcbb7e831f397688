"""The executable mappings of running processes; their files are numbered.

Processes with equal mappings share a space number: a forked child needs no rules of its own.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from iaprof.basics.errors import IaprofError
from iaprof.bpf.accounts import ACCOUNTS
from iaprof.formats.wire.process_maps import EXECUTABLE, HUGE_PAGE, mappings, maps_of
from iaprof.record.symbolize.opener import ELSEWHERE, UNREADABLE, FileIdentity, Opener, Rights
from iaprof.symbols.names.boot import open_vdso
from iaprof.symbols.unwind.finishing import PAGE, Mapping


def with_remapped_text(
    found: Sequence[Mapping], page: Callable[[int], bytes], opened: Callable[[int], int | None]
) -> Iterator[Mapping]:
    """Yields a process's executable mappings, copied text as if it were still mapped from its file.

    Copied text consists of whole huge pages. It borders on what is left of the file's mapping, and has the bytes of the
    file.

    Args:
        found: the mappings, sorted.
        page: returns the page of the process's memory at an address.
        opened: opens the file with a number; returns None if it cannot be read.
    """
    for at, mapping in enumerate(found):
        if mapping.image < 0 and not (mapping.start | mapping.end) % HUGE_PAGE:
            around = (found[index] for index in (at - 1, at + 1) if 0 <= index < len(found))
            texts = {_as_file(mapping, each) for each in around if _is_beside(mapping, each)}
            if len(texts) == 1 and _has_bytes_of_file(text := texts.pop(), page, opened):
                mapping = text
        yield mapping


def _is_beside(mapping: Mapping, other: Mapping) -> bool:
    return other.image >= 0 and (other.end == mapping.start or other.start == mapping.end)


def _as_file(mapping: Mapping, neighbour: Mapping) -> Mapping:
    """Returns a mapping with the file of a neighbour, at the offset that it would have had there."""
    return Mapping(mapping.start, mapping.end, mapping.start - neighbour.start + neighbour.offset, neighbour.image)


def _has_bytes_of_file(text: Mapping, page: Callable[[int], bytes], opened: Callable[[int], int | None]) -> bool:
    """Tells whether one of three pages of memory is as in the file: a probe's breakpoint may have changed others."""
    file = opened(text.image) if text.offset >= 0 else None
    if file is None:
        return False
    try:
        for part in range(3):
            address = text.start + (text.end - text.start) * part // 3 // mmap.PAGESIZE * mmap.PAGESIZE
            content = os.pread(file, mmap.PAGESIZE, address - text.start + text.offset)
            if len(set(content)) > 1 and content == page(address):
                return True
    except OSError:
        pass
    finally:
        os.close(file)
    return False


_LOCATIONS = 4  # of a file, where it may be opened
_NO_FILE = -1
_ALWAYS_NS = 1 << 62  # as FileIdentity.before_ns: accepts files built anew while they run


class ImageGone(IaprofError):
    """A file is no longer mapped where it was, or cannot be opened now."""


@dataclass
class Image:
    """A mapped file, or the vDSO."""

    device: int  # major number << 32 | minor number
    inode: int  # 0 for the vDSO
    may_be_python: bool  # by its name
    places: list[tuple[int, int, int]] = field(default_factory=list)  # pid, start and end of mappings, the latest last


class Images:
    """Numbers mapped files, and opens them."""

    def __init__(self, opener: Opener) -> None:
        """Args: opens files; it stays the caller's."""
        self._opener = opener
        # By device, inode and hash of the name: on btrfs, files of several subvolumes have the same device and inode.
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._images: list[Image] = []

    def number(self, device: int, inode: int, name: bytes, pid: int, start: int, end: int) -> int:
        """Returns the number of a mapped file; _NO_FILE for memory of no file."""
        if not inode and name != b"[vdso]":
            return _NO_FILE
        number = self._numbers.setdefault((device, inode, hash(name)), len(self._images))
        if number == len(self._images):
            self._images.append(Image(device, inode, _may_be_python(name.rpartition(b"/")[2])))
        places = self._images[number].places
        if (pid, start, end) not in places:
            places.append((pid, start, end))
            del places[:-_LOCATIONS]
        return number

    def may_be_python(self, number: int) -> bool:
        """Whether a file is named like an interpreter."""
        return self._images[number].may_be_python

    def open(self, number: int) -> int | None:
        """Opens a file; the caller closes it. Returns None if none of its processes can read the file.

        Raises:
            ImageGone: no known process has it mapped any more, or it could not be opened for another reason.
        """
        if not 0 <= number < len(self._images):
            raise ImageGone
        image = self._images[number]
        if not image.inode:
            return open_vdso()
        same = FileIdentity(image.device, image.inode, _ALWAYS_NS)
        is_unreadable = False
        for pid, start, end in reversed(image.places):
            rights = rights_of(pid)
            if rights is None:
                continue
            file_or_reason = self._opener.open_mapping(pid, start, end, rights, same)
            if isinstance(file_or_reason, int):
                return file_or_reason
            if file_or_reason in UNREADABLE:
                # The Linux kernel may also refuse if the process ends while its mapping is looked up.
                is_unreadable |= rights_of(pid) is not None
            elif file_or_reason not in ELSEWHERE:
                raise ImageGone
        if is_unreadable:
            return None
        raise ImageGone


def _may_be_python(name: bytes) -> bool:
    """Whether a file's name is an interpreter's; extension modules also contain `python`, but are none."""
    return b"python" in name and b".cpython-" not in name


def rights_of(pid: int) -> Rights | None:
    """Returns a process's user, group and account; None if it has ended."""
    try:
        status = os.stat(f"/proc/{pid}")
    except OSError:
        return None
    return Rights(status.st_uid, status.st_gid, ACCOUNTS.of_process(pid, status.st_uid))


def executable(pid: int, images: Images) -> tuple[Mapping, ...]:
    """Returns a process's executable mappings, sorted; empty if it has ended."""

    def opened(number: int) -> int | None:
        try:
            return images.open(number)
        except ImageGone:
            return None

    found = [
        Mapping(
            mapping.start,
            mapping.end,
            mapping.offset,
            images.number(*mapping.file, mapping.name, pid, mapping.start, mapping.end),
        )
        for mapping in mappings(maps_of(pid), EXECUTABLE)
    ]
    return tuple(with_remapped_text(found, Memory(pid).page, opened))


class Memory:
    """Reads the memory of a process, page by page."""

    def __init__(self, pid: int) -> None:
        self._path = f"/proc/{pid}/mem"

    def page(self, address: int) -> bytes:
        """Returns a page; b"" if it cannot be read."""
        try:
            with open(self._path, "rb", buffering=0) as file:
                return os.pread(file.fileno(), PAGE, address)
        except (OSError, OverflowError):
            return b""
