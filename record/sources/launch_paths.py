"""Launches on known paths, which a library of ours recognises in its process (record/kernels/inject_cuda_paths.c).

The library asks, with the first launch on a path, which words of memory its stack was found from. BPF sends what it has
read, and this module answers in memory that the process shares: the words' addresses and values, which the library
compares at further launches. Of those that are on the path it sends rows, with a time and a number: the rest of such a
launch is that of the path's last one that BPF has seen, the path's pattern here.

The memory is taken by its descriptor in the process, with the process's own rights to it, so that a process can have
nothing written but what it could write itself. Rows that the process has not sent when it ends, or when the recording
does, are read from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.processes import TICK_NS, born_ns
from iaprof.formats.wire.launches import LAUNCH, PYTHON_OFFSETS, LaunchFlags

MOST_PROCESSES = 256  # each takes a descriptor
MOST_PATTERNS = 1 << 17
ROW = np.dtype([("time", "<u8"), ("path", "<u4"), ("correlation", "<u4"), ("cpu", "<u4"), ("unused", "<u4")])
"""A launch: CLOCK_MONOTONIC ns, the number of its path, what CUPTI calls it, and its CPU."""

# The layout of inject_cuda_paths.c
THREADS, ROWS, SLOTS, SLOT_BYTES = 32, 1 << 16, 1024, 8192
PAGE = 4096
_FIRST_SLOT = PAGE + ROWS * ROW.itemsize  # of a thread
THREAD_BYTES = _FIRST_SLOT + SLOTS * SLOT_BYTES
_SLOT = struct.Struct("<QQQQ")  # path, state, number of words; padding
MOST_WORDS = (SLOT_BYTES - _SLOT.size) // 16

_MOST_MISSING, _MOST_HEAD, _MOST_ADDRESS = 1 << 32, 1 << 60, 1 << 47  # more cannot be true

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)
_Words = list[tuple[int, int]]


class LaunchPaths:
    """The patterns of all paths, and the memory of the processes that have them."""

    def __init__(self) -> None:
        self._memory: dict[int, _Memory] = {}  # by pid
        self._keys = np.empty(0, np.uint64)  # of the patterns, ascending
        self._patterns = np.empty(0, LAUNCH)
        self._left: list[tuple[int, list[NDArray[np.void]]]] = []  # rows of programs that processes were before
        self._epoch = 0
        self._unknown = 0

    def learn(self, launches: NDArray[np.void], asked: NDArray[np.void]) -> None:
        """Keeps the patterns among LAUNCH[n], and answers PATH[m], which were read before these."""
        seen = launches[launches["path"] > 0]
        if len(seen):
            self._keep(seen)
        for path in asked:  # one for each path
            pid = int(path["pid"])
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
        asked = path["asked"]
        known = self._memory.get(pid)
        if known is not None and known.inode == asked["inode"]:
            return known
        if known is not None:  # the process has become another program
            self._left.append((pid, known.unsent_rows()))
            self._unknown += known.take_missing()
            known.close()
            del self._memory[pid]
        if len(self._memory) >= MOST_PROCESSES:
            return None
        fd = _shared_memory(pid, int(asked["descriptor"]), int(asked["inode"]), int(path["born"]))
        if fd is None:
            return None
        self._memory[pid] = memory = _Memory(fd, int(asked["inode"]))
        memory.write_epoch(self._epoch)
        return memory

    def launches_of(self, messages: NDArray[np.void], now: int) -> NDArray[np.void]:
        """Returns the launches in MESSAGE[n] of MessageOf.LAUNCHES: LAUNCH[m]."""
        found, self._left = self._left, []
        for message in messages:
            pid, many = int(message["pid"]), int(message["bytes"]) // ROW.itemsize
            memory = self._memory.get(pid)
            rows = np.frombuffer(bytes(message["data"])[: many * ROW.itemsize], ROW)
            if memory is None:
                self._unknown += many
            else:
                found.append((pid, [memory.new_rows(int(message["id"]), int(message["begin"]), rows)]))
        return self._launches(found, now)

    def unsent(self, now: int, pid: int | None = None) -> NDArray[np.void]:
        """Returns launches that processes have not sent yet, of one process or of all, as LAUNCH[n]."""
        some = self._memory if pid is None else {pid} & self._memory.keys()
        return self._launches([(each, self._memory[each].unsent_rows()) for each in some], now)

    def _launches(self, of_processes: list[tuple[int, list[NDArray[np.void]]]], now: int) -> NDArray[np.void]:
        rows = [some for _, of_process in of_processes for some in of_process]
        if not rows:
            return np.empty(0, LAUNCH)
        pids = [np.full(len(some), pid, np.uint32) for pid, of_process in of_processes for some in of_process]
        all_rows = np.concatenate(rows)
        at = self._find(_keys(np.concatenate(pids), all_rows["path"]))
        is_known = at >= 0
        self._unknown += int(np.count_nonzero(~is_known))
        at, all_rows = at[is_known], all_rows[is_known]
        launches = self._patterns[at]
        launches["time"] = np.minimum(all_rows["time"], now)
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
        """Forgets a process, after its last rows."""
        if memory := self._memory.pop(pid, None):
            self._unknown += memory.take_missing()
            memory.close()
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


class _Memory:
    """The memory of a process."""

    def __init__(self, fd: int, inode: int) -> None:
        self._fd, self.inode = fd, inode
        self._next = dict[int, int]()  # number of the row that comes next, by thread
        self._missing = 0

    def answer(self, path: np.void, words: _Words) -> None:
        offset = int(path["asked"]["offset"])
        thread, inside = divmod(offset - PAGE, THREAD_BYTES)
        if not 0 <= thread < THREADS or inside < _FIRST_SLOT or (inside - _FIRST_SLOT) % SLOT_BYTES:
            return
        content = np.array(words, np.uint64).tobytes()
        with contextlib.suppress(OSError):  # the process may have sealed it: then it gets no answer
            if path["state"]:  # by this layout the state was found
                layout = int(path["layout"]["thread_frame"]) | int(path["layout"]["thread_cframe"]) << 16
                os.pwrite(self._fd, struct.pack("<Q", layout), 8)
            os.pwrite(self._fd, _SLOT.pack(0, int(path["state"]), len(words), 0) + content, offset)
            os.pwrite(self._fd, struct.pack("<Q", int(path["asked"]["path"])), offset)

    def write_epoch(self, epoch: int) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, struct.pack("<Q", epoch), 0)

    def new_rows(self, thread: int, first: int, rows: NDArray[np.void]) -> NDArray[np.void]:
        """Returns those rows of a thread, from the row number `first` on, that have not come before."""
        if thread >= THREADS:
            self._missing += len(rows)
            return rows[:0]
        if first >= _MOST_HEAD:
            self._missing += len(rows)
            return rows[:0]
        expected = self._next.get(thread, 0)
        self._next[thread] = max(first + len(rows), expected)
        if first <= expected:
            return rows[expected - first :]
        return np.concatenate([self._stored_rows(thread, expected, first), rows])  # a message was lost

    def _stored_rows(self, thread: int, first: int, end: int) -> NDArray[np.void]:
        """Returns rows of a thread that the memory still has, and counts the others of these as missing."""
        start = PAGE + thread * THREAD_BYTES
        content = self._read(ROWS * ROW.itemsize, start + PAGE)
        rows = np.frombuffer(content if len(content) == ROWS * ROW.itemsize else b"", ROW)
        begin = max(first, min(self._head(thread) - ROWS, end), end - ROWS) if len(rows) == ROWS else end
        self._missing += min(begin - first, _MOST_MISSING)
        return rows[np.arange(begin, end, dtype=np.int64) % ROWS] if begin < end else np.empty(0, ROW)

    def _head(self, thread: int) -> int:
        """Returns the number of rows of a thread so far; 0 if it cannot be right."""
        head = int.from_bytes(self._read(8, PAGE + thread * THREAD_BYTES), "little")
        return head if head < _MOST_HEAD else 0

    def unsent_rows(self) -> list[NDArray[np.void]]:
        """Returns the rows of each thread that have not come."""
        found = []
        for thread in range(THREADS):
            head, expected = self._head(thread), self._next.get(thread, 0)
            if not head:  # no thread has used it yet, nor those after it
                break
            if expected < head:
                found.append(self._stored_rows(thread, expected, head))
                self._next[thread] = head
        return found

    def _read(self, size: int, offset: int) -> bytes:
        try:
            return os.pread(self._fd, size, offset)
        except OSError:
            return b""

    def take_missing(self) -> int:
        missing, self._missing = self._missing, 0
        return missing

    def close(self) -> None:
        os.close(self._fd)


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


def _shared_memory(pid: int, descriptor: int, inode: int, born: int) -> int | None:
    """Takes the memory that a process shares, by its descriptor there; None if it is not what the process said."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        fd = _libc.syscall(_PIDFD_GETFD, process, descriptor, 0)  # Linux 5.6
        if fd < 0 or abs(born_ns(pid) - born) > TICK_NS:  # another process may have its number by now
            raise OSError
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # which only memory has
        if os.fstat(fd).st_ino != inode:
            raise OSError
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None
    finally:
        os.close(process)
    return int(fd)
