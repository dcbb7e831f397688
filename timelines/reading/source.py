"""The bytes of a trace from any offset on: of the file, or of the file as a child decompressed it or made it UTF-8."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from iaprof.formats.imports.encoded_text import GZIP, MOST_EXPANDED, MOST_EXPANSION, absurdly_large, encoding_of
from iaprof.sandbox.parent import AnswerError, integer

_BLOCK = 1 << 21
ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
_UTF8_BOM = b"\xef\xbb\xbf"
_MOST_CONVERTED = 64 << 20  # bytes of one answer


class Reads(Protocol):
    """A sandbox, or its replacement in tests."""

    def call(
        self,
        operation: str,
        parameters: Mapping[str, object] | None = None,
        data: bytes = b"",
        fds: Any = (),
        seconds: float | None = None,
    ) -> Any:
        """Runs an operation of json_reader.py."""


@dataclass(frozen=True)
class Span:
    """Bytes of a trace, as a child gets them."""

    data: bytes
    files: tuple[int, ...]
    parameters: dict[str, int]


class Source:
    """A trace, text as UTF-8. Offsets count its bytes; `forget` frees those that are no longer needed."""

    def __init__(self, file: int, name: str, child: Reads, is_text: bool = True, unpacked: bytes = b"") -> None:
        """Reads the beginning.

        Args:
            file: descriptor, of a regular file.
            name: for messages.
            child: converts it, if necessary.
            is_text: whether it has an encoding.
            unpacked: its beginning after decompression, which tells the encoding of compressed text.
        """
        self.name = name
        self._file, self._child, self._is_text = file, child, is_text
        self.size = os.fstat(file).st_size
        self.done = 0  # bytes of the file that were read
        self.is_damaged = False
        packed = os.pread(file, 4, 0)
        self._is_gzip = packed.startswith(GZIP)
        start = (unpacked if self._is_gzip else packed) if is_text else b""
        self._encoding = encoding_of(start[:4])
        self.begin = len(_UTF8_BOM) if start.startswith(_UTF8_BOM) and not self._is_gzip else 0
        self._is_plain = not self._is_gzip and not self._encoding
        self._window = bytearray()  # converted, from `_window_begin` on
        self._window_begin = 0
        self._begun = self._ended = False

    def span(self, start: int, length: int) -> tuple[Span, int, bool]:
        """Returns a range of bytes for a child, where it ends, and whether that is the end of the file."""
        if self._is_plain:
            end = min(start + length, self.size)
            self.done = max(self.done, end)
            return Span(b"", (self._file,), {"start": start, "end": end}), end, end >= self.size
        data, is_last = self.bytes(start, length)
        return Span(data, (), {}), start + len(data), is_last

    def bytes(self, start: int, length: int) -> tuple[bytes, bool]:
        """Returns bytes, fewer at the end of the file; and whether they reach it."""
        if self._is_plain:
            return os.pread(self._file, length, start), start + length >= self.size
        while not self._ended and self._window_begin + len(self._window) < start + length + 1:
            self._convert()
        at = start - self._window_begin
        found = bytes(self._window[at : at + length])
        return found, self._ended and start + len(found) >= self._window_begin + len(self._window)

    def forget(self, end: int) -> None:
        """Frees the bytes before an offset."""
        count = min(end - self._window_begin, len(self._window))
        if count > _BLOCK:
            del self._window[:count]
            self._window_begin += count

    def _convert(self) -> None:
        """Adds a block to the window."""
        if self.done >= self.size:
            self.is_damaged |= self._is_gzip
            self._ended = True
            return
        encoding = (self._encoding or "utf-8-sig") if self._is_text else ""
        converted = os.memfd_create("iaprof trace", os.MFD_CLOEXEC)
        try:
            end = min(self.done + _BLOCK, self.size)
            answer = self._child.call(
                "convert",
                {
                    "begins": not self._begun, "gzip": self._is_gzip, "encoding": encoding,
                    "start": self.done, "end": end,
                },
                fds=[self._file, converted],
            )  # fmt: skip
            match answer:
                case {"bytes": size, "consumed": consumed, "ended": bool(ended), "damaged": bool(damaged)}:
                    size, consumed = integer(size, _MOST_CONVERTED), integer(consumed, _BLOCK + 1)
                case _:
                    raise AnswerError
            content = os.pread(converted, size, 0)
        finally:
            os.close(converted)
        if len(content) != size or (not consumed and not size and not ended):
            raise AnswerError
        self._begun = True
        self.done += consumed
        self._ended |= ended
        self.is_damaged |= damaged
        self._window += content
        if self._is_gzip and self._window_begin + len(self._window) > max(MOST_EXPANDED, MOST_EXPANSION * self.size):
            raise absurdly_large(self.name)
