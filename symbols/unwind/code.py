"""The code of a process: its executable mappings, and the files in them as far as walks of stacks need them."""

from __future__ import annotations

import bisect
from typing import NamedTuple

from iaprof.symbols.unwind.cfi import CallFrames, Row
from iaprof.symbols.unwind.dwarf_reader import CfiError
from iaprof.symbols.unwind.return_addresses import BYTES_BEFORE, BYTES_FROM, begins_goroutine, ends_a_call

_USER_END = 1 << 47  # above are mappings that the Linux kernel makes in all processes


class NeedsImage(Exception):
    """A walk needs the image with this number, which nobody has supplied yet."""

    def __init__(self, image: int) -> None:
        super().__init__(image)
        self.image = image


class Mapping(NamedTuple):
    """Executable memory of a process."""

    start: int
    end: int
    offset: int  # in the image
    image: int  # the image's number; -1 for memory without a file


class Image:
    """The code of one file, with the rows of call frame information that were looked up so far."""

    def __init__(self, frames: CallFrames) -> None:
        self.frames = frames
        self._rows: dict[tuple[int, bool], Row | CfiError | None] = {}

    def row(self, offset: int, is_exact: bool) -> Row | None:
        """Returns the rules for an address; None if call frame information does not cover it.

        Args:
            offset: the address's offset in the file.
            is_exact: whether the address is that of an instruction, not a return address.

        Raises:
            CfiError: the file is damaged.
        """
        key = offset, is_exact
        if key not in self._rows:
            address = self.frames.address_of(offset)
            try:
                # Look up the call before a return address: a call that never returns may end its function.
                self._rows[key] = None if address is None else self.frames.row(address if is_exact else address - 1)
            except CfiError as error:
                self._rows[key] = error
        row = self._rows[key]
        if isinstance(row, CfiError):
            raise row
        return row

    def gap(self, offset: int) -> tuple[int, int]:
        """Returns how many bytes before a file offset, and from it on, lack call frame information.

        Raises:
            CfiError: the file is damaged.
        """
        address = self.frames.address_of(offset)
        if address is None:
            return 0, 0
        start, end = self.frames.gap(address)
        return address - start, end - address

    def before(self, offset: int, count: int) -> bytes:
        """Returns the code before an offset of the file, at most `count` bytes."""
        address = self.frames.address_of(offset)
        return b"" if address is None else self.frames.code_before(address, count)

    def at(self, offset: int, count: int) -> bytes:
        """Returns the code from an offset of the file on, at most `count` bytes."""
        return bytes(self.frames.data[offset : offset + count])


class Space:
    """The code of one process, as long as its mappings do not change.

    Attributes:
        low: the start of the process's first code.
        high: the end of its last code, without mappings that the Linux kernel makes.

    Methods that need an image raise NeedsImage if nobody has supplied it yet, and CfiError if it is damaged.
    """

    def __init__(self, mappings: list[Mapping], images: dict[int, Image | None]) -> None:
        """Takes the executable mappings, sorted, and the images by number, None for those that cannot be read."""
        self._mappings, self._images = mappings, images
        self._starts = [mapping.start for mapping in mappings]
        ends = [mapping.end for mapping in mappings if mapping.end <= _USER_END]
        self.low, self.high = (self._starts[0], ends[-1]) if ends else (0, 0)

    def mapping(self, address: int) -> Mapping | None:
        """Returns the mapping that has an address; None if it is not in code."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address >= self._mappings[index].end:
            return None
        return self._mappings[index]

    def image(self, mapping: Mapping) -> Image | None:
        """Returns the image of a mapping; None if it has no file, or one that cannot be read.

        Raises:
            NeedsImage: nobody has supplied the image yet.
        """
        if mapping.image < 0:
            return None
        if mapping.image not in self._images:
            raise NeedsImage(mapping.image)
        return self._images[mapping.image]

    def row(self, address: int, is_exact: bool, mapping: Mapping) -> Row | None:
        """Returns the rules for an address in a mapping; None if call frame information does not cover it."""
        image = self.image(mapping)
        return None if image is None else image.row(address - mapping.start + mapping.offset, is_exact)

    def gap(self, address: int) -> tuple[int, int]:
        """Returns how many bytes before an address, and from it on, lack call frame information; 0 if unreadable."""
        image, offset = self._place(address)
        return (0, 0) if image is None else image.gap(offset)

    def code_before(self, address: int, count: int) -> bytes:
        """Returns the code before an address; empty if it cannot be read."""
        image, offset = self._place(address - 1)
        return b"" if image is None else image.before(offset + 1, count)

    def code_at(self, address: int, count: int) -> bytes:
        """Returns the code from an address on; empty if it cannot be read."""
        image, offset = self._place(address)
        return b"" if image is None else image.at(offset, count)

    def _place(self, address: int) -> tuple[Image | None, int]:
        """Returns the image of an address, None if it cannot be read, and the address's offset in the file."""
        mapping = self.mapping(address)
        if mapping is None:
            return None, 0
        return self.image(mapping), address - mapping.start + mapping.offset

    def is_go(self, address: int) -> bool:
        """Tells whether Go's compiler made the code at an address."""
        image, _ = self._place(address)
        return image is not None and image.frames.is_go

    def begins_goroutine(self, address: int) -> bool:
        """Tells whether an address is the return address at which a goroutine begins, without a call."""
        before, after = self.code_before(address, BYTES_BEFORE), self.code_at(address, BYTES_FROM)
        return begins_goroutine(before, after) and not ends_a_call(before) and self.is_go(address)

    def is_unread(self, address: int) -> bool:
        """Tells whether an address is in code that cannot be read, such as a JIT compiler's."""
        mapping = self.mapping(address)
        return mapping is not None and self.image(mapping) is None

    def is_after_call(self, address: int, unread: bool) -> bool:
        """Tells whether a call ends at an address; returns `unread` for code that cannot be read, such as a JIT's."""
        mapping = self.mapping(address)
        if mapping is None:
            return False
        if self.image(mapping) is None:
            return unread
        return ends_a_call(self.code_before(address, BYTES_BEFORE))
