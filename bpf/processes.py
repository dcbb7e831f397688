"""Side-band records that describe the processes that already run when a recording starts.

Executable mappings come from PROCMAP_QUERY (Linux 6.11; every kernel that can sample EU stalls has it). The kernel
returns each mapping's build-id, so no untrusted file has to be opened; it is asked only for files in file systems that
root mounted, as reading others could take forever.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from iaprof.bpf.accounts import may_read
from iaprof.formats.wire.sideband import comm_record, mapping_record, running_record
from iaprof.sandbox.answering import ANSWERING

TICK_NS = 10_000_000  # of times in /proc
_PROCMAP_QUERY = 0xC0686611  # _IOWR('f', 17, 104 bytes)
_EXECUTABLE = 0x04
_COVERING_OR_NEXT = 0x10
_NAME_BYTES = 4096


class _Query(ctypes.Structure):
    """`struct procmap_query`, include/uapi/linux/fs.h."""

    _fields_ = (
        ("size", ctypes.c_uint64),
        ("query_flags", ctypes.c_uint64),
        ("query_addr", ctypes.c_uint64),
        ("vma_start", ctypes.c_uint64),
        ("vma_end", ctypes.c_uint64),
        ("vma_flags", ctypes.c_uint64),
        ("vma_page_size", ctypes.c_uint64),
        ("vma_offset", ctypes.c_uint64),
        ("inode", ctypes.c_uint64),
        ("dev_major", ctypes.c_uint32),
        ("dev_minor", ctypes.c_uint32),
        ("vma_name_size", ctypes.c_uint32),
        ("build_id_size", ctypes.c_uint32),
        ("vma_name_addr", ctypes.c_uint64),
        ("build_id_addr", ctypes.c_uint64),
    )


def running_pids() -> list[int]:
    """Returns the ids of all processes that /proc shows."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def born_ns(pid: int) -> int:
    """Returns when a process began, CLOCK_BOOTTIME ns in whole TICK_NS; 0 if it has ended."""
    return beginning(pid)[0]


def beginning(pid: int) -> tuple[int, int]:
    """Returns when a process began, as `born_ns`, and where the stack of its first thread starts.

    Each program that it executes has its stack at another address, which the kernel chooses at random by default.
    Both are 0 if it has ended; the address is also 0 if this process may not trace it.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return 0, 0
    fields = stat[stat.rindex(b")") + 2 :].split()
    return int(fields[19]) * TICK_NS, int(fields[25])


def user_of(pid: int) -> int | None:
    """Returns the real user of a process; None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
        return int(status[status.index(b"\nUid:") + 5 :].split(maxsplit=1)[0])
    except (OSError, ValueError):
        return None


def parents() -> dict[int, int]:
    """Returns the parent's pid of each running process, by pid."""
    found = {}
    for pid in running_pids():
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            found[pid] = int(stat[stat.rindex(b")") + 1 :].split()[1])
        except (OSError, ValueError):
            continue  # the process has ended meanwhile
    return found


def snapshot(time_ns: int) -> Iterator[bytes]:
    """Yields side-band records of each running process: that it runs, its name, its executable mappings.

    Args:
        time_ns: the records' time, CLOCK_MONOTONIC.
    """
    for pid in running_pids():
        yield describe(pid, time_ns)


def describe(pid: int, time_ns: int) -> bytes:
    """Returns the side-band records of one process; empty if it has ended."""
    return b"".join(_describe(pid, time_ns))


def _describe(pid: int, now: int) -> Iterator[bytes]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        comm = stat[stat.index(b"(") + 1 : stat.rindex(b")")]
        ppid = int(stat[stat.rindex(b")") + 1 :].split()[1])
        yield running_record(now, pid, ppid)
        yield comm_record(now, pid, comm[:15])
        with open(f"/proc/{pid}/maps", "rb", buffering=0) as maps:
            yield from _mappings(maps.fileno(), pid, now)
    except (OSError, ValueError):
        return  # the process has ended meanwhile, which the side-band reports


def _mappings(fd: int, pid: int, now: int) -> Iterator[bytes]:
    name = ctypes.create_string_buffer(_NAME_BYTES)
    build_id = ctypes.create_string_buffer(20)
    query = _Query(size=ctypes.sizeof(_Query), query_flags=_EXECUTABLE | _COVERING_OR_NEXT)
    while True:
        query.vma_name_addr, query.vma_name_size = ctypes.addressof(name), _NAME_BYTES
        query.build_id_addr = query.build_id_size = 0
        try:
            fcntl.ioctl(fd, _PROCMAP_QUERY, query)
            # The kernel reads the build-id from the file, and waits for its file system.
            device = query.dev_major << 32 | query.dev_minor
            location = f"/proc/{pid}/map_files/{query.vma_start:x}-{query.vma_end:x}"
            if query.inode and may_read(pid, device, user_of) and ANSWERING.answers(device, location):
                query.vma_name_addr, query.vma_name_size = ctypes.addressof(name), _NAME_BYTES
                query.build_id_addr, query.build_id_size = ctypes.addressof(build_id), 20
                fcntl.ioctl(fd, _PROCMAP_QUERY, query)
        except OSError:
            return  # ENOENT: no mapping follows
        path = name.raw[: max(query.vma_name_size, 1) - 1] if query.vma_name_size else b"//anon"
        inode = (query.dev_major, query.dev_minor, query.inode)
        length = query.vma_end - query.vma_start
        found = build_id.raw[: query.build_id_size]
        yield mapping_record(now, pid, query.vma_start, length, query.vma_offset, path, found, inode)
        query.query_addr = query.vma_end
