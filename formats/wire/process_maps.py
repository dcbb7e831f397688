"""What /proc/PID/maps tells of the memory that a process has mapped: a line for each mapping (proc_pid_maps(5))."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

HUGE_PAGE = 2 << 20  # bytes; the size to which programs align text that they copy into huge pages
MOST_BYTES = 16 << 20  # of a process: 100,000 mappings, and more than it can have unless somebody allowed it


class Mapping(NamedTuple):
    """One line."""

    start: int
    end: int
    rights: bytes  # such as b"r-xp"
    offset: int  # in the file
    device: int  # major number << 32 | minor number
    inode: int  # 0 for memory of no file
    name: bytes  # a path, b"[vdso]" or nothing; of a deleted file with " (deleted)" behind it

    @property
    def file(self) -> tuple[int, int]:
        """What tells files apart."""
        return self.device, self.inode

    @property
    def span(self) -> str:
        """Its name in /proc/PID/map_files, which has no leading zeros."""
        return f"{self.start:x}-{self.end:x}"


def lines(name: bytes = rb".*", rights: bytes = rb"....") -> re.Pattern[bytes]:
    """Lines with a name and rights that match these expressions, which have no groups."""
    return re.compile(
        rb"^([0-9a-f]+)-([0-9a-f]+) (%b) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(%b)$" % (rights, name),
        re.MULTILINE,
    )


EVERY, EXECUTABLE = lines(), lines(rights=rb"..x.")


def maps_of(pid: int | None = None) -> bytes:
    """What a process, this one without `pid`, has mapped, its first MOST_BYTES; empty if it has ended."""
    try:
        with open(f"/proc/{'self' if pid is None else pid}/maps", "rb") as file:
            return file.read(MOST_BYTES)
    except OSError:
        return b""


def mappings(text: bytes, wanted: re.Pattern[bytes] = EVERY) -> Iterator[Mapping]:
    """The mappings in what `maps_of` gave, of the lines that are wanted."""
    for found in wanted.finditer(text):
        low, high, rights, offset, major, minor, inode, name = found.groups()
        device = int(major, 16) << 32 | int(minor, 16)
        yield Mapping(int(low, 16), int(high, 16), rights, int(offset, 16), device, int(inode), name)
