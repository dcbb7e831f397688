"""Reads what is imported as UTF-8, whatever its encoding, also compressed with gzip; refuses other compression."""

from __future__ import annotations

import codecs
import zlib
from typing import BinaryIO

from iaprof.basics.errors import IaprofError

GZIP = b"\x1f\x8b"
"""What files compressed with gzip begin with."""
_OTHERS = {
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"\xfd7zXZ\0": ("xz", "xz -d"),
    b"BZh": ("bzip2", "bzip2 -d"),
    b"PK\x03\x04": ("zip", "unzip"),
}
_BOMS = ((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_ZEROS = ((b"\0\0\0x", "utf-32-be"), (b"x\0\0\0", "utf-32-le"), (b"\0x", "utf-16-be"), (b"x\0", "utf-16-le"))
_MOST_MARK = 4  # bytes of a byte order mark
_STARTED = 1 << 12  # bytes of the unpacked start
_WINDOW = 16 + zlib.MAX_WBITS  # of gzip
MOST_EXPANDED, MOST_EXPANSION = 1 << 29, 100
"""Compressed data may become so many bytes, or so many times their size, whichever is more."""


def refuse_compressed(start: bytes, name: str) -> None:
    """Refuses files that are compressed otherwise than with gzip.

    Args:
        start: what the file begins with.
        name: for the message.

    Raises:
        IaprofError: it is so.
    """
    for mark, (how, command) in _OTHERS.items():
        if start.startswith(mark):
            raise IaprofError(f"{name} is compressed with {how}: decompress it first, with '{command}'")


def absurdly_large(name: str) -> IaprofError:
    """Returns the error of a compressed file that becomes larger than that."""
    return IaprofError(
        f"{name} becomes absurdly large when it is decompressed: it may be malicious; if you trust it, "
        "decompress it first"
    )


def encoding_of(start: bytes) -> str:
    """Returns the encoding of a text that begins so, in Python's words; nothing for UTF-8.

    Without a byte order mark, it is told by the zeros beside the first character, which is of ASCII.
    """
    for mark, encoding in _BOMS:
        if start.startswith(mark):
            return encoding
    for zeros, encoding in _ZEROS:
        first = start[: len(zeros)]
        if len(first) == len(zeros) and bytes(ord("x") if each else 0 for each in first) == zeros:
            return encoding
    return ""


def unpacked_start(start: bytes) -> bytes:
    """Returns what the start of a file is without gzip; nothing if it is damaged."""
    if not start.startswith(GZIP):
        return start
    try:
        return zlib.decompressobj(_WINDOW).decompress(start, _STARTED)
    except zlib.error:
        return b""


class EncodedText:
    """A text as UTF-8."""

    def __init__(self, source: BinaryIO, name: str) -> None:
        """Reads nothing yet. Args: the text, as it is in its file; its name for messages."""
        self._source, self._name = source, name
        self._inflate: zlib._Decompress | None = None
        self._decoder: codecs.IncrementalDecoder | None = None
        self._packed = b""
        self._has_begun = False
        self._taken = self._made = 0  # bytes with and without gzip

    def read(self, size: int) -> bytes:
        """Returns about as many bytes, at least one before the end.

        Raises:
            IaprofError: its compressed data are damaged or cut short, or become absurdly large.
            OSError: it cannot be read.
        """
        while True:
            data, is_last = self._unpacked(size)
            if self._decoder is None:
                while len(data) < _MOST_MARK and not is_last:
                    more, is_last = self._unpacked(size)
                    data += more
                encoding = encoding_of(data[:_MOST_MARK])
                errors = "replace" if encoding else "surrogateescape"  # bytes that are not UTF-8 stay
                self._decoder = codecs.getincrementaldecoder(encoding or "utf-8-sig")(errors)
            text = self._decoder.decode(data, is_last).encode("utf-8", "surrogateescape")
            if text or is_last:
                return text

    def _unpacked(self, size: int) -> tuple[bytes, bool]:
        """Returns bytes without gzip, and whether they are the last."""
        if not self._has_begun:
            self._has_begun = True
            self._packed = self._source.read(max(size, len(GZIP)))
            if self._packed.startswith(GZIP):
                self._inflate = zlib.decompressobj(_WINDOW)
        data, self._packed = self._packed or self._source.read(size), b""
        if self._inflate is None:
            return data, not data
        if self._inflate.eof:
            if len(data) < len(GZIP):
                data += self._source.read(size)
            if not data.startswith(GZIP):
                return b"", True
            self._inflate = zlib.decompressobj(_WINDOW)  # of another member
        try:
            plain = self._inflate.decompress(data, size)
        except zlib.error:
            raise IaprofError(f"{self._name} has compressed data that are damaged: copy it again") from None
        if not data and not plain:
            raise IaprofError(f"{self._name} has compressed data that are cut short: copy it again")
        self._packed = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
        self._taken += len(data) - len(self._packed)
        self._made += len(plain)
        if self._made > max(MOST_EXPANDED, MOST_EXPANSION * self._taken):
            raise absurdly_large(self._name)
        return plain, False
