"""The spool: an append-only file that a recording goes to as it comes, and that survives the recorder's death.

It starts with a magic number and a version. Then come frames: a header with its own checksum, and a payload. A frame
reaches the kernel in one write, so after `kill -9` only what had not been read from its source is missing, and perhaps
the end of the last frame. `iaprof recover` and the orderly end of a recording read the same frames.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import create, remove, rename

MAGIC = b"IAPS"
VERSION = 2
_START = struct.Struct("<4sI")
_FRAME = struct.Struct("<HHIQQQ")  # kind, source, part, payload bytes, time, begin
_CHECK = struct.Struct("<I")
_HEAD_BYTES = _CHECK.size + _FRAME.size  # of a frame's header
MAX_PAYLOAD = 1 << 30


class FrameKind(IntEnum):
    """What a frame's payload is."""

    HEADER = 1  # JSON, the members of the capture's header that are known at the start
    STALLS = 2  # `part` columns of u64, one after the other; `source` is the stream
    LAUNCHES = 3  # LAUNCH records
    KERNEL = 5  # `part` bytes of JSON, then the ELF file
    SIDEBAND = 6  # perf records; `source` is the CPU
    LOSS = 7  # JSON
    END = 8  # JSON, the members of the header that are known only at the end
    APPEND = 9  # JSON, lists that are appended to the header's lists of the same names
    METRICS = 10  # a JSON line of `part` bytes that names the columns; then rows of little-endian u64
    PROCESS = 11  # JSON, what /proc says of a process: see symbolize.containers.describe
    PIECE = 12  # a CHUNK record without the unused end of its data; losses show this name
    STACKS = 14  # stack_dtype(part) records
    CPU_SAMPLES = 13  # CPU_SAMPLE records
    PYTHON = 16  # PYTHON_STACK records
    CODES = 17  # CODE records
    INTERPRETER = 18  # JSON, where the CPython of a process keeps its frames
    LISTS = 19  # LIST_EVENT records
    TRANSFERS = 21  # LAUNCH records of copies and fills
    WAITS = 23  # WAIT records
    COPY = 15  # COPY records, of stacks that were not finished while recording


@dataclass(frozen=True)
class Frame:
    """One frame; times are CLOCK_MONOTONIC ns."""

    kind: FrameKind
    source: int
    part: int
    time: int
    begin: int
    payload: bytes
    position: int = 0  # in the spool, for SpoolReader.frame_at

    @property
    def payload_position(self) -> int:
        """The payload's position in the spool, for SpoolReader.bytes_at."""
        return self.position + _HEAD_BYTES


class Spool:
    """The open spool of a recording."""

    def __init__(self, path: Path) -> None:
        """Creates the file, readable and writable by its owner only.

        Raises:
            IaprofError: the file exists (a recording writes to it, or one died) or cannot be created.
        """
        self.path = path
        self.size = _START.size
        try:
            self._fd = create(path)
            os.write(self._fd, _START.pack(MAGIC, VERSION))
        except FileExistsError:
            raise IaprofError(
                f"{path} exists: a recording to it is under way, or one did not finish; then save it with "
                f"'iaprof recover {path}' or delete it"
            ) from None
        except OSError as error:
            raise IaprofError(f"{path} cannot be written: {error.strerror}") from error

    def write(
        self,
        kind: FrameKind,
        *payload: bytes | memoryview,
        time: int = 0,
        begin: int = 0,
        source: int = 0,
        part: int = 0,
    ) -> None:
        """Appends a frame.

        Args:
            kind: the frame's kind.
            payload: buffers that together are the payload.
            time: when the payload was read, CLOCK_MONOTONIC ns.
            begin: the earliest time that the payload can be about, CLOCK_MONOTONIC ns.
            source: stream or CPU.
            part: see FrameKind.

        Raises:
            IaprofError: the disk is full, or writing failed otherwise. The spool then ends with the frames before
                and, if there is room, a loss that describes this one.
        """
        buffers = framed(kind, *payload, time=time, begin=begin, source=source, part=part)
        size = sum(map(len, buffers[1:]))
        try:
            self._append(buffers)
        except IaprofError as error:
            # The frame's beginning was truncated away, which makes room for the loss.
            count = size // (8 * part) if kind is FrameKind.STALLS and part else None
            detail = f"a frame of {kind.name} of source {source}: {error}"
            row = {"source": "spool", "what": "unwritten", "count": count, "detail": detail}
            with contextlib.suppress(IaprofError):
                self._append(framed(FrameKind.LOSS, json.dumps(row).encode(), time=time, begin=begin))
            raise

    def _append(self, buffers: list[memoryview]) -> None:
        with self._appending(sum(map(len, buffers))):
            while buffers:
                written = os.writev(self._fd, buffers[:1000])
                while buffers and written >= len(buffers[0]):
                    written -= len(buffers.pop(0))
                if written:
                    buffers[0] = buffers[0][written:]

    @contextlib.contextmanager
    def _appending(self, length: int) -> Iterator[None]:
        """Makes writing all or nothing: truncates the file after an OSError, else adds `length` to `size`."""
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
                os.lseek(self._fd, self.size, os.SEEK_SET)
            raise IaprofError(f"the recording cannot go on, {self.path}: {error.strerror}") from error
        self.size += length

    def take_over(self, fd: int) -> None:
        """Appends the content of another file, which are whole frames.

        Raises:
            IaprofError: see `write`.
        """
        length, position = os.fstat(fd).st_size, 0
        with self._appending(length):
            while position < length:
                position += os.sendfile(self._fd, fd, position, length - position)

    def rename(self, path: Path) -> None:
        """Renames the file within its folder.

        Raises:
            IaprofError: it cannot be renamed.
        """
        try:
            rename(self.path, path)
        except OSError as error:
            raise IaprofError(f"{self.path} cannot be renamed to {path.name}: {error.strerror}") from error
        self.path = path

    def fileno(self) -> int:
        """Returns the descriptor of the file, to read it even if its path leads to another file now."""
        return self._fd

    def close(self) -> None:
        """Closes the file without deleting it."""
        os.close(self._fd)

    def remove(self) -> None:
        """Deletes the file: the capture holds its content."""
        remove(self.path)


def framed(
    kind: FrameKind,
    *payload: bytes | memoryview,
    time: int = 0,
    begin: int = 0,
    source: int = 0,
    part: int = 0,
) -> list[memoryview]:
    """Returns the buffers of a frame, in order: see Spool.write."""
    buffers = [memoryview(buffer).cast("B") for buffer in payload]
    head = _FRAME.pack(kind, source, part, sum(map(len, buffers)), time, begin)
    return [memoryview(_CHECK.pack(zlib.crc32(head)) + head), *buffers]


class SpoolError(IaprofError):
    """The file is no spool that this version reads."""


class SpoolReader:
    """Reads a spool, which may be cut off, and come from anyone."""

    def __init__(self, path: Path) -> None:
        """Opens a spool.

        Raises:
            SpoolError: the file cannot be opened, or is no spool of this version.
        """
        self.path = path
        self.cut = 0  # bytes at the end that are no whole frame; known when `frames` is exhausted
        self.unknown = 0  # frames of a kind that this version does not know; likewise
        try:
            if path.exists() and not path.is_file():
                raise SpoolError(f"{path} is not a file")
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise SpoolError(f"{path} cannot be opened: {error.strerror}") from error
        start = self._file.read(_START.size)
        if len(start) < _START.size or start[:4] != MAGIC:
            raise SpoolError(f"{path} is not the spool of a recording")
        if (version := _START.unpack(start)[1]) != VERSION:
            other = "a newer" if version > VERSION else "an older"
            raise SpoolError(f"{path} was made by {other} iaprof: recover it with that one")
        self._size = os.fstat(self._file.fileno()).st_size

    def frames(self, kinds: Container[int] | None = None) -> Iterator[Frame]:
        """Reads all whole frames, from the start.

        Args:
            kinds: only frames of these kinds; None for all.
        """
        position = _START.size
        self._file.seek(position)
        while True:
            head = self._file.read(_HEAD_BYTES)
            if len(head) < _HEAD_BYTES or zlib.crc32(head[4:]) != _CHECK.unpack_from(head)[0]:
                break
            kind, source, part, length, time, begin = _FRAME.unpack_from(head, _CHECK.size)
            if position + len(head) + length > self._size or length > MAX_PAYLOAD:
                break
            if kinds is not None and kind not in kinds:
                position += len(head) + length
                self._file.seek(position)
                continue
            payload = self._file.read(length)
            if len(payload) < length:
                break
            here, position = position, position + len(head) + length
            if kind in FrameKind.__members__.values():
                yield Frame(FrameKind(kind), source, part, time, begin, payload, here)
            else:
                self.unknown += 1
        self.cut = self._size - position

    def frame_at(self, position: int) -> Frame:
        """Reads a frame of `frames` again; not to be called while `frames` runs."""
        self._file.seek(position + _CHECK.size)
        kind, source, part, length, time, begin = _FRAME.unpack(self._file.read(_FRAME.size))
        return Frame(FrameKind(kind), source, part, time, begin, self._file.read(length), position)

    def bytes_at(self, position: int, length: int) -> bytes:
        """Reads `length` bytes, fewer at the end of the file; may be called while `frames` runs."""
        return os.pread(self._file.fileno(), length, position)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
