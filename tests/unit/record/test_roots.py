"""Which roots of processes are kept, for how long, and how many."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.spool import FrameKind, Spool, SpoolReader
from iaprof.record.symbolize import roots
from iaprof.record.symbolize.roots import LINGER_NS, MOST_KEPT, MOST_OF_ONE_USER, Roots
from unit.builds import open_files

OURS = ("mnt:[1]", "/")


class Machine:
    """Processes with their roots; descriptors of `/` stand for the roots' descriptors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places = {os.getpid(): OURS}
        self.users: dict[int, int | None] = {}
        self.now = 1
        monkeypatch.setattr(roots, "_place", self.places.get)
        monkeypatch.setattr(roots, "_open", lambda pid, namespace: (os.open("/", os.O_PATH), os.open("/", os.O_PATH)))
        monkeypatch.setattr(
            roots, "describe", lambda pid: {"pid": pid, "uid": self.users.get(pid, 0), "gid": 0, "ns_pid": None}
        )
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now)
        monkeypatch.setattr(roots, "_with_ancestors", lambda pid, place: [pid])
        monkeypatch.setattr(roots, "ACCOUNTS", self)

    def of_process(self, pid: int, uid: int) -> str:
        assert uid == self.users[pid]
        return f"user {uid // 1000}"

    def add(self, pid: int, namespace: int, folder: str = "/", uid: int = 0) -> int:
        self.places[pid] = (f"mnt:[{namespace}]", folder)
        self.users[pid] = uid
        return pid


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path / "spool")
    yield made
    made.close()


@pytest.fixture
def kept(machine: Machine, spool: Spool) -> Iterator[Roots]:
    made = Roots()
    loop = Loop()
    made.start(Journal(spool, print, print), loop)
    yield made
    made.close()
    loop.close()


def written(spool: Spool, kind: FrameKind = FrameKind.PROCESS) -> list[dict[str, Any]]:
    return [json.loads(frame.payload) for frame in SpoolReader(spool.path).frames() if frame.kind is kind]


def opened(before: set[tuple[str, str]]) -> int:
    """How many descriptors are open that were not; what tests before have left may be closed meanwhile."""
    return len(open_files(sockets=True) - before)


def test_our_own_root_is_not_kept(kept: Roots, machine: Machine, spool: Spool) -> None:
    before = open_files(sockets=True)
    kept.keep(machine.add(7, 1))
    kept.keep(8)  # that ended
    assert (kept.by_process(), written(spool), opened(before)) == ({}, [], 0)


def test_of_a_root_in_our_mount_namespace_the_path_is_written(kept: Roots, machine: Machine, spool: Spool) -> None:
    before = open_files(sockets=True)
    kept.keep(machine.add(7, 1, "/srv/root", uid=5))
    kept.keep(7)
    assert [(row["pid"], row["root"], row["uid"]) for row in written(spool)] == [(7, "/srv/root", 5)]
    assert (kept.by_process(), opened(before)) == ({}, 0)


def test_roots_of_processes_out_of_scope_are_not_kept(kept: Roots, machine: Machine, spool: Spool) -> None:
    kept._scope = cast(Any, SimpleNamespace(others={7}))
    for pid in (7, 8):
        kept.keep(machine.add(pid, 1, "/srv/root"))
    assert [row["pid"] for row in written(spool)] == [8]


def test_processes_of_one_namespace_share_a_kept_root(kept: Roots, machine: Machine, spool: Spool) -> None:
    before = open_files(sockets=True)
    for pid in (7, 8, 9):
        kept.keep(machine.add(pid, 2))
    assert opened(before) == 2
    assert set(kept.by_process()) == {7, 8, 9}
    assert len(set(kept.by_process().values())) == 1
    assert {row["root"] for row in written(spool)} == {""}
    kept.keep(machine.add(10, 2, "/inner"))
    assert opened(before) == 4
    kept.close()
    assert opened(before) == 0


def test_a_namespace_is_released_some_time_after_its_processes_ended(kept: Roots, machine: Machine) -> None:
    before = open_files(sockets=True)
    kept.keep(machine.add(7, 2))
    kept.keep(machine.add(8, 2))
    del machine.places[7]
    for _ in range(3):
        machine.now += LINGER_NS
        kept.release_unused()
    assert set(kept.by_process()) == {7, 8}
    # also if another process got its pid
    machine.add(8, 1)
    kept.release_unused()
    machine.now += LINGER_NS
    kept.release_unused()
    assert set(kept.by_process()) == {7, 8}
    machine.now += 1
    kept.release_unused()
    assert (kept.by_process(), opened(before)) == ({}, 0)


def test_one_user_cannot_use_up_all_kept_roots(kept: Roots, machine: Machine, spool: Spool) -> None:
    # given a user with many IDs, and others who have as many as they may
    for pid in range(100, 100 + 2 * MOST_OF_ONE_USER):
        kept.keep(machine.add(pid, pid, uid=1000 + pid))
    assert len(kept.by_process()) == MOST_OF_ONE_USER
    for pid in range(1000, 1000 + 2 * MOST_KEPT):
        kept.keep(machine.add(pid, pid, uid=1000 * (2 + pid % 4)))
    most = MOST_KEPT - MOST_KEPT // 4
    assert len(kept.by_process()) == most
    # when another one comes, then there is room
    kept.keep(machine.add(5000, 5000, uid=9000))
    assert 5000 in kept.by_process()
    # refused roots are counted, once for each process
    kept.keep(100 + MOST_OF_ONE_USER)
    kept.release_unused()
    kept.release_unused()
    (loss,) = written(spool, FrameKind.LOSS)
    assert (loss["source"], loss["what"]) == ("names", "mount namespaces")
    assert loss["count"] == 2 * MOST_OF_ONE_USER + 2 * MOST_KEPT - most


def test_the_place_of_a_released_root_is_given_back(kept: Roots, machine: Machine) -> None:
    for pid in range(100, 100 + MOST_OF_ONE_USER):
        kept.keep(machine.add(pid, pid, uid=1000))
        del machine.places[pid]
    for _ in range(2):
        machine.now += LINGER_NS + 1
        kept.release_unused()
    assert kept.by_process() == {}
    kept.keep(machine.add(7, 7, uid=1000))
    assert set(kept.by_process()) == {7}


def test_a_namespace_of_an_unknown_user_is_not_kept(kept: Roots, machine: Machine) -> None:
    # given a process that ends before its user is read
    pid = machine.add(100, 2)
    machine.users[pid] = None
    # when
    kept.keep(pid)
    # then its root counts for no user, not even root
    assert kept.by_process() == {}


def test_how_many_processes_are_remembered_is_bounded(kept: Roots, machine: Machine, spool: Spool) -> None:
    for pid in range(10_000, 10_000 + roots.MOST_PROCESSES + 10):
        kept.keep(machine.add(pid, 2))
    assert len(kept.by_process()) == roots._MOST_OF_ONE_ROOT
    assert len(kept._described) == roots.MOST_PROCESSES


def test_another_spool_has_the_roots_that_are_still_of_use(kept: Roots, machine: Machine, spool: Spool) -> None:
    for pid, namespace, folder in ((7, 1, "/srv/a"), (8, 1, "/srv/b"), (9, 2, "/"), (10, 3, "/")):
        kept.keep(machine.add(pid, namespace, folder))
    before = len(written(spool))
    for pid in (8, 9):
        del machine.places[pid]
    kept.write_again()
    assert [row["pid"] for row in written(spool)[before:]] == [7, 8, 9, 10]
    kept.write_again()  # ended processes have no more launches and stacks in the third spool
    assert [row["pid"] for row in written(spool)[before + 4 :]] == [7, 9, 10]


def test_the_namespace_of_a_real_process_is_ours() -> None:
    place = roots._place(os.getpid())
    assert place == (os.readlink("/proc/self/ns/mnt"), "/")
    assert place is not None
    opened = roots._open(os.getpid(), place[0])
    assert opened is not None
    assert os.fstat(opened[0]).st_ino == os.stat("/").st_ino
    for fd in opened:
        os.close(fd)
    assert roots._open(os.getpid(), "mnt:[1]") is None


def test_the_next_process_with_a_pid_has_not_the_first_ones_root(kept: Roots, machine: Machine, spool: Spool) -> None:
    # given a process in a container, after whose end another one outside gets its pid
    kept.keep(machine.add(7, 2, uid=1000))
    kept.ended(7)
    assert set(kept.by_process()) == {7}  # its stacks are named at the end
    machine.places[7] = OURS
    kept.keep(7)
    # then its files are not those of the container
    assert kept.by_process() == {}
    assert [row["root"] for row in written(spool)] == ["", "/"]


def test_the_next_process_with_a_pid_in_the_same_root_is_described(kept: Roots, machine: Machine, spool: Spool) -> None:
    kept.keep(machine.add(7, 2, uid=1000))
    kept.keep(7)
    kept.ended(7)
    kept.keep(machine.add(7, 2, uid=1001))
    kept.keep(7)
    assert [row["uid"] for row in written(spool)] == [1000, 1001]
