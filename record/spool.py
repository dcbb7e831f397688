"""The spool: an append-only file that a recording goes to as it comes, and that survives the recorder's death.

It starts with a magic number, a version and a random mark. Then come frames: the mark, a header with its own checksum,
and a payload, whose checksum the header has. A frame reaches the kernel in one write, so after `kill -9` only what had
not been read from its source is missing, and perhaps the end of the last frame. `iaprof recover` and the orderly end of
a recording read the same frames.

Where a disk has damaged a header, reading goes on at the next mark with a good header. Nobody whose data is in payloads
knows the mark, so nothing in there is taken for a frame. Checksums are CRC-32.

Records that are mostly zeros, or much like those before them, are compressed in zlib's format, by ISA-L at its fastest
level: launches of a training to an eighth at 2.2 GB/s. zlib needs five times as long for a tenth, and eight times for
one stack. Stalls are not compressed: they come in gigabytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import struct
import zlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple

from isal import isal_zlib
from isal.igzip_lib import IsalError

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import create, remove, rename

MAGIC = b"IAPS"
VERSION = 7
_START = struct.Struct("<4sI8s")
# kind, source, shape, stored bytes, bytes of the payload, time, begin, checksum of what is stored
_FRAME = struct.Struct("<HHIIIQQI")
_CHECK = struct.Struct("<8sI")  # the mark, the checksum of what follows in the header
_HEAD_BYTES = _CHECK.size + _FRAME.size  # of a frame's header
_MARK = secrets.token_bytes(8)  # of all spools of this process: the state of one is appended to the next
_SEARCHED_FIRST, _SEARCHED_AT_ONCE = 1 << 12, 1 << 20  # bytes
MAX_PAYLOAD = 1 << 30
_LEAST_COMPRESSED = 256  # bytes
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


class FrameKind(IntEnum):
    """What a frame's payload is."""

    HEADER = 1  # JSON, the members of the capture's header that are known at the start
    STALLS = 2  # `shape` columns of u64, one after the other; `source` is the stream
    LAUNCHES = 3  # LAUNCH records
    KERNEL = 5  # `shape` bytes of JSON, then the ELF file
    SIDEBAND = 6  # perf records; `source` is the CPU
    LOSS = 7  # JSON
    END = 8  # JSON, the members of the header that are known only at the end
    APPEND = 9  # JSON, lists that are appended to the header's lists of the same names
    METRICS = 10  # a JSON line of `shape` bytes that names the columns; then rows of little-endian u64
    PROCESS = 11  # JSON, what /proc says of a process: see bpf.accounts.describe
    PIECE = 12  # a CHUNK record without the unused end of its data; losses show this name
    STACKS = 14  # stack_dtype(shape) records
    CPU_SAMPLES = 13  # CPU_SAMPLE records
    PYTHON = 16  # PYTHON_STACK records
    CODES = 17  # CODE records
    INTERPRETER = 18  # JSON, where the CPython of a process keeps its frames
    LISTS = 19  # LIST_EVENT records
    TRANSFERS = 21  # LAUNCH records of copies and fills
    WAITS = 23  # WAIT records
    EXECUTIONS = 24  # EXECUTION records
    GPU_JOBS = 26  # JSON of `shape` bytes, the formats of the tracepoints; then perf records; `source` is the CPU
    KERNEL_NAME = 25  # JSON, the whole name of a kernel of a process
    COPY = 15  # COPY records, of stacks that were not finished while recording


_COMPRESSED = {
    *(FrameKind.LAUNCHES, FrameKind.TRANSFERS, FrameKind.LISTS, FrameKind.CPU_SAMPLES, FrameKind.WAITS),
    *(FrameKind.EXECUTIONS, FrameKind.GPU_JOBS),
    *(FrameKind.STACKS, FrameKind.PYTHON, FrameKind.CODES, FrameKind.COPY, FrameKind.SIDEBAND),
}


class Frame(NamedTuple):
    """One frame; times are CLOCK_MONOTONIC ns."""

    kind: FrameKind
    source: int
    shape: int
    time: int
    begin: int
    payload: bytes
    position: int = 0  # in the spool, for SpoolReader.frame_at


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
            os.write(self._fd, _START.pack(MAGIC, VERSION, _MARK))
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
        shape: int = 0,
    ) -> None:
        """Appends a frame.

        Args:
            kind: the frame's kind.
            payload: buffers that together are the payload.
            time: when the payload was read, CLOCK_MONOTONIC ns.
            begin: the earliest time that the payload can be about, CLOCK_MONOTONIC ns.
            source: stream or CPU.
            shape: see FrameKind.

        Raises:
            IaprofError: the disk is full, or writing failed otherwise. The spool then ends with the frames before
                and, if there is room, a loss that describes this one.
        """
        buffers = framed(kind, *payload, time=time, begin=begin, source=source, shape=shape)
        count = sum(map(len, buffers[1:])) // (8 * shape) if kind is FrameKind.STALLS and shape else None
        try:
            self._append(buffers)
        except IaprofError as error:
            # The frame's beginning was truncated away, which makes room for the loss.
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
            raise IaprofError(f"the recording cannot continue: {self.path}: {error.strerror}") from error
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

    def release(self, until: int) -> None:
        """Frees the disk space of what comes before a position; what reads it gets zeros.

        Raises:
            OSError: the file system cannot do this.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        range_ = ctypes.c_int64(0), ctypes.c_int64(until)
        if libc.fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, *range_) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

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
    shape: int = 0,
    mark: bytes = _MARK,
) -> list[memoryview]:
    """Returns the buffers of a frame, in order: see Spool.write; `mark`: of the spool that it is for."""
    buffers = [memoryview(buffer).cast("B") for buffer in payload]
    size = length = sum(map(len, buffers))
    if kind in _COMPRESSED and size >= _LEAST_COMPRESSED:
        compressed = isal_zlib.compress(buffers[0] if len(buffers) == 1 else b"".join(buffers), 0)
        if len(compressed) < size:
            buffers, length = [memoryview(compressed)], len(compressed)
    check = 0
    for buffer in buffers:
        check = isal_zlib.crc32(buffer, check)
    head = _FRAME.pack(kind, source, shape, length, size, time, begin, check)
    return [memoryview(_CHECK.pack(mark, zlib.crc32(head)) + head), *buffers]


@dataclass
class _Damage:
    """Frames of one kind, or stretches between frames, that cannot be read."""

    count: int = 0
    bytes: int = 0
    begin: int = (1 << 64) - 1
    time: int = 0

    def add(self, bytes_: int, begin: int, time: int) -> None:
        """Adds one, of that many bytes, between two times."""
        self.count, self.bytes = self.count + 1, self.bytes + bytes_
        self.begin, self.time = min(self.begin, begin, time), max(self.time, begin, time)


class SpoolError(IaprofError):
    """The file is not a spool that this version reads."""


class SpoolReader:
    """Reads a spool, which may be cut off, and come from anyone."""

    def __init__(self, path: Path) -> None:
        """Opens a spool.

        Raises:
            SpoolError: the file cannot be opened, or is not a spool of this version.
        """
        self.path = path
        self.cut = 0  # bytes at the end that are not a whole frame; known when `frames` is exhausted
        self.unknown = 0  # frames of a kind that this version does not know; likewise
        self.followed = _START.size  # where `follow` goes on
        self._damage: dict[str, _Damage] = {}  # by the name of the kind; "" between frames
        try:
            if path.exists() and not path.is_file():
                raise SpoolError(f"{path} is not a file")
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise SpoolError(f"{path} cannot be opened: {error.strerror}") from error
        start = self._file.read(_START.size)
        if len(start) < 8 or start[:4] != MAGIC:
            raise SpoolError(f"{path} is not the spool of a recording")
        _, version, self.mark = _START.unpack(start.ljust(_START.size, b"\0"))
        if version != VERSION:
            other = "a newer" if version > VERSION else "an older"
            raise SpoolError(f"{path} was made by {other} iaprof: recover it with that one")
        self.mark = self._mark_of_frames() or self.mark
        self._size = os.fstat(self._file.fileno()).st_size

    def _mark_of_frames(self) -> bytes | None:
        """Returns the mark that the first two frames share: a disk may have damaged that at the start. None: none."""
        position, marks = _START.size, set()
        for _ in range(2):
            head = self._bytes_at(position, _HEAD_BYTES)
            if not _is_whole(head):
                return None
            marks.add(head[: len(self.mark)])
            position += _HEAD_BYTES + _FRAME.unpack_from(head, _CHECK.size)[3]
        return marks.pop() if len(marks) == 1 else None

    def follow(self, kinds: Container[int]) -> Iterator[Frame]:
        """Reads the whole frames of these kinds that were appended since the last call, as the file grows."""
        self._size = os.fstat(self._file.fileno()).st_size
        yield from self.frames(kinds, self.followed)
        self.followed = self._size - self.cut

    def frames(self, kinds: Container[int] | None = None, begin: int = _START.size) -> Iterator[Frame]:
        """Reads all whole frames, from the start.

        Args:
            kinds: only frames of these kinds; None for all.
            begin: position of the first frame to read.
        """
        position, last = begin, 0
        self.cut, self.unknown, self._damage = 0, 0, {}
        while position < self._size:
            self._file.seek(position)
            head = self._file.read(_HEAD_BYTES)
            if not self._is_head(head):
                found = self._next_head(position + 1)
                if found is None and self._size - position < _HEAD_BYTES:
                    break
                found = self._size if found is None else found
                self._damage.setdefault("", _Damage()).add(found - position, last, last)
                position = found
                continue
            kind, source, shape, length, size, time, begin, check = _FRAME.unpack_from(head, _CHECK.size)
            end = position + _HEAD_BYTES + length
            if end > self._size or length > MAX_PAYLOAD:
                break
            here, position, last = position, end, time or last
            if kinds is not None and kind not in kinds:
                continue
            payload = self._payload(length, size, check)
            if payload is None:
                self._damage.setdefault(_name(kind), _Damage()).add(length, begin or last, last)
            elif kind in FrameKind.__members__.values():
                yield Frame(FrameKind(kind), source, shape, time, begin, payload, here)
            else:
                self.unknown += 1
        self.cut = self._size - position

    def _payload(self, length: int, size: int, check: int) -> bytes | None:
        """Reads `length` bytes, and decompresses them if `size` differs; None if they are not as they were written."""
        stored = self._file.read(length)
        if len(stored) < length or isal_zlib.crc32(stored) != check or not length <= size <= MAX_PAYLOAD:
            return None
        if length == size:
            return stored
        decompressor = isal_zlib.decompressobj()
        try:
            payload = decompressor.decompress(stored, size + 1)  # one more than it may have
        except IsalError:  # type: ignore[misc]  # its stub says that this is no class
            return None
        return payload if len(payload) == size and decompressor.eof else None

    def _is_head(self, head: bytes) -> bool:
        return head.startswith(self.mark) and _is_whole(head)

    def _next_head(self, position: int) -> int | None:
        """Finds the next header that is whole, from a position on."""
        length = _SEARCHED_FIRST
        while position < self._size:
            some = self._bytes_at(position, length + len(self.mark) - 1)
            at = some.find(self.mark)
            while at >= 0:
                if self._is_head(self._bytes_at(position + at, _HEAD_BYTES)):
                    return position + at
                at = some.find(self.mark, at + 1)
            position, length = position + length, min(2 * length, _SEARCHED_AT_ONCE)
        return None

    def losses(self, now: int) -> Iterator[tuple[int, int, str, int, str]]:
        """Yields what `frames` could not read: begin and end, CLOCK_MONOTONIC ns, what it is, how much, a sentence."""
        for kind, damage in self._damage.items():
            if kind:
                detail = f"frames of {kind} whose content was changed, {damage.bytes:,} bytes"
                yield damage.begin, damage.time, "damaged", damage.count, detail
            else:
                detail = f"bytes in {damage.count:,} places that hold no frame: the file was damaged there"
                yield damage.begin, damage.time, "overwritten", damage.bytes, detail
        if self.cut:
            yield now, now, "cut short", self.cut, "bytes of a last, unfinished write"
        if self.unknown:
            yield now, now, "damaged", self.unknown, "frames of unknown kinds"

    def frame_at(self, position: int) -> Frame:
        """Reads a frame of `frames` again."""
        self._file.seek(position + _CHECK.size)
        kind, source, shape, length, size, time, begin, check = _FRAME.unpack(self._file.read(_FRAME.size))
        payload = self._payload(length, size, check)
        if payload is None:
            raise SpoolError(f"{self.path} was changed while it was read")
        return Frame(FrameKind(kind), source, shape, time, begin, payload, position)

    def _bytes_at(self, position: int, length: int) -> bytes:
        """Reads `length` bytes, fewer at the end of the file."""
        return os.pread(self._file.fileno(), length, position)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _is_whole(head: bytes) -> bool:
    return len(head) == _HEAD_BYTES and zlib.crc32(head[_CHECK.size :]) == _CHECK.unpack_from(head)[1]


def _name(kind: int) -> str:
    return FrameKind(kind).name if kind in FrameKind.__members__.values() else f"kind {kind}"
