"""The spool: an append-only file that a recording goes to as it comes, and that survives the recorder's death.

It starts with a magic number and a version; then come frames, each a header with its own checksum, and a payload. A
frame reaches the kernel in one write, so that after `kill -9` everything is there but what was not yet read from its
source; the last frame may be cut short. `iaprof recover` reads the same frames that an orderly end reads.
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
_HEAD_BYTES = _CHECK.size + _FRAME.size  # of a frame, before its payload
MAX_PAYLOAD = 1 << 30


class FrameKind(IntEnum):
    """What a frame's payload is."""

    HEADER = 1  # JSON, the capture's header as far as it is known at the start
    STALLS = 2  # `part` columns of u64, one after the other; source is the stream
    LAUNCHES = 3  # LAUNCH records
    KERNEL = 5  # `part` bytes of JSON, then the ELF file
    SIDEBAND = 6  # perf records; source is the CPU
    LOSS = 7  # JSON
    END = 8  # JSON, what is known only at the end
    APPEND = 9  # JSON, lists of which each is added to the header's list of that name
    METRICS = 10  # JSON line that names the columns, `part` bytes; then rows of little-endian u64
    PROCESS = 11  # JSON, what /proc says of one process: pid, ns_pid, cgroup, container
    PIECE = 12  # a CHUNK record, cut behind the bytes that count; losses show this name
    STACKS = 14  # stack records; `part` is the depth they have room for
    CPU_SAMPLES = 13  # CPU_SAMPLE records
    PYTHON = 16  # PYTHON_STACK records
    CODES = 17  # CODE records
    INTERPRETER = 18  # JSON, where a process's CPython keeps its frames
    LISTS = 19  # LIST_EVENT records
    TRANSFERS = 21  # LAUNCH records of copies and fills
    WAITS = 23  # WAIT records
    COPY = 15  # COPY records: a copy of a stack that was not finished while recording


@dataclass(frozen=True)
class Frame:
    """One frame; times are CLOCK_MONOTONIC in ns."""

    kind: FrameKind
    source: int
    part: int
    time: int
    begin: int
    payload: bytes
    position: int = 0  # in the spool, for SpoolReader.frame_at

    @property
    def payload_position(self) -> int:
        """For SpoolReader.bytes_at."""
        return self.position + _HEAD_BYTES


class Spool:
    """The open spool of a recording."""

    def __init__(self, path: Path) -> None:
        """Creates it, for its owner's eyes only.

        Raises:
            IaprofError: it exists (another recording writes there, or one died) or the folder refuses.
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
            kind: of the frame.
            payload: its parts; together they are the payload.
            time: when it was read, CLOCK_MONOTONIC ns.
            begin: when what it holds can have begun, CLOCK_MONOTONIC ns.
            source: stream or CPU.
            part: see FrameKind.

        Raises:
            IaprofError: the disk is full, or the like. The spool ends with the last whole frame, and, where there is
                room for it, a loss that tells of this one.
        """
        pieces = framed(kind, *payload, time=time, begin=begin, source=source, part=part)
        size = sum(map(len, pieces[1:]))
        try:
            self._append(pieces)
        except IaprofError as error:
            # What the frame wrote in part was taken back, and makes room for this.
            count = size // (8 * part) if kind is FrameKind.STALLS and part else None
            detail = f"a frame of {kind.name} of source {source}: {error}"
            row = {"source": "spool", "what": "unwritten", "count": count, "detail": detail}
            with contextlib.suppress(IaprofError):
                self._append(framed(FrameKind.LOSS, json.dumps(row).encode(), time=time, begin=begin))
            raise

    def _append(self, left: list[memoryview]) -> None:
        with self._appending(sum(map(len, left))):
            while left:
                written = os.writev(self._fd, left[:1000])
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if written:
                    left[0] = left[0][written:]

    @contextlib.contextmanager
    def _appending(self, length: int) -> Iterator[None]:
        """All that is written within is there afterwards, or nothing of it."""
        try:
            yield
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
                os.lseek(self._fd, self.size, os.SEEK_SET)
            raise IaprofError(f"the recording cannot go on, {self.path}: {error.strerror}") from error
        self.size += length

    def take_over(self, fd: int) -> None:
        """Appends the whole frames of another file.

        Raises:
            IaprofError: see `write`.
        """
        length, position = os.fstat(fd).st_size, 0
        with self._appending(length):
            while position < length:
                position += os.sendfile(self._fd, fd, position, length - position)

    def rename(self, path: Path) -> None:
        """Gives the file another name in its folder.

        Raises:
            IaprofError: the folder refuses.
        """
        try:
            rename(self.path, path)
        except OSError as error:
            raise IaprofError(f"{self.path} cannot be renamed to {path.name}: {error.strerror}") from error
        self.path = path

    def fileno(self) -> int:
        """Of the open file, for who reads what was written, whoever has put another one at its path."""
        return self._fd

    def close(self) -> None:
        """Closes the file, which stays."""
        os.close(self._fd)

    def remove(self) -> None:
        """Deletes the file once the capture holds all that was in it."""
        remove(self.path)


def framed(
    kind: FrameKind,
    *payload: bytes | memoryview,
    time: int = 0,
    begin: int = 0,
    source: int = 0,
    part: int = 0,
) -> list[memoryview]:
    """The pieces of a frame, in order: see Spool.write."""
    parts = [memoryview(piece).cast("B") for piece in payload]
    head = _FRAME.pack(kind, source, part, sum(map(len, parts)), time, begin)
    return [memoryview(_CHECK.pack(zlib.crc32(head)) + head), *parts]


class SpoolError(IaprofError):
    """A file is not a spool that this version reads."""


class SpoolReader:
    """Reads a spool, whole or cut off; it may come from anyone."""

    def __init__(self, path: Path) -> None:
        """Opens it.

        Raises:
            SpoolError: it is no spool.
        """
        self.path = path
        self.cut = 0  # bytes at the end that are no whole frame; known when `frames` is through
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
        """Every whole frame from the start.

        Args:
            kinds: only these, when given; the rest is passed over.
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
        """A frame that `frames` gave, once more; not while that goes on."""
        self._file.seek(position + _CHECK.size)
        kind, source, part, length, time, begin = _FRAME.unpack(self._file.read(_FRAME.size))
        return Frame(FrameKind(kind), source, part, time, begin, self._file.read(length), position)

    def bytes_at(self, position: int, length: int) -> bytes:
        """So many bytes from there on, as far as the file goes; also while `frames` goes on."""
        return os.pread(self._file.fileno(), length, position)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
