"""The debug-ELF collector, for a process of another user: it reads what that user may read, and nothing else."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.bpf import accounts
from iaprof.formats.wire.launches import COMPILED
from iaprof.record.kernels import collector as collector_module
from iaprof.record.kernels.collector import DebugElfCollector, RefusedElf, TakenElf
from integration.attacking import NOBODY, PYTHON, hanging
from limits import Within
from standin import runtime
from thorough import thorough
from waiting import LONGEST_WAIT_S, until

pytestmark = pytest.mark.beside

ELF = runtime.debug_elf("bmg", "matmul").read_bytes()


@pytest.fixture
def collector() -> Iterator[DebugElfCollector]:
    opened = DebugElfCollector()
    yield opened
    opened.close()


def ask(collector: DebugElfCollector, path: str | Path, pid: int = 0, uid: int = NOBODY) -> TakenElf | RefusedElf:
    """Returns the collector's answer to one path."""
    record = np.zeros(1, COMPILED)
    record["pid"], record["uid"], record["gid"] = pid or os.getpid(), uid, uid
    record["path"] = os.fsencode(path)
    assert collector.request(record) == 0
    answers: list[TakenElf | RefusedElf] = []

    def is_answered() -> bool:
        if (answer := collector.read()) is not None:
            answers.append(answer)
        return bool(answers)

    until(is_answered)
    return answers[0]


def refusal(collector: DebugElfCollector, path: str | Path, **how: int) -> str:
    answer = ask(collector, path, **how)
    assert isinstance(answer, RefusedElf), answer
    return answer.reason


def write(path: Path, content: bytes = ELF, owner: int = NOBODY, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    os.chown(path, owner, owner)
    return path


def test_one_content_is_taken_once(collector: DebugElfCollector, folder: Path) -> None:
    first = ask(collector, write(folder / "a"))
    second = ask(collector, write(folder / "b"))
    assert isinstance(first, TakenElf)
    assert isinstance(second, TakenElf)
    assert first.content is not None
    assert (bytes(first.content), first.size) == (ELF, len(ELF))
    assert (second.content, second.digest) == (None, first.digest)


def test_secrets_stay_secret(collector: DebugElfCollector, folder: Path) -> None:
    # given a file that is refused only for its owner
    secret = write(folder / "secret", owner=0)
    # when its own path, or that of a link, is requested
    (folder / "link").symlink_to(secret)
    os.link(secret, folder / "hard")
    # then
    assert "Permission denied" in refusal(collector, secret)
    assert "Permission denied" in refusal(collector, folder / "hard")
    assert "not a regular file" in refusal(collector, folder / "link")
    assert refusal(collector, "/etc/shadow")
    # but root itself gets it
    assert isinstance(ask(collector, secret, uid=0), TakenElf)


def test_groups_of_root_give_nothing(collector: DebugElfCollector, folder: Path) -> None:
    secret = write(folder / "secret", owner=0, mode=0o040)
    assert "Permission denied" in refusal(collector, secret)


def test_what_is_no_regular_file(collector: DebugElfCollector, folder: Path) -> None:
    os.mkfifo(folder / "fifo", 0o666)
    os.mknod(folder / "device", 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
        for path in (folder / "fifo", folder / "device", folder, folder / "socket", Path("/dev/zero")):
            assert "not a regular file" in refusal(collector, path)
    assert refusal(collector, "/proc/self/mem")
    assert refusal(collector, f"/proc/{os.getpid()}/root/etc/passwd")  # a magic link on the way
    assert "not there" in refusal(collector, folder / "absent")


def test_what_is_no_elf_of_a_gpu(collector: DebugElfCollector, folder: Path) -> None:
    assert "not a 64-bit little-endian ELF" in refusal(
        collector, write(folder / "text", b"root:*:19000:0:99999:7:::\n")
    )
    assert "empty" in refusal(collector, write(folder / "empty", b""))
    assert "ELF" in refusal(collector, write(folder / "short", ELF[:18]))
    assert "not for an Intel GPU" in refusal(collector, write(folder / "x86", Path("/bin/true").read_bytes()))
    assert "not a 64-bit" in refusal(collector, write(folder / "big", b"\x7fELF\x02\x02" + ELF[6:]))


def test_a_huge_file_is_not_read(collector: DebugElfCollector, folder: Path, within: Within) -> None:
    path = write(folder / "huge")
    os.truncate(path, 100 << 30)
    with within(1):
        assert "larger than" in refusal(collector, path)


def test_a_relative_path_and_a_chroot_mean_what_they_mean_to_the_process(
    collector: DebugElfCollector, folder: Path
) -> None:
    # given a process whose root is a folder, and a secret outside of it
    write(folder / "inside")
    script = f"import os, time; os.chroot({str(folder)!r}); os.chdir('/'); print('x', flush=True); time.sleep(600)"
    process = subprocess.Popen(["python3", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        assert isinstance(ask(collector, "/inside", pid=process.pid), TakenElf)
        assert isinstance(ask(collector, "inside", pid=process.pid), TakenElf)
        assert isinstance(ask(collector, "/../../inside", pid=process.pid), TakenElf)
        assert "leaves the folder" in refusal(collector, "../inside", pid=process.pid)
        assert "not there" in refusal(collector, "/etc/passwd", pid=process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_that_is_gone(collector: DebugElfCollector) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert "not there" in refusal(collector, "/tmp/x", pid=process.pid)


def test_what_a_process_that_is_gone_left_in_the_recorders_folder(collector: DebugElfCollector, folder: Path) -> None:
    # given a process that has ended, and files of its user and of root in the recorder's own folder and elsewhere
    process = subprocess.Popen(["true"])
    process.wait()
    (folder / "own").mkdir(mode=0o1733)
    collector.own_folder = os.fsencode(folder / "own")
    left, secret, elsewhere = folder / "own" / "1-0.elf", folder / "own" / "secret", folder / "elsewhere"
    write(left), write(secret, owner=0), write(elsewhere)
    # when, then files that its user may read are taken from that folder, and no others
    assert isinstance(ask(collector, left, pid=process.pid), TakenElf)
    assert "Permission denied" in refusal(collector, secret, pid=process.pid)
    for path in (elsewhere, f"{folder}/own/../elsewhere", f"{folder}/own/../own/1-0.elf", "own/1-0.elf"):
        assert "not there" in refusal(collector, path, pid=process.pid)


def test_a_child_that_hangs_or_dies_is_replaced(
    collector: DebugElfCollector, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a child that does not answer
    os.kill(collector._child.pid, 19)
    before = collector.fileno()
    # when
    with monkeypatch.context() as patch:
        patch.setattr(collector_module, "TIMEOUT_NS", 300_000_000)
        assert "too long" in refusal(collector, write(folder / "a"))
    monkeypatch.setattr(collector_module, "TIMEOUT_NS", 60_000_000_000)
    # then the descriptor to wait for is another, and the next file is taken
    assert collector.fileno() != before
    assert isinstance(ask(collector, folder / "a"), TakenElf)
    # and the same if it dies
    os.kill(collector._child.pid, 9)
    collector._child.wait()
    assert "died" in refusal(collector, folder / "a")
    assert isinstance(ask(collector, folder / "a"), TakenElf)


def test_a_recorder_that_stood_still_itself_blames_no_file(
    collector: DebugElfCollector, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a machine that ran neither the child nor the recorder for longer than a file may take
    monkeypatch.setattr(collector_module, "TIMEOUT_NS", 60_000_000_000)
    os.kill(collector._child.pid, 19)
    collector.request(records(write(folder / "a"), 1, NOBODY))
    collector._read_ns -= 100_000_000_000
    # when the recorder runs first
    assert collector.read() is None
    os.kill(collector._child.pid, 18)
    # then
    (answer,) = answers(collector)
    assert isinstance(answer, TakenElf)


@thorough
def test_thousands_at_once(collector: DebugElfCollector, folder: Path, within: Within) -> None:
    # given more files than may wait
    path = write(folder / "a")
    count = collector_module.MAX_WAITING_OF_ONE_USER + 500
    # when
    with within(1):
        refused = collector.request(records(path, count, NOBODY))
    told = answers(collector)
    # then all are answered or refused
    assert refused + len(told) == count
    assert refused == 500
    assert all(isinstance(answer, TakenElf) for answer in told)


def test_a_file_that_grows_or_shrinks_meanwhile(collector: DebugElfCollector, folder: Path) -> None:
    # given a file that another process changes all the time
    path = write(folder / "a", ELF + bytes(8 << 20))
    script = (
        f"import os\nfd = os.open({str(path)!r}, os.O_RDWR)\n"
        "while True: os.ftruncate(fd, 50000); os.ftruncate(fd, 8 << 20)"
    )
    process = subprocess.Popen(["python3", "-c", script])
    try:
        # when, then every answer is a whole file of some size or a refusal, and none takes long
        for _ in range(30):
            answer = ask(collector, path)
            if isinstance(answer, RefusedElf):
                assert "shorter" in answer.reason
            elif answer.content is not None:
                assert len(answer.content) == answer.size
                assert struct.unpack_from("<H", answer.content, 18) == (205,)
    finally:
        process.kill()
        process.wait()


def records(path: str | Path, count: int, uid: int) -> NDArray[np.void]:
    asked = np.zeros(count, COMPILED)
    asked["pid"], asked["uid"], asked["gid"], asked["path"] = os.getpid(), uid, uid, os.fsencode(path)
    return asked


def answers(collector: DebugElfCollector) -> list[TakenElf | RefusedElf]:
    """Returns all answers, until no more are awaited."""
    found = []
    end = time.monotonic() + LONGEST_WAIT_S
    while not collector.idle:
        assert time.monotonic() < end, "no answer"
        if (answer := collector.read()) is not None:
            found.append(answer)
    return found


def test_a_path_ends_where_it_ends(collector: DebugElfCollector, folder: Path) -> None:
    """A ring buffer's memory is not cleared: after the path comes an earlier one, perhaps another user's."""
    answer = ask(collector, os.fsencode(write(folder / "a")).decode() + "\0/home/other/secret-project")
    assert isinstance(answer, TakenElf)
    assert answer.compiled.path == os.fsencode(folder / "a")


def test_users_take_turns(collector: DebugElfCollector, folder: Path) -> None:
    # given a user who has named a thousand files, and another who names one then
    path = write(folder / "a", mode=0o644)
    collector.request(records(path, 1000, NOBODY))
    collector.request(records(path, 1, 0))
    # when
    order = [answer.compiled.uid for answer in answers(collector)]
    # then the other user's is next
    assert len(order) == 1001
    assert order.index(0) <= 2


def test_one_users_subordinate_ids_leave_room_for_others(
    collector: DebugElfCollector, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a user with subordinate IDs, each of which names as many files as one user may
    (folder / "subuid").write_text("1000:700000:65536\n")
    monkeypatch.setattr(accounts, "SUBORDINATE", folder / "subuid")
    monkeypatch.setattr(collector_module, "ACCOUNTS", accounts.Accounts())
    path, most = folder / "absent", collector_module.MAX_WAITING_OF_ONE_USER
    full = sum(collector.request(records(path, most, 700_000 + number)) for number in range(3))
    # when another user names one, then there is room, and it is the next
    assert full >= 2 * most - 1  # one of them was asked for at once
    assert collector.request(records(path, 1, NOBODY)) == 0
    order = [answer.compiled.uid for answer in answers(collector)]
    assert order.index(NOBODY) <= 2


@thorough
def test_a_user_whose_files_never_answer_is_asked_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    # given a file system that keeps processes that open its files, even killed ones
    monkeypatch.setattr(collector_module, "TIMEOUT_NS", 5_000_000_000)  # enough for a good file on a busy machine
    monkeypatch.setattr(collector_module, "MAX_HANGS_OF_ONE_USER", 2)
    (folder / "mount").mkdir()
    path = write(folder / "a", mode=0o644)
    most = collector_module.MAX_HANGS_OF_ONE_USER
    command = [PYTHON, "-c", "print('mounted', flush=True); input()"]
    with subprocess.Popen(hanging(folder / "mount", command), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mounted\n"
        collector = DebugElfCollector()
        # when a user names such files, and another user a good one
        asked = records(folder / "mount" / "x", 50, NOBODY)
        asked["pid"] = process.pid
        assert collector.request(asked) == 0
        assert collector.request(records(path, 1, 0)) == 0
        begun = time.monotonic()
        told = answers(collector)
        spent = time.monotonic() - begun
        later = [ask(collector, path), ask(collector, path, uid=0)]
        children = len(collector._killed)
        with within(1):  # the recorder does not wait for processes that cannot be killed
            assert collector.close() == []
        # then a few files are tried, each once and for a limited time; the others are refused at once
        reasons = [answer.reason for answer in (*told, *later) if isinstance(answer, RefusedElf)]
        assert reasons.count("reading it took too long") == most
        assert reasons.count("other files of its user took too long") == 50 - most + 1
        within.took(spent, most * 5.0 + 3)
        assert 1 <= children <= most  # a busy machine kills one before it has opened the file, so that it ends
        # and the other user's file is taken
        assert [answer.compiled.uid for answer in (*told, *later) if isinstance(answer, TakenElf)] == [0, 0]
        process.kill()
