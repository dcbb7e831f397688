"""The code that a process has: its executable mappings, and the files in them as far as stacks need them."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from iaprof.symbols.unwind.cfi import CallFrames, Row
from iaprof.symbols.unwind.dwarf_reader import CfiError
from iaprof.symbols.unwind.return_addresses import BYTES_BEFORE, BYTES_FROM, begins_goroutine, ends_a_call

_USER_END = 1 << 47  # above is what the kernel maps into all processes


class NeedsImage(Exception):
    """The image of this number has to be had first."""

    def __init__(self, image: int) -> None:
        super().__init__(image)
        self.image = image


class Mapping(NamedTuple):
    """Executable memory of a process."""

    start: int
    end: int
    offset: int  # in the image
    image: int  # its number, -1 for memory of no file


class Image:
    """The code of one file, as far as stacks need it, with the rows that were looked up."""

    def __init__(self, frames: CallFrames) -> None:
        self.frames = frames
        self._rows: dict[tuple[int, bool], Row | CfiError | None] = {}

    def row(self, offset: int, is_exact: bool) -> Row | None:
        """What is in force at an instruction, or before the return address, at an offset of the file.

        Raises:
            CfiError: the file is damaged.
        """
        key = offset, is_exact
        if key not in self._rows:
            address = self.frames.address_of(offset)
            try:
                # A call that does not return may be a function's last instruction.
                self._rows[key] = None if address is None else self.frames.row(address if is_exact else address - 1)
            except CfiError as error:
                self._rows[key] = error
        row = self._rows[key]
        if isinstance(row, CfiError):
            raise row
        return row

    def untold(self, offset: int) -> tuple[int, int]:
        """How many bytes before an offset of the file, and from it on, `row` gives None for.

        Raises:
            CfiError: the file is damaged.
        """
        address = self.frames.address_of(offset)
        if address is None:
            return 0, 0
        start, end = self.frames.untold(address)
        return address - start, end - address

    def before(self, offset: int, count: int) -> bytes:
        """The code before an offset of the file."""
        address = self.frames.address_of(offset)
        return b"" if address is None else self.frames.code_before(address, count)

    def at(self, offset: int, count: int) -> bytes:
        """The code from an offset of the file on."""
        return bytes(self.frames.data[offset : offset + count])


class Space:
    """The code that one process has, as long as its mappings stay as they are."""

    def __init__(self, mappings: list[Mapping], images: dict[int, Image | None]) -> None:
        """Args: executable mappings, sorted; images by number, None for those that cannot be read."""
        self._mappings, self._images = mappings, images
        self._starts = [mapping.start for mapping in mappings]
        below = [mapping.end for mapping in mappings if mapping.end <= _USER_END]
        self.low, self.high = (self._starts[0], below[-1]) if below else (0, 0)  # between which a process has its code

    def mapping(self, address: int) -> Mapping | None:
        """Where an address lies; None if in no code."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._mappings[index].end:
            return None
        return self._mappings[index]

    def image(self, mapping: Mapping) -> Image | None:
        """Whose code a mapping has; None if it is of no file, or of one that cannot be read.

        Raises:
            NeedsImage: nobody has tried yet.
        """
        if mapping.image < 0:
            return None
        if mapping.image not in self._images:
            raise NeedsImage(mapping.image)
        return self._images[mapping.image]

    def row(self, address: int, is_exact: bool, mapping: Mapping) -> Row | None:
        """What is in force at an address; None if nothing is told of it. CfiError, NeedsImage: see above."""
        image = self.image(mapping)
        return None if image is None else image.row(address - mapping.start + mapping.offset, is_exact)

    def untold(self, address: int) -> tuple[int, int]:
        """How many bytes before an address, and from it on, nothing is told of; none if the code cannot be read."""
        image, offset = self._place(address)
        return (0, 0) if image is None else image.untold(offset)

    def code_before(self, address: int, count: int) -> bytes:
        """The code before an address, none if it cannot be read."""
        image, offset = self._place(address - 1)
        return b"" if image is None else image.before(offset + 1, count)

    def code_at(self, address: int, count: int) -> bytes:
        """The code at an address, none if it cannot be read."""
        image, offset = self._place(address)
        return b"" if image is None else image.at(offset, count)

    def _place(self, address: int) -> tuple[Image | None, int]:
        """Whose code an address is, None if that cannot be read, and where in the file."""
        mapping = self.mapping(address)
        if mapping is None:
            return None, 0
        return self.image(mapping), address - mapping.start + mapping.offset

    def is_go(self, address: int) -> bool:
        """Whether the code at an address is of a file that Go's compiler made."""
        image, _ = self._place(address)
        return image is not None and image.frames.is_go

    def begins_goroutine(self, address: int) -> bool:
        """Whether a goroutine begins at an address, which no call leads to."""
        before, after = self.code_before(address, BYTES_BEFORE), self.code_at(address, BYTES_FROM)
        return begins_goroutine(before, after) and not ends_a_call(before) and self.is_go(address)

    def is_unread(self, address: int) -> bool:
        """Whether an address lies in code that cannot be read, such as a JIT's."""
        mapping = self.mapping(address)
        return mapping is not None and self.image(mapping) is None

    def is_after_call(self, address: int, unread: bool) -> bool:
        """Whether a call ends at an address; `unread` says so for code that cannot be read, such as a JIT's."""
        mapping = self.mapping(address)
        if mapping is None:
            return False
        if self.image(mapping) is None:
            return unread
        return ends_a_call(self.code_before(address, BYTES_BEFORE))
