"""perf's side-band records: mappings, forks, renames and exits, as the kernel writes them.

The recorder stores the bytes unchanged; they are decoded when the recording is finished. Mappings and processes that
existed before are encoded here as records of the same types, so that one decoder reads both.
Source of the record layouts: include/uapi/linux/perf_event.h, Linux 6.18.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.file_names import as_text

_HEADER = struct.Struct("<IHH")  # type, misc, size
_TRAILER = struct.Struct("<IIQII")  # pid, tid, time, cpu, reserved: sample_id_all with TID | TIME | CPU
_MMAP2 = struct.Struct("<IIQQQ24sII")  # pid, tid, address, length, page offset, file or build-id, prot, flags
_TASK = struct.Struct("<IIIIQ")  # pid, ppid, tid, ptid, time
_LOST = struct.Struct("<QQ")  # id, how many
_FILE = struct.Struct("<IIQQ")  # major, minor, inode, generation

LOST, COMM, EXIT, FORK, MMAP2 = 2, 3, 4, 7, 10
MISC_EXEC = 1 << 13
MISC_BUILD_ID = 1 << 14


@dataclass
class Mappings:
    """Columns of executable mappings, one row per mmap."""

    time: list[int] = field(default_factory=list)  # CLOCK_MONOTONIC, ns
    pid: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)  # of the first byte in the file
    path: list[str] = field(default_factory=list)
    build_id: list[bytes | None] = field(default_factory=list)
    inode: list[int | None] = field(default_factory=list)  # if the kernel gave no build-id
    device: list[int | None] = field(default_factory=list)  # likewise; major number << 32 | minor number


@dataclass
class Processes:
    """Columns of process and thread events."""

    time: list[int] = field(default_factory=list)  # CLOCK_MONOTONIC, ns
    pid: list[int] = field(default_factory=list)
    tid: list[int] = field(default_factory=list)
    ppid: list[int | None] = field(default_factory=list)
    event: list[str] = field(default_factory=list)  # running, fork, comm, exec or exit
    comm: list[str | None] = field(default_factory=list)


@dataclass
class SideBand:
    """The contents of a sequence of side-band records."""

    mappings: Mappings = field(default_factory=Mappings)
    processes: Processes = field(default_factory=Processes)
    lost: int = 0  # records that the kernel dropped for lack of buffer space


def text(name: bytes) -> str:
    """Decodes a name from the kernel up to its first NUL."""
    return as_text(name.split(b"\0", 1)[0])


def records_of(data: bytes) -> tuple[list[tuple[int, int, int, int]], int]:
    """Finds records up to the first malformed one.

    Returns:
        Type, misc, start and end of each record; and the end of the last record.
    """
    words = memoryview(data)[: len(data) // 8 * 8].cast("Q")
    position, end = 0, len(words)
    found = []
    while position < end:
        head = words[position]
        length = head >> 51  # the size in 8-byte words: the kernel pads records to whole ones
        if not 0 < length <= end - position or head >> 48 & 7:
            break
        found.append((head & 0xFFFFFFFF, head >> 32 & 0xFFFF, 8 * position + _HEADER.size, 8 * (position + length)))
        position += length
    return found, 8 * position


def lost_of(data: bytes, start: int) -> int:
    """How many records the kernel dropped, says the LOST record whose body begins at `start`."""
    return int(_LOST.unpack_from(data, start)[1])


def decode(data: bytes, into: SideBand) -> None:
    """Adds the records in `data`, whole records in the order of one CPU's buffer, to `into`.

    Raises:
        ValueError: `data` ends in bytes that are not a record; the records before it were added.
    """
    mappings, processes = into.mappings, into.processes
    found, whole = records_of(data)
    for kind, misc, start, end in found:
        body_end = end - _TRAILER.size
        if kind == MMAP2 and body_end >= start + _MMAP2.size:
            pid, _, address, length, offset, file, _, _ = _MMAP2.unpack_from(data, start)
            mappings.time.append(_TRAILER.unpack_from(data, body_end)[2])
            mappings.pid.append(pid)
            mappings.start.append(address)
            mappings.length.append(length)
            mappings.offset.append(offset)
            mappings.path.append(text(data[start + _MMAP2.size : body_end]))
            has_build_id = misc & MISC_BUILD_ID
            mappings.build_id.append(file[4 : 4 + min(file[0], 20)] if has_build_id and file[0] else None)
            major, minor, inode, _ = (0, 0, 0, 0) if has_build_id else _FILE.unpack(file)
            mappings.inode.append(inode or None)
            mappings.device.append(major << 32 | minor if inode else None)
        elif kind == COMM and body_end >= start + 8:
            pid, tid = struct.unpack_from("<II", data, start)
            event = "exec" if misc & MISC_EXEC else "comm"
            time = _TRAILER.unpack_from(data, body_end)[2]
            _add_process(processes, time, pid, tid, None, event, text(data[start + 8 : body_end]))
        elif kind in (FORK, EXIT) and body_end >= start + _TASK.size:
            pid, ppid, tid, ptid, time = _TASK.unpack_from(data, start)
            running = kind == FORK and ptid == tid  # from `running_record`: a real task is never its own parent
            event = "running" if running else "fork" if kind == FORK else "exit"
            _add_process(processes, time, pid, tid, ppid, event, None)
        elif kind == LOST and end >= start + _LOST.size:
            into.lost += lost_of(data, start)
    if whole != len(data):
        raise ValueError(f"{len(data) - whole} of its bytes are not records")


def _add_process(
    rows: Processes, time: int, pid: int, tid: int, ppid: int | None, event: str, comm: str | None
) -> None:
    rows.time.append(time)
    rows.pid.append(pid)
    rows.tid.append(tid)
    rows.ppid.append(ppid)
    rows.event.append(event)
    rows.comm.append(comm)


def mapped_paths(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Time, pid and path of each mapping in `data`."""
    for kind, _, start, end in records_of(data)[0]:
        if kind == MMAP2 and end - _TRAILER.size >= start + _MMAP2.size:
            pid = struct.unpack_from("<I", data, start)[0]
            yield (
                _TRAILER.unpack_from(data, end - _TRAILER.size)[2],
                pid,
                data[start + _MMAP2.size : end - _TRAILER.size].split(b"\0", 1)[0],
            )


def process_events(data: bytes) -> Iterator[tuple[int, int, int, bool]]:
    """Time, pid, parent's pid and whether it begins (or else ends) of each process event in `data`."""
    for kind, _, start, end in records_of(data)[0]:
        if kind in (FORK, EXIT) and end - start >= _TASK.size:
            pid, parent, tid, _, time = _TASK.unpack_from(data, start)
            if pid == tid:  # others are threads
                yield time, pid, parent, kind == FORK


def possible_forks(data: bytes) -> NDArray[np.uint32]:
    """Pid and parent's pid of each fork of a process in `data`, in order: uint32[n, 2]; see `_tasks`."""
    return _tasks(data, FORK)[0]


def possible_exits(data: bytes) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """Pid and time of each exit of a process's first thread in `data`: uint32[n], uint64[n]; see `_tasks`."""
    pids, times = _tasks(data, EXIT)
    return pids[:, 0], times


def possible_mappings(data: bytes, least: int) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """Pid and file of each mapping in `data` of at least so many bytes: uint32[n], uint64[n, 3]; see `_tasks`.

    A file is a build-id, or device, inode and generation.
    """
    words = np.frombuffer(data, "<u8", len(data) // 8)
    at = np.flatnonzero(words & np.uint64(0xFFFFFFFF) == np.uint64(MMAP2))
    at = at[at + (_HEADER.size + _MMAP2.size) // 8 <= len(words)]
    lengths = words[at + 3]
    at = at[(lengths >= np.uint64(least)) & (lengths < np.uint64(1 << 47)) & (lengths % np.uint64(4096) == 0)]
    return words[at + 1].view("<u4")[::2], words[at[:, None] + np.arange(5, 8)]


def _tasks(data: bytes, kind: int) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
    """Finds the records of a kind about first threads: pid and parent's pid, uint32[n, 2]; times, uint64[n].

    Much faster than `process_events`, as it does not follow the records: what only looks like one is there, too.
    """
    words = np.frombuffer(data, "<u8", len(data) // 8)
    size = _HEADER.size + _TASK.size + _TRAILER.size
    at = np.flatnonzero(words & np.uint64(0xFFFF0000FFFFFFFF) == np.uint64(size << 48 | kind))
    at = at[at + size // 8 <= len(words)]
    pids, tids = (words[at + offset].view("<u4").reshape(-1, 2) for offset in (1, 2))
    is_first = pids[:, 0] == tids[:, 0]
    return pids[is_first], words[at[is_first] + 3]


def process_records(data: bytes, pids: Container[int]) -> bytes:
    """The MMAP2, COMM and FORK records of some processes."""
    kept = []
    for kind, _, start, end in records_of(data)[0]:
        if kind in (MMAP2, COMM, FORK) and end - start >= 4 and struct.unpack_from("<I", data, start)[0] in pids:
            kept.append(data[start - _HEADER.size : end])
    return b"".join(kept)


def mapping_record(
    time: int, pid: int, start: int, length: int, offset: int, path: bytes, build_id: bytes, inode: tuple[int, int, int]
) -> bytes:
    """Encodes an MMAP2 record for memory that was mapped before the recording started.

    Args:
        time: CLOCK_MONOTONIC, ns.
        pid: the process.
        start: first address.
        length: bytes.
        offset: of the first byte in the file.
        path: path of the file, truncated to 4,096 bytes.
        build_id: empty if unknown; the record then has `inode` instead.
        inode: device major, device minor and inode number.
    """
    file = struct.pack("<B3x20s", len(build_id), build_id) if build_id else _FILE.pack(*inode, 0)
    name = path[:4096] + b"\0" * (8 - len(path[:4096]) % 8)
    body = _MMAP2.pack(pid, pid, start, length, offset, file, 5, 2) + name
    return _record(MMAP2, MISC_BUILD_ID if build_id else 0, body, pid, time)


def running_record(time: int, pid: int, ppid: int) -> bytes:
    """Encodes a FORK record for a process that was running when the recording started; the task is its own parent."""
    return _record(FORK, 0, _TASK.pack(pid, ppid, pid, pid, time), pid, time)


def comm_record(time: int, pid: int, comm: bytes) -> bytes:
    """Encodes a COMM record with the name of a running process."""
    return _record(COMM, 0, struct.pack("<II16s", pid, pid, comm), pid, time)


def _record(kind: int, misc: int, body: bytes, pid: int, time: int) -> bytes:
    size = _HEADER.size + len(body) + _TRAILER.size
    return _HEADER.pack(kind, misc, size) + body + _TRAILER.pack(pid, pid, time, 0, 0)
