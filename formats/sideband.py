"""perf's side-band records: what was mapped, forked, renamed and ended, and CPU samples, as the kernel writes it.

The recorder keeps these bytes as they are and they are read when a recording is finished. What already ran at the
start is described in the same records, made here, so that there is one reader for both. Samples are many: they are
only found one by one, and read by whole columns.
Source of the layouts: include/uapi/linux/perf_event.h, Linux 6.18.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_HEADER = struct.Struct("<IHH")  # type, misc, size
_TRAILER = struct.Struct("<IIQII")  # pid, tid, time, cpu, reserved: sample_id_all with TID | TIME | CPU
_MMAP2 = struct.Struct("<IIQQQ24sII")  # pid, tid, address, length, page offset, file or build-id, prot, flags
_TASK = struct.Struct("<IIIIQ")  # pid, ppid, tid, ptid, time
_LOST = struct.Struct("<QQ")  # id, how many
_FILE = struct.Struct("<IIQQ")  # major, minor, inode, generation

# Of a sample with TID | TIME | CPU | CALLCHAIN, in words: header, pid and tid, time, cpu, how many addresses follow.
_CHAIN = 5

LOST, COMM, EXIT, FORK, SAMPLE, MMAP2, LOST_SAMPLES = 2, 3, 4, 7, 9, 10, 13
MISC_EXEC = 1 << 13
MISC_BUILD_ID = 1 << 14
# Among the addresses of a call chain, those from CONTEXT_MAX on say what the ones behind them are.
CONTEXT_KERNEL, CONTEXT_USER, CONTEXT_MAX = -128 % 2**64, -512 % 2**64, -4095 % 2**64


@dataclass
class Mappings:
    """Columns of mapped executable memory, one row each time some was mapped."""

    time: list[int] = field(default_factory=list)  # CLOCK_MONOTONIC, ns
    pid: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)  # of the first byte in the file
    path: list[str] = field(default_factory=list)
    build_id: list[bytes | None] = field(default_factory=list)
    inode: list[int | None] = field(default_factory=list)  # where the kernel told no build-id
    device: list[int | None] = field(default_factory=list)  # likewise: major number << 32 | minor number


@dataclass
class Processes:
    """Columns of what processes and threads did."""

    time: list[int] = field(default_factory=list)  # CLOCK_MONOTONIC, ns
    pid: list[int] = field(default_factory=list)
    tid: list[int] = field(default_factory=list)
    ppid: list[int | None] = field(default_factory=list)
    event: list[str] = field(default_factory=list)  # running, fork, comm, exec or exit
    comm: list[str | None] = field(default_factory=list)


@dataclass
class SampleRecords:
    """Records among which there are samples, for `sample_columns`."""

    data: list[bytes] = field(default_factory=list)  # whole records
    starts: list[int] = field(default_factory=list)  # of the samples in all data together, in words
    size: int = 0  # of the data, bytes

    def add(self, data: bytes, starts: list[int]) -> None:
        """Adds whole records, and where among them the samples start, in words."""
        before = self.size // 8
        self.data.append(data)
        self.starts += [before + start for start in starts]
        self.size += len(data)


@dataclass
class SideBand:
    """What a run of side-band bytes said."""

    mappings: Mappings = field(default_factory=Mappings)
    processes: Processes = field(default_factory=Processes)
    samples: SampleRecords = field(default_factory=SampleRecords)
    lost: int = 0  # records that the kernel had no room for


@dataclass(frozen=True)
class Stacks:
    """Stacks of many samples, one behind the other."""

    depths: NDArray[np.int64]  # [samples]; 0 where a sample has no such stack
    ips: NDArray[np.uint64]  # [sum of depths], each stack's innermost first


@dataclass(frozen=True)
class Samples:
    """Columns of CPU samples; all but the stacks have the shape [samples]."""

    time: NDArray[np.uint64]  # CLOCK_MONOTONIC, ns
    pid: NDArray[np.uint32]
    tid: NDArray[np.uint32]
    cpu: NDArray[np.uint32]
    user: Stacks
    kernel: Stacks


def text(name: bytes) -> str:
    """A name from the kernel up to its first NUL, as text that any encoder takes."""
    return name.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _records(data: bytes) -> tuple[list[tuple[int, int, int, int]], list[int], int]:
    """Where records are, up to what is none.

    Returns:
        Type, misc, start and end of each that is no sample; the samples' starts, in words; the end of the last record.
    """
    words = memoryview(data)[: len(data) // 8 * 8].cast("Q")
    position, end = 0, len(words)
    others, samples = [], []
    while position < end:
        head = words[position]
        length = head >> 51  # the size, in words: the kernel rounds it up to whole ones
        kind = head & 0xFFFFFFFF
        if not 0 < length <= end - position or head >> 48 & 7:
            break
        if kind != SAMPLE:
            others.append((kind, head >> 32 & 0xFFFF, 8 * position + _HEADER.size, 8 * (position + length)))
        elif length >= _CHAIN and words[position + _CHAIN - 1] == length - _CHAIN:
            samples.append(position)
        else:
            break
        position += length
    return others, samples, 8 * position


def decode(data: bytes, into: SideBand) -> None:
    """Adds the records of `data`, whole records in the order of one CPU's buffer, to `into`.

    Raises:
        ValueError: what follows those that were added is no record.
    """
    mappings, processes = into.mappings, into.processes
    others, samples, whole = _records(data)
    if samples:
        into.samples.add(data[:whole], samples)
    for kind, misc, start, end in others:
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
            running = kind == FORK and ptid == tid  # made by `running_record`: no task is its own parent
            event = "running" if running else "fork" if kind == FORK else "exit"
            _add_process(processes, time, pid, tid, ppid, event, None)
        elif kind == LOST and end >= start + _LOST.size:
            into.lost += _LOST.unpack_from(data, start)[1]
        elif kind == LOST_SAMPLES and end >= start + 8:
            into.lost += struct.unpack_from("<Q", data, start)[0]
    if whole != len(data):
        raise ValueError(f"{len(data) - whole} of its bytes are no records")


def samples_of(data: bytes, into: SampleRecords) -> None:
    """Adds only the samples of what `decode` takes, and says nothing of what is no record."""
    _, samples, whole = _records(data)
    if samples:
        into.add(data[:whole], samples)


def sample_columns(records: SampleRecords) -> Samples:
    """The columns of the samples that `decode` found."""
    words = np.frombuffer(b"".join(records.data), np.uint64)
    starts = np.array(records.starts, np.int64)
    threads, cpus, depths = words[starts + 1], words[starts + 3], words[starts + 4].astype(np.int64)
    user, kernel = _stacks(depths, words[_indices(starts + _CHAIN, depths)])
    return Samples(
        time=words[starts + 2],
        pid=threads.astype(np.uint32),
        tid=(threads >> 32).astype(np.uint32),
        cpu=cpus.astype(np.uint32),
        user=user,
        kernel=kernel,
    )


def _indices(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers from each start on, as many as its length."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def _stacks(depths: NDArray[np.int64], chain: NDArray[np.uint64]) -> tuple[Stacks, Stacks]:
    """User and kernel stacks of call chains: `depths[i]` addresses and context markers each."""
    ends = np.cumsum(depths)
    markers = np.flatnonzero(chain >= CONTEXT_MAX)
    rows = np.searchsorted(ends, markers, side="right")
    # A part reaches from a marker to the next, or to the end of its chain; what has no marker before it is nobody's.
    lengths = np.minimum(np.append(markers[1:], len(chain)), ends[rows]) - markers - 1
    found = []
    for context in (CONTEXT_USER, CONTEXT_KERNEL):
        parts = chain[markers] == context
        ips = chain[_indices(markers[parts] + 1, lengths[parts])]
        found.append(Stacks(np.bincount(rows[parts], lengths[parts], len(depths)).astype(np.int64), ips))
    return found[0], found[1]


def _add_process(
    rows: Processes, time: int, pid: int, tid: int, ppid: int | None, event: str, comm: str | None
) -> None:
    rows.time.append(time)
    rows.pid.append(pid)
    rows.tid.append(tid)
    rows.ppid.append(ppid)
    rows.event.append(event)
    rows.comm.append(comm)


def mapped_paths(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Process and path of each mapping in `data`."""
    for kind, _, start, end in _records(data)[0]:
        if kind == MMAP2 and end - _TRAILER.size >= start + _MMAP2.size:
            pid = struct.unpack_from("<I", data, start)[0]
            yield pid, data[start + _MMAP2.size : end - _TRAILER.size].split(b"\0", 1)[0]


def tasks(data: bytes) -> Iterator[tuple[int, int, int, bool]]:
    """Time, process, parent, and whether it begins (else it ends), of each process that `data` tells of."""
    for kind, _, start, end in _records(data)[0]:
        if kind in (FORK, EXIT) and end - start >= _TASK.size:
            pid, parent, tid, _, time = _TASK.unpack_from(data, start)
            if pid == tid:  # else a thread
                yield time, pid, parent, kind == FORK


def records_of(data: bytes, pids: Container[int]) -> bytes:
    """The records that say what these processes mapped, who forked them and what they are called."""
    kept = []
    for kind, _, start, end in _records(data)[0]:
        if kind in (MMAP2, COMM, FORK) and end - start >= 4 and struct.unpack_from("<I", data, start)[0] in pids:
            kept.append(data[start - _HEADER.size : end])
    return b"".join(kept)


def mapping_record(
    time: int, pid: int, start: int, length: int, offset: int, path: bytes, build_id: bytes, inode: tuple[int, int, int]
) -> bytes:
    """An MMAP2 record for memory that was mapped before the recording started.

    Args:
        time: CLOCK_MONOTONIC, ns.
        pid: whose it is.
        start: its first address.
        length: bytes.
        offset: of its first byte in the file.
        path: the file's, cut at 4,096 bytes.
        build_id: empty when unknown; the record then holds `inode`.
        inode: device major, minor and inode.
    """
    file = struct.pack("<B3x20s", len(build_id), build_id) if build_id else _FILE.pack(*inode, 0)
    name = path[:4096] + b"\0" * (8 - len(path[:4096]) % 8)
    body = _MMAP2.pack(pid, pid, start, length, offset, file, 5, 2) + name
    return _record(MMAP2, MISC_BUILD_ID if build_id else 0, body, pid, time)


def running_record(time: int, pid: int, ppid: int) -> bytes:
    """A record that says that a process was running when the recording started (a FORK whose task is its parent)."""
    return _record(FORK, 0, _TASK.pack(pid, ppid, pid, pid, time), pid, time)


def comm_record(time: int, pid: int, comm: bytes) -> bytes:
    """A COMM record: the name that a running process has."""
    return _record(COMM, 0, struct.pack("<II16s", pid, pid, comm), pid, time)


def _record(kind: int, misc: int, body: bytes, pid: int, time: int) -> bytes:
    size = _HEADER.size + len(body) + _TRAILER.size
    return _HEADER.pack(kind, misc, size) + body + _TRAILER.pack(pid, pid, time, 0, 0)
