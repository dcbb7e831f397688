"""Launches on known paths, which a library of ours recognises in its process (record/kernels/inject_cuda_paths.c).

The library asks, with the first launch on a path, which words of memory its stack was found from. BPF sends what it has
read, and this module answers in memory that the process shares: the words' addresses and values, which the library
compares at further launches. Of those that are on the path it sends rows, with a time and a number: the rest of such a
launch is that of the path's last one that BPF has seen, the path's pattern here.

The memory is taken by its descriptor in the process, with the process's own rights to it, so that a process can have
nothing written but what it could write itself. Only pages that the process has touched are written to: the others would
count as the recorder's memory. Rows that the process has not sent when it ends, or when the recording does, are read
from there.

A process may do with that memory what it likes meanwhile: truncate it, or keep its lock. So it is written through a
mapping, which takes no lock, by process_vm_writev, which is told of missing pages instead of being sent a signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.processes import TICK_NS, born_ns
from iaprof.formats.wire.launches import LAUNCH, PYTHON_OFFSETS, LaunchFlags

MOST_PROCESSES = 64  # each takes three descriptors
MOST_PATTERNS = 1 << 17
ROW = np.dtype([("time", "<u8"), ("path", "<u4"), ("correlation", "<u4"), ("cpu", "<u4"), ("unused", "<u4")])
"""A launch: CLOCK_MONOTONIC ns, the number of its path, what CUPTI calls it, and its CPU."""

# The layout of inject_cuda_paths.c
THREADS, ROWS, SLOTS, SLOT_BYTES = 32, 1 << 16, 1024, 8192
PAGE = 4096
_FIRST_SLOT = PAGE + ROWS * ROW.itemsize  # of a thread
THREAD_BYTES = _FIRST_SLOT + SLOTS * SLOT_BYTES
_MEMORY_BYTES = PAGE + THREADS * THREAD_BYTES
_SLOT = struct.Struct("<QQQQ")  # path, state, number of words, whether the process was known to be Python
MOST_WORDS = (SLOT_BYTES - _SLOT.size) // 16

_MOST_MISSING, _MOST_HEAD, _MOST_ADDRESS = 1 << 32, 1 << 60, 1 << 47  # more cannot be true
_ANEW_NS = 1_000_000_000  # a process becomes another program, with other memory, at most this often

# Rows that are read from memory in a second, and at once: a process could have us read them for nothing.
_READ_A_SECOND, _READ_AT_ONCE = 1 << 20, 1 << 22

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)
_Words = list[tuple[int, int]]
_Rows = tuple[int, NDArray[np.void]]  # pid, ROW[n]


class LaunchPaths:
    """The patterns of all paths, and the memory of the processes that have them."""

    def __init__(self, begin_ns: int) -> None:
        """Knows no path.

        Args:
            begin_ns: of the recording, CLOCK_MONOTONIC: no launch was before.
        """
        self._begin_ns = begin_ns
        self._memory: dict[int, _Memory] = {}  # by pid
        self._keys = np.empty(0, np.uint64)  # of the patterns, ascending
        self._patterns = np.empty(0, LAUNCH)
        self._left: list[_Rows] = []  # of programs that processes were before
        self._allowance = _Allowance()
        self._epoch = 0
        self._unknown = 0

    def learn(self, launches: NDArray[np.void], asked: NDArray[np.void]) -> None:
        """Keeps the patterns among LAUNCH[n], and answers PATH[m], which were read before these."""
        seen = launches[launches["path"] > 0]
        if len(seen):
            self._keep(seen)
        for path in asked:  # one for each path
            pid = int(path["pid"])
            if path["asked"]["is_known"]:  # its stack has frames of Python that the path does not depend on
                if (known := self._memory.get(pid)) is not None:
                    known.forget(path)
                continue
            is_kept = self._find(_keys(path["pid"], path["asked"]["path"]).reshape(1))[0] >= 0
            if is_kept and (words := words_of(path)) is not None and (memory := self._open(pid, path)):
                memory.answer(path, words)

    def _keep(self, launches: NDArray[np.void]) -> None:
        keys = _keys(launches["pid"], launches["path"])
        at = self._find(keys)
        self._patterns[at[at >= 0]] = launches[at >= 0]
        if (at >= 0).all():
            return
        keys, launches = np.concatenate([self._keys, keys[at < 0]]), launches[at < 0]
        patterns = np.concatenate([self._patterns, launches])
        order = np.argsort(keys, kind="stable")
        last = order[np.append(keys[order][1:] != keys[order][:-1], True)]
        self._keys, self._patterns = keys[last], patterns[last]
        if len(last) > MOST_PATTERNS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drops half of the patterns of the process that has most: those that were not proven for the longest time."""
        pids, many = np.unique(self._patterns["pid"], return_counts=True)
        own = np.flatnonzero(self._patterns["pid"] == pids[np.argmax(many)])
        old = own[np.argsort(self._patterns["time"][own])[: len(own) // 2 + 1]]
        self._keys, self._patterns = np.delete(self._keys, old), np.delete(self._patterns, old)

    def _find(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the indices of patterns with these keys; -1 for none."""
        if not len(self._keys):
            return np.full(len(keys), -1)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, at, -1)

    def _open(self, pid: int, path: np.void) -> _Memory | None:
        inode = int(path["asked"]["inode"])
        known = self._memory.get(pid)
        if known is not None and known.inode == inode:
            return known
        if known is not None and time.monotonic_ns() - known.opened_ns < _ANEW_NS:
            return None  # it asks again
        if known is not None:  # the process has become another program
            self._leave(pid)
        if len(self._memory) >= MOST_PROCESSES:
            for ended in [each for each, memory in self._memory.items() if memory.has_ended()]:
                self._leave(ended)
        if len(self._memory) >= MOST_PROCESSES:
            return None
        memory = _shared_memory(pid, int(path["asked"]["descriptor"]), inode, int(path["born"]), self._allowance)
        if memory is not None:
            self._memory[pid] = memory
            memory.write_epoch(self._epoch)
        return memory

    def _leave(self, pid: int) -> None:
        """Closes the memory of a process, and keeps its rows for `launches_of`."""
        self._left += [(pid, rows) for rows in self._memory[pid].unsent_rows()]
        self._close(pid)

    def _close(self, pid: int) -> None:
        memory = self._memory.pop(pid)
        self._unknown += memory.take_missing()
        memory.close()

    def launches_of(self, messages: NDArray[np.void], now: int) -> Iterator[NDArray[np.void]]:
        """Yields the launches in MESSAGE[n] of MessageOf.LAUNCHES: LAUNCH[m]."""
        left, self._left = self._left, []
        yield from self._launches(chain(left, self._rows_of(messages)), now)

    def _rows_of(self, messages: NDArray[np.void]) -> Iterator[_Rows]:
        for message in messages:
            pid, many = int(message["pid"]), int(message["bytes"]) // ROW.itemsize
            rows = np.frombuffer(bytes(message["data"])[: many * ROW.itemsize], ROW)
            if (memory := self._memory.get(pid)) is None:  # another recorder has answered
                yield pid, rows
            else:
                for some in memory.new_rows(int(message["id"]), int(message["begin"]), rows):
                    yield pid, some

    def unsent(self, now: int, pid: int | None = None) -> Iterator[NDArray[np.void]]:
        """Yields launches that processes have not sent yet, of one process or of all: LAUNCH[n]."""
        some = list(self._memory) if pid is None else {pid} & self._memory.keys()
        yield from self._launches(((each, rows) for each in some for rows in self._memory[each].unsent_rows()), now)

    def _launches(self, found: Iterable[_Rows], now: int) -> Iterator[NDArray[np.void]]:
        """Yields the launches of rows: up to 2 * ROWS at once, and all if there are fewer."""
        some: list[_Rows] = []
        many = 0
        for each in found:
            some.append(each)
            many += len(each[1])
            if many >= ROWS:
                yield self._expanded(some, now)
                some, many = [], 0
        if some:
            yield self._expanded(some, now)

    def _expanded(self, some: list[_Rows], now: int) -> NDArray[np.void]:
        """Returns the launches of rows: LAUNCH[n]."""
        pids = np.concatenate([np.full(len(rows), pid, np.uint32) for pid, rows in some])
        all_rows = np.concatenate([rows for _, rows in some])
        at = self._find(_keys(pids, all_rows["path"]))
        is_known = at >= 0
        self._unknown += int(np.count_nonzero(~is_known))
        at, all_rows = at[is_known], all_rows[is_known]
        launches: NDArray[np.void] = self._patterns[at]
        launches["time"] = np.clip(all_rows["time"], self._begin_ns, now)
        launches["correlation"], launches["cpu"] = all_rows["correlation"], all_rows["cpu"]
        return launches

    def new_epoch(self) -> None:
        """Has each path proven again, as BPF sends the stacks of another output file."""
        self._epoch += 1
        for memory in self._memory.values():
            memory.write_epoch(self._epoch)

    def forget_stacks(self, before_ns: int) -> None:
        """Forgets the stacks of the file before: those of launches before this time."""
        is_old = self._patterns["time"] < before_ns
        self._patterns["stack"][is_old] = 0
        self._patterns["flags"][is_old] |= np.uint32(LaunchFlags.NO_STACK)

    def take_lost(self) -> int:
        """Returns the number of launches that were lost since the last call, as messages were, or processes lied."""
        lost = self._unknown + sum(memory.take_missing() for memory in self._memory.values())
        self._unknown = 0
        return lost

    def ended(self, pid: int) -> None:
        """Forgets a process, after its last rows, unless it goes on: it may only seem to have ended."""
        if (memory := self._memory.get(pid)) is not None and memory.has_ended():
            self._close(pid)
            stay = self._patterns["pid"] != pid
            self._keys, self._patterns = self._keys[stay], self._patterns[stay]

    def has(self, pid: int) -> bool:
        """Whether a process has paths."""
        return pid in self._memory

    def close(self) -> None:
        """Closes the memory of all processes."""
        for memory in self._memory.values():
            memory.close()
        self._memory.clear()


class _Allowance:
    """How many rows may be read from the memory of processes."""

    def __init__(self) -> None:
        self._rows, self._since = float(_READ_AT_ONCE), time.monotonic()

    def take(self, many: int) -> bool:
        """Whether so many may be read now."""
        now = time.monotonic()
        self._rows = min(self._rows + (now - self._since) * _READ_A_SECOND, _READ_AT_ONCE)
        self._since = now
        if many > self._rows:
            return False
        self._rows -= many
        return True


class _Memory:
    """The memory of a process."""

    def __init__(self, process: int, fd: int, inode: int, allowance: _Allowance) -> None:
        """Takes over two descriptors, if nothing is raised.

        Args:
            process: of the process.
            fd: of its memory.
            inode: of the memory.
            allowance: for reading it.

        Raises:
            OSError: the process may not write to it.
            ValueError: it is too short.
        """
        self._mapping = mmap.mmap(fd, _MEMORY_BYTES)
        self._at = ctypes.c_char.from_buffer(self._mapping)
        self._process, self._fd, self.inode, self._allowance = process, fd, inode, allowance
        self.opened_ns = time.monotonic_ns()
        self._next = dict[int, int]()  # number of the row that comes next, by thread
        self._missing = 0

    def answer(self, path: np.void, words: _Words) -> None:
        """Writes a path's words. If that cannot be done, the process gets no answer."""
        offset = int(path["asked"]["offset"])
        if not _is_slot(offset):
            return
        if path["state"]:  # by this layout the state was found
            layout = int(path["layout"]["thread_frame"]) | int(path["layout"]["thread_cframe"]) << 16
            self._write(struct.pack("<Q", layout), 8)
        content = np.array(words, np.uint64).tobytes()
        if self._write(_SLOT.pack(0, int(path["state"]), len(words), bool(path["has_layout"])) + content, offset):
            self._write(struct.pack("<Q", int(path["asked"]["path"])), offset)

    def forget(self, path: np.void) -> None:
        """Takes back an answer, if the process has this memory still."""
        if path["asked"]["inode"] == self.inode and _is_slot(int(path["asked"]["offset"])):
            self._write(bytes(8), int(path["asked"]["offset"]))

    def write_epoch(self, epoch: int) -> None:
        self._write(struct.pack("<Q", epoch), 0)

    def _write(self, content: bytes, offset: int) -> bool:
        """Writes to pages that the process has touched; False if that cannot be done."""
        address = ctypes.addressof(self._at) + offset
        first = address & -PAGE
        pages = ctypes.create_string_buffer((address + len(content) - first + PAGE - 1) // PAGE)
        if _libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(PAGE * len(pages)), pages) != 0:
            return False
        if not all(page & 1 for page in pages.raw):
            return False
        buffer = ctypes.create_string_buffer(content, len(content))
        own, there = _IoVec(ctypes.addressof(buffer), len(content)), _IoVec(address, len(content))
        written = _libc.process_vm_writev(os.getpid(), ctypes.byref(own), 1, ctypes.byref(there), 1, 0)
        return bool(written == len(content))

    def new_rows(self, thread: int, first: int, rows: NDArray[np.void]) -> list[NDArray[np.void]]:
        """Returns those rows of a thread, from the row number `first` on, that have not come before."""
        if thread >= THREADS:
            self._missing += len(rows)
            return []
        if first + len(rows) > self._head(thread):
            # Right after the process became another program, they are of the one before, and `unsent_rows` gave them.
            if time.monotonic_ns() - self.opened_ns > _ANEW_NS:
                self._missing += len(rows)
            return []
        expected = self._next.get(thread, 0)
        self._next[thread] = max(first + len(rows), expected)
        if first <= expected:
            return [rows[expected - first :]]
        return [self._stored_rows(thread, expected, first), rows]  # a message was lost

    def _stored_rows(self, thread: int, first: int, end: int) -> NDArray[np.void]:
        """Returns rows of a thread that the memory still has, and counts the others of these as missing."""
        begin = max(first, end - ROWS)
        rows = np.frombuffer(self._content(thread, begin, end) if self._allowance.take(end - begin) else b"", ROW)
        if len(rows) == end - begin:
            overwritten = max(self._head(thread) - ROWS + 1 - begin, 0)  # now; one of these perhaps only half
            rows = rows[min(overwritten, len(rows)) :]
        else:
            rows = rows[:0]
        self._missing += min(end - first - len(rows), _MOST_MISSING)
        return rows

    def _content(self, thread: int, begin: int, end: int) -> bytes:
        start, size = PAGE + thread * THREAD_BYTES + PAGE, ROW.itemsize
        first = begin % ROWS
        many = min(end - begin, ROWS - first)
        return self._read(many * size, start + first * size) + self._read((end - begin - many) * size, start)

    def _head(self, thread: int) -> int:
        """Returns the number of rows of a thread so far; 0 if it cannot be right."""
        head = int.from_bytes(self._read(8, PAGE + thread * THREAD_BYTES), "little")
        return head if head < _MOST_HEAD else 0

    def unsent_rows(self) -> Iterator[NDArray[np.void]]:
        """Yields the rows of each thread that have not come."""
        for thread in range(THREADS):
            head, expected = self._head(thread), self._next.get(thread, 0)
            if not head:  # no thread has used it yet, nor those after it
                break
            if expected < head:
                self._next[thread] = head
                yield self._stored_rows(thread, expected, head)

    def _read(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self._fd, size, offset)
        except OSError:
            return b""

    def take_missing(self) -> int:
        missing, self._missing = self._missing, 0
        return missing

    def has_ended(self) -> bool:
        """Whether all threads of the process have ended."""
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        del self._at
        self._mapping.close()
        os.close(self._fd)
        os.close(self._process)


class _IoVec(ctypes.Structure):  # struct iovec
    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


def _is_slot(offset: int) -> bool:
    thread, inside = divmod(offset - PAGE, THREAD_BYTES)
    return 0 <= thread < THREADS and inside >= _FIRST_SLOT and (inside - _FIRST_SLOT) % SLOT_BYTES == 0


def words_of(path: np.void) -> _Words | None:
    """Returns addresses and values of the words that a PATH's stack depends on, as they were read; None if too many."""
    depth = int(path["depth"])
    ips, cfas, bases, values, kept_at = (
        path[name][:depth].tolist() for name in ("ips", "cfas", "bases", "base_values", "kept_at")
    )
    words = _python_words(path)
    sp = 0
    for index in range(depth if path["ends_at_zero"] else depth - 1):
        if cfas[index] <= sp:
            return None
        sp = cfas[index]
        if bases[index]:
            words.append((bases[index], values[index]))
        if kept_at[index]:
            words.append((kept_at[index], cfas[index]))
        words.append((sp - 8, ips[index + 1] if index + 1 < depth else 0))
    is_valid = len(words) <= MOST_WORDS and all(0 < address <= _MOST_ADDRESS for address, _ in words)
    return words if is_valid else None


def _python_words(path: np.void) -> _Words:
    state, layout = int(path["state"]), path["layout"]
    if not state:
        return []
    offset = {name: int(layout[name]) for name in PYTHON_OFFSETS}
    words, holder = [], state
    if offset["thread_cframe"]:
        holder = int(path["cframe"])
        words.append((state + offset["thread_cframe"], holder))
    count = int(path["count"])
    frames = zip(path["frames_at"][:count].tolist(), *_columns(path["frames"][:count]), strict=True)
    at_pointer, loop = holder + offset["thread_frame"], 0  # what points to the next frame; the last loop's structure
    for place, code, instruction in frames:
        if not place:  # the end of an evaluation loop in Python 3.11
            if loop:
                words.append((loop + offset["cframe_previous"], instruction))
            loop = instruction
            continue
        here = place & ~7
        words.append((at_pointer, here))
        if code:
            words.append((here + offset["frame_code"], code | place & 7))
            words.append((here + offset["frame_instruction"], instruction))
        at_pointer = here + offset["frame_previous"]
    return [*words, (at_pointer, 0)]


def _columns(frames: NDArray[np.void]) -> tuple[list[int], list[int]]:
    return frames["code"].tolist(), frames["instruction"].tolist()


def _keys(pids: NDArray[np.uint32], paths: NDArray[np.uint32]) -> NDArray[np.uint64]:
    keys: NDArray[np.uint64] = pids.astype(np.uint64) << np.uint64(32) | paths.astype(np.uint64)
    return keys


def _shared_memory(pid: int, descriptor: int, inode: int, born: int, allowance: _Allowance) -> _Memory | None:
    """Takes the memory that a process shares, by its descriptor there; None if it is not what the process said."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return None
    fd = -1
    try:
        # Another process may have its number by now. Files of other file systems are not even taken: to close one may
        # wait for whoever serves it.
        is_it = abs(born_ns(pid) - born) <= TICK_NS and _is_memory(f"/proc/{pid}", descriptor)
        fd = _libc.syscall(_PIDFD_GETFD, process, descriptor, 0) if is_it else -1  # Linux 5.6
        if fd < 0:
            raise OSError
        if not _is_memory("/proc/self", fd):  # the process has replaced it meanwhile
            other, fd = fd, -1
            with contextlib.suppress(RuntimeError):  # there is no room for a thread: it stays open
                threading.Thread(target=os.close, args=(other,), daemon=True).start()
            raise OSError
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # which only memory has
        if os.fstat(fd).st_ino != inode:
            raise OSError
        return _Memory(process, fd, inode, allowance)
    except (OSError, ValueError):
        if fd >= 0:
            os.close(fd)
        os.close(process)
        return None


def _is_memory(process: str, descriptor: int) -> bool:
    """Whether a descriptor is of memory, as far as the kernel says without asking a file system.

    Raises:
        OSError: the process has ended, or has closed it.
    """
    # The name first: what the kernel says of other descriptors may be long, as of each file that an epoll waits for.
    is_named_so = os.readlink(f"{process}/fd/{descriptor}").startswith("/memfd:")
    return is_named_so and _mount(process, descriptor) == _mount_of_memory()


def _mount(process: str, descriptor: int) -> str:
    """Returns the number of the mount of a descriptor's file."""
    about = Path(f"{process}/fdinfo/{descriptor}").read_text()
    return next((line for line in about.splitlines() if line.startswith("mnt_id:")), "")


@cache
def _mount_of_memory() -> str:
    """Returns the number of the mount that has all memfds, those of all containers."""
    fd = os.memfd_create("iaprof")
    try:
        return _mount("/proc/self", fd)
    finally:
        os.close(fd)
