"""What the recorder answers to processes that launch on known paths, and what it takes from them."""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.bpf.processes import born_ns
from iaprof.formats.wire.launches import LAUNCH, MESSAGE, PATH, PATH_ASKED, LaunchFlags, MessageOf
from iaprof.record.sources import launch_paths
from iaprof.record.sources.launch_paths import PAGE, ROW, ROWS, SLOT_BYTES, THREAD_BYTES, THREADS, LaunchPaths, words_of
from unit.record.capture.test_cuda import PATHS, values_of_c
from waiting import until

SLOT = PAGE + PAGE + ROWS * ROW.itemsize  # the first one of the first thread
SP = 0x7FFE_0000_1000


@pytest.fixture
def shared() -> Iterator[int]:
    """The shared memory of this process."""
    fd = memory()
    yield fd
    os.close(fd)


def memory() -> int:
    """Memory as the library makes it, which has touched the first page and two slots, and has written many rows."""
    fd = os.memfd_create("iaprof")
    os.ftruncate(fd, PAGE + THREADS * THREAD_BYTES)
    os.pwrite(fd, bytes(PAGE), 0)
    os.pwrite(fd, bytes(2 * SLOT_BYTES), SLOT)
    os.pwrite(fd, struct.pack("<Q", ROWS // 2), PAGE)
    return fd


def launch(path: int = 1, stack: int = 7, pid: int | None = None, when: int = 100) -> np.ndarray:
    """A launch that BPF has seen."""
    record = np.zeros(1, LAUNCH)
    record["path"], record["stack"], record["time"], record["name"] = path, stack, when, b"kernel"
    record["pid"] = os.getpid() if pid is None else pid
    return record


def asked(fd: int, path: int = 1, **members: Any) -> np.ndarray:
    """A path of three frames, whose words a process asks for."""
    record = np.zeros(1, PATH)
    record["pid"], record["born"], record["depth"] = os.getpid(), born_ns(os.getpid()), 3
    record["asked"]["path"], record["asked"]["offset"], record["asked"]["descriptor"] = path, SLOT, fd
    record["asked"]["inode"] = os.fstat(fd).st_ino
    record["ips"][0, :3] = 0x1001, 0x2002, 0x3003
    record["cfas"][0, :2] = SP + 16, SP + 64
    for name, value in members.items():
        record[name] = value
    return record


def rows(*paths: int, since: int = 1000) -> np.ndarray:
    """Rows as the library writes them."""
    found = np.zeros(len(paths), ROW)
    found["path"], found["time"] = paths, since + np.arange(len(paths))
    found["correlation"] = found["time"] + 1
    return found


def message(sent: np.ndarray, thread: int = 0, first: int = 0) -> np.ndarray:
    """A message with rows."""
    record = np.zeros(1, MESSAGE)
    record["what"], record["pid"], record["id"], record["begin"] = MessageOf.LAUNCHES, os.getpid(), thread, first
    record["bytes"] = record["total"] = sent.nbytes
    record["data"].view("u1")[: sent.nbytes] = sent.view("u1")
    return record


def answer(fd: int, offset: int = SLOT) -> tuple[int, int, list[tuple[int, int]]]:
    """The path, the state of Python and the words in a slot."""
    path, state, count, _ = struct.unpack("<QQQQ", os.pread(fd, 32, offset))
    words = struct.unpack(f"<{2 * count}Q", os.pread(fd, 16 * count, offset + 32))
    return path, state, list(zip(words[::2], words[1::2], strict=True))


def launches_of(paths: LaunchPaths, messages: np.ndarray, now: int = 5000) -> np.ndarray:
    return np.concatenate([np.empty(0, LAUNCH), *paths.launches_of(messages, now)])


def unsent(paths: LaunchPaths, pid: int | None = None) -> np.ndarray:
    return np.concatenate([np.empty(0, LAUNCH), *paths.unsent(5000, pid)])


# Answers


def test_return_addresses_and_used_frame_pointers_are_a_paths_words(shared: int) -> None:
    paths = LaunchPaths(0)
    path = asked(shared)
    path["bases"][0, 1], path["base_values"][0, 1] = SP, SP + 48
    path["kept_at"][0, 1] = SP + 40
    paths.learn(launch(), path)
    words = [(SP + 8, 0x2002), (SP, SP + 48), (SP + 40, SP + 64), (SP + 56, 0x3003)]
    assert answer(shared) == (1, 0, words)


def test_a_stack_that_ends_with_a_zero_depends_on_it(shared: int) -> None:
    path = asked(shared, ends_at_zero=1)
    path["cfas"][0, 2] = SP + 80
    assert words_of(path[0]) == [(SP + 8, 0x2002), (SP + 56, 0x3003), (SP + 72, 0)]


def test_frames_of_python_come_before_the_stack(shared: int) -> None:
    """In Python 3.13: each frame has its code, its instruction and the frame before it; a shim only the latter."""
    path = asked(shared, state=0x5000, has_layout=1, count=3, depth=1)
    layout = path["layout"]
    layout["thread_frame"], layout["frame_code"], layout["frame_instruction"], layout["frame_previous"] = 72, 0, 56, 8
    path["frames_at"][0, :3] = 0x9001, 0x9100, 0x9200
    path["frames"][0, :3] = [(0x100, 0x111), (0, 0x9100), (0x200, 0x222)]
    first = [(0x5048, 0x9000), (0x9000, 0x101), (0x9038, 0x111)]
    assert words_of(path[0]) == [
        *first,
        (0x9008, 0x9100),
        (0x9108, 0x9200),
        (0x9200, 0x200),
        (0x9238, 0x222),
        (0x9208, 0),
    ]
    # and the library is told where a thread has its frames
    LaunchPaths(0).learn(launch(), path)  # of a path that is not learnt with this object, and then with another
    (paths := LaunchPaths(0)).learn(launch(), path)
    assert struct.unpack("<Q", os.pread(shared, 8, 8)) == (72,)
    assert paths.has(os.getpid())


def test_loops_of_python_3_11_end_at_structures_on_the_stack(shared: int) -> None:
    path = asked(shared, state=0x5000, has_layout=1, cframe=0x7000, count=4, depth=1)
    layout = path["layout"]
    layout["thread_frame"], layout["thread_cframe"], layout["cframe_previous"] = 8, 56, 16
    layout["frame_code"], layout["frame_instruction"], layout["frame_previous"] = 32, 56, 48
    path["frames_at"][0, :4] = 0x9000, 0, 0x9100, 0
    path["frames"][0, :4] = [(0x100, 0x111), (0, 0x7000), (0x200, 0x222), (0, 0x7100)]
    assert words_of(path[0]) == [
        *[(0x5038, 0x7000), (0x7008, 0x9000), (0x9020, 0x100), (0x9038, 0x111)],
        *[(0x9030, 0x9100), (0x9120, 0x200), (0x9138, 0x222), (0x7010, 0x7100), (0x9130, 0)],
    ]


@pytest.mark.parametrize("cfas", [(SP + 16, SP + 16), (SP + 64, SP + 16)])
def test_a_stack_that_does_not_go_up_is_not_answered(shared: int, cfas: tuple[int, int]) -> None:
    path = asked(shared)
    path["cfas"][0, :2] = cfas
    LaunchPaths(0).learn(launch(), path)
    assert answer(shared)[0] == 0


def test_a_path_whose_launch_was_lost_is_not_answered(shared: int) -> None:
    LaunchPaths(0).learn(launch(path=2), asked(shared))
    assert answer(shared)[0] == 0


def test_a_path_that_was_answered_before_the_interpreter_was_known_is_forgotten(shared: int) -> None:
    paths = known(shared)
    path = asked(shared)
    path["asked"]["is_known"] = 1
    paths.learn(launch()[:0], path)
    assert answer(shared)[0] == 0
    assert launches_of(paths, message(rows(1)))["stack"].tolist() == [7]  # what was launched before


# What a process may say of its memory


def test_what_is_no_memory_is_not_written_to(tmp_path: Path, shared: int) -> None:
    # given a file, a pipe, another memory than the process said, and a number without a file
    (file := tmp_path / "file").write_bytes(bytes(1 << 20))
    with file.open("r+b") as opened, file.open("rb"):
        LaunchPaths(0).learn(launch(), asked(opened.fileno(), asked=_asked(opened.fileno())))
    readable, writable = os.pipe()
    for fd, inode in ((writable, os.fstat(writable).st_ino), (shared, 1), (9999, 1)):
        LaunchPaths(0).learn(launch(), asked(shared, asked=_asked(fd, inode)))
    os.set_blocking(readable, False)
    with pytest.raises(BlockingIOError):
        os.read(readable, 1)
    for fd in (readable, writable):
        os.close(fd)
    assert not any(file.read_bytes())
    assert answer(shared)[0] == 0


def _asked(fd: int, inode: int | None = None) -> Any:
    found = np.zeros(1, PATH_ASKED)
    found["path"], found["offset"], found["descriptor"] = 1, SLOT, fd
    found["inode"] = os.fstat(fd).st_ino if inode is None else inode
    return found[0]


def test_what_the_kernel_says_of_other_descriptors_is_not_read(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an epoll, it has a line for each of perhaps millions of files."""
    read: list[str] = []
    monkeypatch.setattr(launch_paths, "_mount", lambda *of: read.append(of[0]))
    with select.epoll() as other:
        LaunchPaths(0).learn(launch(), asked(shared, asked=_asked(other.fileno(), 1)))
    assert read == []


def test_a_descriptor_that_is_replaced_meanwhile_is_closed_by_a_thread(
    shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_paths, "_is_memory", lambda process, _: process != "/proc/self")
    before = len(os.listdir("/proc/self/fd"))
    (paths := LaunchPaths(0)).learn(launch(), asked(shared))
    assert not paths.has(os.getpid())
    until(lambda: len(os.listdir("/proc/self/fd")) == before)
    # and if there is no room for one, the recording goes on
    monkeypatch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError))
    paths.learn(launch(), asked(shared))
    assert not paths.has(os.getpid())


def test_memory_of_an_earlier_process_is_not_written_to(shared: int) -> None:
    LaunchPaths(0).learn(launch(), asked(shared, born=born_ns(os.getpid()) - 1_000_000_000))
    assert answer(shared)[0] == 0


def test_memory_that_the_process_may_not_write_is_not_written_to(shared: int) -> None:
    """The recorder has the rights of the descriptor, not root's to the file."""
    read_only = os.open(f"/proc/self/fd/{shared}", os.O_RDONLY)
    LaunchPaths(0).learn(launch(), asked(read_only))
    assert answer(shared)[0] == 0
    os.close(read_only)


def test_pages_that_the_process_has_not_touched_are_not_written_to(shared: int) -> None:
    """They would count as the recorder's memory."""
    path = asked(shared)
    path["asked"]["offset"] += 2 * SLOT_BYTES
    before = os.fstat(shared).st_blocks
    LaunchPaths(0).learn(launch(), path)
    assert answer(shared, SLOT + 2 * SLOT_BYTES)[0] == 0
    assert os.fstat(shared).st_blocks == before


def test_memory_that_becomes_shorter_is_not_written_to(shared: int) -> None:
    paths = known(shared)
    for size in (PAGE, 0):
        os.ftruncate(shared, size)
        paths.learn(launch(3), asked(shared, 3))
        paths.new_epoch()
        assert os.fstat(shared).st_size == size


# Writes a page that never comes: with the lock of what it writes to.
HOLDS_LOCK = """
import ctypes, fcntl, mmap, os, struct, sys
libc = ctypes.CDLL(None)
userfaultfd = libc.syscall(323, os.O_CLOEXEC)
fcntl.ioctl(userfaultfd, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))  # UFFDIO_API
page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
fcntl.ioctl(userfaultfd, 0xC020AA00, struct.pack("QQQQ", address, mmap.PAGESIZE, 1, 0))  # UFFDIO_REGISTER
libc.pwrite(int(sys.argv[1]), ctypes.c_void_p(address), 8, ctypes.c_long(0))
"""
PWRITE = "18 "


@pytest.mark.root
def test_memory_whose_lock_is_held_is_written_to(shared: int) -> None:
    # given a process that holds the lock, which a write by a system call would wait for
    paths = known(shared)
    with subprocess.Popen([sys.executable, "-c", HOLDS_LOCK, str(shared)], pass_fds=[shared]) as holder:
        try:
            while not Path(f"/proc/{holder.pid}/syscall").read_text().startswith(PWRITE):
                assert holder.poll() is None
                time.sleep(0.01)
            # then
            paths.learn(launch(3, 9), asked(shared, 3))
            assert answer(shared)[0] == 3
        finally:
            holder.kill()


@pytest.mark.parametrize("offset", [1 << 62, (1 << 64) - 8, 0, SLOT + 8, PAGE + THREADS * THREAD_BYTES])
def test_an_offset_outside_does_no_harm(shared: int, offset: int) -> None:
    path = asked(shared)
    path["asked"]["offset"] = offset
    size = os.fstat(shared).st_size
    LaunchPaths(0).learn(launch(), path)
    assert os.fstat(shared).st_size == size


# Launches


def known(shared: int) -> LaunchPaths:
    """Two paths of this process."""
    paths = LaunchPaths(0)
    paths.learn(np.concatenate([launch(1, 7), launch(2, 8)]), np.concatenate([asked(shared, 1), asked(shared, 2)]))
    return paths


def test_rows_become_launches_with_their_paths_stack(shared: int) -> None:
    found = launches_of(known(shared), message(rows(1, 2, 1)))
    assert found["stack"].tolist() == [7, 8, 7]
    assert found["time"].tolist() == [1000, 1001, 1002]
    assert found["correlation"].tolist() == [1001, 1002, 1003]
    assert set(found["name"]) == {b"kernel"}


def test_rows_that_come_twice_count_once(shared: int) -> None:
    paths = known(shared)
    assert len(launches_of(paths, message(rows(1, 1, 1)))) == 3
    assert launches_of(paths, message(rows(1, 1, 2), first=1))["stack"].tolist() == [8]
    assert paths.take_lost() == 0


def test_rows_that_do_not_come_are_counted(shared: int) -> None:
    paths = known(shared)
    os.pwrite(shared, struct.pack("<Q", 6 + ROWS), PAGE)  # the first six were overwritten
    launches_of(paths, message(rows(1), first=5))
    launches_of(paths, message(rows(9, 1), first=6))  # an unknown path
    launches_of(paths, message(rows(1, 1), thread=THREADS))
    (other := message(rows(1, 1, 1)))["pid"] = 1  # a process that has no memory
    launches_of(paths, other)
    assert paths.take_lost() == 5 + 1 + 2 + 3
    assert paths.take_lost() == 0


def test_rows_of_a_lost_message_are_read_from_the_memory(shared: int) -> None:
    paths = known(shared)
    os.pwrite(shared, rows(1, 2, 1, 2).tobytes(), PAGE + PAGE)
    os.pwrite(shared, struct.pack("<Q", 4), PAGE)
    assert launches_of(paths, message(rows(2), first=3))["stack"].tolist() == [7, 8, 7, 8]
    assert paths.take_lost() == 0


def test_times_outside_the_recording_are_moved_into_it(shared: int) -> None:
    (paths := LaunchPaths(2000)).learn(launch(), asked(shared))
    sent = np.concatenate([rows(1, since=9000), rows(1, since=1000), rows(1, since=3000)])
    assert launches_of(paths, message(sent))["time"].tolist() == [5000, 2000, 3000]


def test_what_is_read_from_memory_is_limited(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a process that says again and again that all it has launched was lost
    monkeypatch.setattr(launch_paths, "_READ_AT_ONCE", 3 * ROWS)
    monkeypatch.setattr(launch_paths, "_READ_A_SECOND", 0)
    paths = known(shared)
    os.pwrite(shared, np.tile(rows(1, 2), ROWS // 2).tobytes(), PAGE + PAGE)
    some = 0
    for number in range(1, 10):
        os.pwrite(shared, struct.pack("<Q", number * ROWS + 1), PAGE)
        some += len(launches_of(paths, message(rows(1), first=number * ROWS)))
    # then
    assert 3 * (ROWS - 10) < some < 3 * ROWS + 9
    assert paths.take_lost() == 9 * ROWS + 1 - some


def test_what_was_not_sent_is_read_at_the_end(shared: int) -> None:
    # given four rows, of which one was sent
    paths = known(shared)
    content = rows(1, 2, 2, 1)
    os.pwrite(shared, content.tobytes(), PAGE + PAGE)
    os.pwrite(shared, struct.pack("<Q", 4), PAGE)
    launches_of(paths, message(content[:1]))
    # then the others are there, once
    assert unsent(paths, os.getpid())["stack"].tolist() == [8, 8, 7]
    assert not len(unsent(paths))
    assert paths.take_lost() == 0


def test_a_process_that_lies_about_what_it_has_not_sent(shared: int) -> None:
    paths = known(shared)
    os.pwrite(shared, struct.pack("<Q", (1 << 64) - 1), PAGE)
    began = time.process_time()
    assert not len(unsent(paths))
    os.pwrite(shared, struct.pack("<Q", 1 << 59), PAGE)
    assert not len(unsent(paths))  # no path is 0
    assert time.process_time() - began < 2
    os.ftruncate(shared, 8)
    assert not len(unsent(paths))


def test_the_next_file_has_stacks_of_its_own(shared: int) -> None:
    # given a path that was seen again after the file before had ended
    paths = known(shared)
    paths.new_epoch()
    paths.learn(launch(2, 18, when=300), np.empty(0, PATH))
    paths.forget_stacks(before_ns=200)
    # then only the other one lacks a stack
    found = launches_of(paths, message(rows(1, 2)))
    assert found["stack"].tolist() == [0, 18]
    assert (found["flags"] & LaunchFlags.NO_STACK > 0).tolist() == [True, False]
    assert struct.unpack("<Q", os.pread(shared, 8, 0)) == (1,)


ASKS = f"""
import os, sys
fd = os.memfd_create("iaprof")
os.ftruncate(fd, {PAGE + THREADS * THREAD_BYTES})
print(fd, os.fstat(fd).st_ino, flush=True)
sys.stdin.read()
"""


def test_a_process_that_ended_is_forgotten(shared: int) -> None:
    # given another process, which only seems to end at first
    paths, before = known(shared), len(os.listdir("/proc/self/fd"))
    with subprocess.Popen(
        [sys.executable, "-c", ASKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        fd, inode = map(int, other.stdout.readline().split())
        path = asked(shared, asked=_asked(fd, inode), pid=other.pid, born=born_ns(other.pid))
        paths.learn(launch(pid=other.pid), path)
        paths.ended(other.pid)
        assert paths.has(other.pid)
        other.communicate()
    # when
    paths.ended(other.pid)
    paths.ended(os.getpid())
    # then
    assert not paths.has(other.pid)
    assert len(os.listdir("/proc/self/fd")) == before
    (sent := message(rows(1)))["pid"] = other.pid
    assert not len(launches_of(paths, sent))
    assert len(launches_of(paths, message(rows(1)))) == 1


def test_a_process_with_too_many_paths_loses_its_own(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_paths, "MOST_PATTERNS", 100)
    paths = known(shared)
    for first in range(0, 300, 10):
        paths.learn(
            np.concatenate([launch(first + n, pid=77, when=first + n) for n in range(1, 11)]), np.empty(0, PATH)
        )
    assert len(launches_of(paths, message(rows(1, 2)))) == 2


def test_a_program_that_a_process_was_before_has_its_last_rows(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # given rows that were not sent before the process executed another program, which launches, too
    paths = known(shared)
    os.pwrite(shared, rows(1, 2).tobytes(), PAGE + PAGE)
    os.pwrite(shared, struct.pack("<Q", 2), PAGE)
    other = memory()
    paths.learn(launch(3, 9), asked(other, 3))
    assert answer(other)[0] == 0  # at once, it would have its memory read again and again
    with monkeypatch.context() as later:
        later.setattr(launch_paths, "_ANEW_NS", 0)
        paths.learn(launch(3, 9), asked(other, 3))
    assert answer(other)[0] == 3
    # then all are there, also if a message of the program before comes only now
    sent = np.concatenate([message(rows(1, 2), first=ROWS), message(rows(3))])
    assert launches_of(paths, sent)["stack"].tolist() == [7, 8, 9]
    assert paths.take_lost() == 0
    os.close(other)


# What Python and C both have


def test_the_memory_is_laid_out_as_in_c(tmp_path: Path) -> None:
    expressions = {
        "threads": "MOST_THREADS",
        "rows": "MOST_ROWS",
        "slots": "MOST_PATHS",
        "words": "MOST_WORDS",
        "slot": "sizeof(struct slot)",
        "thread": "sizeof(struct shared_thread)",
        "first_thread": "offsetof(struct shared, threads)",
        "first_row": "offsetof(struct shared_thread, rows)",
        "first_slot": "offsetof(struct shared_thread, slots)",
        "python": "offsetof(struct shared, python)",
        "knows_python": "offsetof(struct slot, knows_python)",
        "first_word": "offsetof(struct slot, words)",
        **{f"row_{name}": f"offsetof(struct path_row, {name})" for name in ROW.names or ()},
        **{f"asked_{name}": f"offsetof(struct path_asked, {name})" for name in PATH_ASKED.names or ()},
    }
    found = values_of_c(tmp_path, PATHS, **expressions)
    fields, of_asked = dict(ROW.fields or {}), dict(PATH_ASKED.fields or {})
    assert found == {
        "threads": THREADS,
        "rows": ROWS,
        "slots": launch_paths.SLOTS,
        "words": launch_paths.MOST_WORDS,
        "slot": SLOT_BYTES,
        "thread": THREAD_BYTES,
        "first_thread": PAGE,
        "first_row": PAGE,
        "first_slot": SLOT - PAGE,
        "python": 8,
        "knows_python": 24,
        "first_word": 32,
        **{f"row_{name}": fields[name][1] for name in ROW.names or ()},
        **{f"asked_{name}": of_asked[name][1] for name in PATH_ASKED.names or ()},
    }
