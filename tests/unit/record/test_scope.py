"""The scope of `-p`, in whatever order the buffers of several CPUs are read."""

from __future__ import annotations

import os
import struct
import subprocess
import time
from collections.abc import Iterable
from typing import Any

import pytest

from iaprof.basics.errors import UsageError
from iaprof.record.scope import ORPHAN_NS, Scope

EXIT, FORK = 4, 7


def task(kind: int, pid: int, ppid: int, time_ns: int, tid: int = 0) -> bytes:
    """A FORK or EXIT record (include/uapi/linux/perf_event.h); of a thread if `tid` is given."""
    body = struct.pack("<IIIIQ", pid, ppid, tid or pid, ppid, time_ns) + struct.pack("<IIQII", pid, pid, time_ns, 0, 0)
    return struct.pack("<IHH", kind, 0, 8 + len(body)) + body


class Probes:
    """The excluded processes in the BPF map."""

    def __init__(self) -> None:
        self.others: set[int] = set()

    def exclude(self, pids: Iterable[int], launches: bool = True) -> None:
        self.launches = launches
        self.others |= set(pids)

    def include(self, pids: Iterable[int]) -> None:
        self.others -= set(pids)


class Journal:
    def __init__(self) -> None:
        self.appended: list[Any] = []

    def append(self, name: str, item: object) -> None:
        self.appended.append((name, item))


@pytest.fixture
def scope() -> tuple[Scope, Probes, Journal]:
    """This process is in scope; process 1 and all others are not."""
    scope, probes, journal = Scope([os.getpid()]), Probes(), Journal()
    scope.start(journal, probes)  # type: ignore[arg-type]
    return scope, probes, journal


Given = tuple[Scope, Probes, Journal]
ME, CHILD, GRANDCHILD, STRANGER = os.getpid(), 4_000_001, 4_000_002, 4_000_003


def test_running_children_are_in_scope_and_other_processes_are_not() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        scope, probes, journal = Scope([ME]), Probes(), Journal()
        scope.start(journal, probes)  # type: ignore[arg-type]
    finally:
        child.kill()
        child.wait()
    assert {ME, child.pid} <= set(scope.pids)
    assert ("scope", child.pid) in journal.appended
    assert 1 in probes.others
    assert not {ME, child.pid} & probes.others


def test_a_grandchild_whose_fork_is_read_before_its_parent_s(scope: Given) -> None:
    who, probes, journal = scope
    # given the grandchild's fork in one read, and the child's earlier fork in the next
    who.follow([task(FORK, GRANDCHILD, CHILD, 20)])
    assert GRANDCHILD not in probes.others  # recorded while unknown
    who.follow([task(FORK, STRANGER, 1, 30), task(FORK, CHILD, ME, 10)])
    # then
    assert {CHILD, GRANDCHILD} <= set(who.pids)
    assert STRANGER not in who.pids
    assert probes.others >= {1, STRANGER}
    assert not probes.others & {CHILD, GRANDCHILD}
    assert [item for item in journal.appended if item[1] > 4_000_000] == [("scope", CHILD), ("scope", GRANDCHILD)]


def test_a_pid_that_another_process_gets(scope: Given) -> None:
    who, probes, _ = scope
    who.follow([task(FORK, STRANGER, 1, 10)])
    assert STRANGER in probes.others
    who.follow([task(EXIT, STRANGER, 1, 20)])
    assert STRANGER not in probes.others
    who.follow([task(FORK, STRANGER, ME, 30)])
    assert STRANGER in who.pids
    assert STRANGER not in probes.others
    who.follow([task(EXIT, STRANGER, ME, 40), task(FORK, STRANGER, 1, 50)])
    assert STRANGER in probes.others


def test_threads_are_no_processes(scope: Given) -> None:
    who, probes, _ = scope
    who.follow([task(FORK, ME, ME, 10, tid=CHILD), task(EXIT, ME, ME, 20, tid=CHILD)])
    assert CHILD not in who.pids
    who.follow([task(FORK, CHILD, ME, 30)])
    assert CHILD in who.pids  # its parent stays in scope after one of its threads ended
    assert not probes.others & {ME, CHILD}


def test_orphans_are_not_waited_for_forever(scope: Given) -> None:
    who, _, _ = scope
    nobody = 4_100_000
    for number in range(1000):
        who.follow([task(FORK, 4_050_000 + number, nobody, number * ORPHAN_NS // 10)])
    assert len(who._orphans) <= 11


def test_the_command_is_in_scope_and_the_recorder_is_never_excluded() -> None:
    # given this process as the recorder, which has a child of its own
    learner = subprocess.Popen(["sleep", "60"])
    try:
        who, probes, journal = Scope(of_launches=False), Probes(), Journal()
        who.start(journal, probes)  # type: ignore[arg-type]
    finally:
        learner.kill()
        learner.wait()
    assert 1 in probes.others
    assert not probes.launches  # which are recorded of all processes
    assert not {ME, learner.pid} & probes.others
    # when it starts a command that forks, and another child
    who.add_command(CHILD)
    finisher = CHILD + 50
    who.follow([task(FORK, GRANDCHILD, CHILD, 20), task(FORK, CHILD, ME, 10), task(FORK, finisher, ME, 30)])
    who.follow([task(FORK, STRANGER, 1, 40), task(FORK, finisher + 1, finisher, 50)])
    # then
    assert who.running == [CHILD, GRANDCHILD]
    assert STRANGER in probes.others
    assert not {CHILD, GRANDCHILD, finisher, finisher + 1} & probes.others
    assert journal.appended == []  # launches have no scope
    # and its pid can be used again
    who.follow([task(EXIT, CHILD, ME, 60), task(FORK, CHILD, 1, 70)])
    assert who.running == [GRANDCHILD]
    assert CHILD in probes.others


def test_a_command_beside_chosen_processes_is_another_one() -> None:
    who, probes, journal = Scope([1]), Probes(), Journal()
    who.start(journal, probes)  # type: ignore[arg-type]
    assert ME not in who.pids  # though it is below process 1
    who.add_command(CHILD)
    who.follow([task(FORK, CHILD, ME, 10), task(FORK, GRANDCHILD, CHILD, 20)])
    assert {CHILD, GRANDCHILD} <= probes.others


def test_a_process_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="there is no process 4194303"):
        Scope([4194303])


def test_ten_thousand_forks_are_looked_at_quickly(scope: Given) -> None:
    who, _, _ = scope
    records = [task(FORK, 4_000_000 + n, 1, n) + task(EXIT, 4_000_000 + n, 1, n + 1) for n in range(10_000)]
    began = time.process_time()
    who.follow(records)
    assert time.process_time() - began < 10
