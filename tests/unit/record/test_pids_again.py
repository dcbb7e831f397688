"""A pid that another process gets: what was known of the first one is not said of the second."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from iaprof.record.sources import launches as module
from iaprof.record.sources.launches import Launches
from iaprof.record.sources.side_band import SideBand
from iaprof.record.spool import FrameKind
from unit.capturing import HEADER, capture, launch, record, stall
from unit.in_process import iaprof
from waiting import until

SECOND = 10**9
BEGUN = HEADER["clock"]["monotonic_ns"]


class Given:
    """A source of launches, the processes of the machine by pid, and what was written of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.containers: dict[int, str] = {}
        self.now = 1
        self.written: list[tuple[int, str]] = []
        self.told: list[int] = []
        monkeypatch.setattr(module, "describe", self._describe)
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now)
        roots: Any = SimpleNamespace(keep=self.told.append, ended=lambda pid: None)
        nothing = cast(Any, None)
        self.launches = Launches(nothing, nothing, nothing, nothing, roots, Mock(), Mock())
        self.launches._journal = cast(Any, SimpleNamespace(json=self._write))

    def _describe(self, pid: int) -> dict[str, Any]:
        container = self.containers.get(pid)
        return {"pid": pid, "container": container, "uid": None if container is None else 0}

    def _write(self, kind: FrameKind, row: dict[str, Any]) -> None:
        assert kind is FrameKind.PROCESS
        json.dumps(row)
        self.written.append((row["pid"], row["container"]))

    def read(self, now: int, *pids: int) -> None:
        """Launches of processes are read."""
        self.now = now
        self.launches._describe_new(np.array(pids, np.uint32))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    return Given(monkeypatch)


def test_the_next_process_with_a_pid_is_described(given: Given) -> None:
    given.containers = {7: "one", 8: "other"}
    given.read(10, 7, 8)
    given.read(20, 7)
    assert given.written == [(7, "one"), (8, "other")]
    # when the process ends, and the next one with its pid launches
    given.launches.ended(7, 30)
    given.launches.ended(4711, 30)
    given.containers[7] = "two"
    given.read(40, 7)
    # then
    assert given.written[2:] == [(7, "two")]
    assert given.told == [7, 8, 7]


def test_a_launch_that_is_read_before_the_exit(given: Given) -> None:
    given.containers = {7: "one"}
    given.read(10, 7)
    # when the next process's only launch is read before the first one's exit
    given.containers = {7: "two"}
    given.read(20, 7)
    given.launches.ended(7, 15)
    # then it is described, too
    assert given.written == [(7, "one"), (7, "two")]


def test_a_process_that_is_gone_takes_nothing_back(given: Given) -> None:
    given.containers = {7: "one"}
    given.read(10, 7)
    given.containers = {}
    given.launches.ended(7, 15)
    given.read(20, 7)
    assert given.written == [(7, "one")]


@pytest.mark.root
@pytest.mark.bpf
def test_the_side_band_tells_of_exits() -> None:
    ended: dict[int, int] = {}
    source = SideBand(Mock(ended=ended.__setitem__), Mock(), Mock())
    source._journal = cast(Any, SimpleNamespace(write=lambda *_, **__: None))
    before = time.monotonic_ns()
    # a process that starts threads, which end first
    program = "import threading\nfor n in range(3): t = threading.Thread(target=int); t.start(); t.join()"
    process = subprocess.Popen(["/usr/bin/python3", "-c", program])
    assert process.wait() == 0

    def is_told() -> bool:
        source.read()
        return process.pid in ended

    until(is_told)
    source.close()
    assert before < ended[process.pid] < time.monotonic_ns()


@pytest.mark.parametrize(("cgroup", "expected"), [("/one", {"sbid"}), ("/two", {"send"}), ("/none", set())])
def test_a_report_tells_such_processes_apart(tmp_path: Path, cgroup: str, expected: set[str]) -> None:
    # given pid 7 in one cgroup, then in another
    def process(second: int, event: str, cgroup: str | None = None) -> dict[str, Any]:
        row = {"time_ns": BEGUN + second * SECOND, "pid": 7, "tid": 7, "event": event, "cgroup": cgroup}
        return row | {"container": None, "uid": None if cgroup is None else 0}

    rows = [process(1, "described", "/one"), process(3, "exit"), process(4, "fork"), process(6, "described", "/two")]
    launches, stalls = [], []
    for number, (second, reason) in enumerate(((0, "sbid"), (5, "send"))):
        address, at = 0x10000 * (number + 1), BEGUN + second * SECOND
        launches.append(launch(at, 7, address, stack=number + 1))
        stalls.append(stall(at + 1000, record(address, **{reason: 1}), begin_ns=at))
    path = capture(tmp_path / "c.parquet", HEADER, stall=stalls, launch=launches, process=rows)
    # when
    done = iaprof("report", path, "-q", "--frames", "reason", "--cgroup", cgroup)
    # then
    assert done.code == (0 if expected else 1)
    assert {reason for reason in ("sbid", "send") if reason in done.out} == expected
