"""Time limits that stand still while a process waits for a CPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from iaprof.sandbox import deadline as module
from iaprof.sandbox.deadline import MOST_WAITING_S, CpuWaits, Deadline, patient_clock
from iaprof.sandbox.parent import Sandbox, SandboxSlow
from thorough import thorough
from waiting import until

BUSY = "while True: pass"


@dataclass
class Process(CpuWaits):
    """A process that the test makes up."""

    ran: float = 10.0
    waited: float = 20.0
    runnable: bool = False

    def seconds(self) -> tuple[float, float]:
        return self.ran, self.waited

    def is_runnable(self) -> bool:
        return self.runnable


@dataclass
class Clock:
    now: float = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "_counted_until", 0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def is_over(deadline: Deadline) -> bool:
    try:
        return deadline.left() <= 0
    except TimeoutError:
        return True


def test_a_process_that_does_nothing_has_the_limit(clock: Clock) -> None:
    deadline = Deadline(Process(), 3.0)
    assert deadline.left() == 3.0
    clock.now += 2.5
    assert deadline.left() == 0.5
    clock.now += 0.5
    assert is_over(deadline)


def test_waits_for_a_cpu_do_not_count(clock: Clock) -> None:
    process = Process()
    deadline = Deadline(process, 3.0)
    clock.now, process.waited = clock.now + 5.0, process.waited + 4.0
    assert deadline.left() == 2.0
    clock.now += 2.0
    assert is_over(deadline)


def test_a_wait_that_goes_on_is_waited_for(clock: Clock) -> None:
    process = Process(runnable=True)
    deadline = Deadline(process, 3.0)
    clock.now += deadline.left()
    for _ in range(100):
        left = deadline.left()
        assert 0 < left < 1
        clock.now += left
    process.runnable = False
    assert is_over(deadline)


def test_a_process_that_runs_between_waits_is_waited_for(clock: Clock) -> None:
    process = Process(runnable=True)
    deadline = Deadline(process, 3.0)
    for _ in range(20):  # waits of 5 s, of which each is counted when it ends
        begun = clock.now
        while clock.now < begun + 5.0:
            clock.now += min(deadline.left(), begun + 5.0 - clock.now)
        process.waited, process.ran, clock.now = process.waited + 5.0, process.ran + 0.1, clock.now + 0.1
    assert deadline.left() > 0


def test_a_process_that_seems_to_wait_and_runs_has_the_limit(clock: Clock) -> None:
    # given one that sleeps, and runs a little whenever somebody looks
    process = Process(runnable=True)
    deadline = Deadline(process, 3.0)
    clock.now += deadline.left()
    clock.now += deadline.left()
    # when
    process.ran += 0.001
    # then
    assert is_over(deadline)


def test_a_process_that_runs_all_the_time_has_the_limit(clock: Clock) -> None:
    process = Process(runnable=True)
    deadline = Deadline(process, 3.0)
    clock.now, process.ran = clock.now + deadline.left(), process.ran + 3.0
    assert is_over(deadline)


def test_waits_have_a_limit(clock: Clock) -> None:
    process = Process(runnable=True)
    deadline = Deadline(process, 3.0)
    process.waited += 1e6
    with pytest.raises(TimeoutError):
        while clock.now < 1e6:
            clock.now += deadline.left()
    assert MOST_WAITING_S <= clock.now - 100.0 <= MOST_WAITING_S + 2 * 3.0


def test_the_patient_clock_stands_still_while_a_process_waits(clock: Clock) -> None:
    process = Process()
    before = patient_clock()
    deadline = Deadline(process, 3.0)
    clock.now, process.waited = clock.now + 5.0, process.waited + 4.0
    deadline.over()
    assert patient_clock() - before == pytest.approx(1.0)


def test_the_patient_clock_never_goes_back(clock: Clock) -> None:
    # given processes that wait at the same time
    processes = [Process() for _ in range(4)]
    before = patient_clock()
    deadlines = [Deadline(process, 3.0) for process in processes]
    clock.now += 20.0
    for process, deadline in zip(processes, deadlines, strict=True):
        process.ran, process.waited = process.ran + 5.0, process.waited + 15.0
        deadline.over()
        deadline.over()
    # then a moment counts once
    assert patient_clock() - before == pytest.approx(5.0)


def test_a_wait_from_before_does_not_count(clock: Clock) -> None:
    process = Process()
    before = patient_clock()
    deadline = Deadline(process, 3.0)
    clock.now, process.ran, process.waited = clock.now + 2.0, process.ran + 0.5, process.waited + 60.0
    deadline.over()
    assert patient_clock() - before == pytest.approx(0.5)


@contextlib.contextmanager
def running(code: str) -> Iterator[int]:
    """Runs a program in a session of its own, which may have a share of the CPU of its own."""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_the_kernel_tells_how_long_a_process_ran_and_waited() -> None:
    # given programs on one CPU, of which one can run for a part of the time
    cpu = {min(os.sched_getaffinity(0))}
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(running(BUSY)) for _ in range(4)]
        for pid in pids:
            os.sched_setaffinity(pid, cpu)
        waits = stack.enter_context(contextlib.closing(CpuWaits(pids[0])))
        ran, waited = waits.seconds()
        # when / then
        until(lambda: waits.seconds()[0] > ran + 0.1 and waits.seconds()[1] > waited + 0.3)
        assert waits.is_runnable()


SPIN = """
import time

def spin(parameters, data, files):
    end = time.process_time() + parameters["cpu_s"]
    while time.process_time() < end:
        pass
    return "done"

def operations(stage_seconds):
    return {"spin": spin}
"""


@thorough
def test_a_child_that_seldom_runs_has_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a child that shares its CPU with four programs
    (tmp_path / "spinning.py").write_text(SPIN)
    monkeypatch.syspath_prepend(tmp_path)
    cpu = {min(os.sched_getaffinity(0))}
    with Sandbox("spinning") as sandbox, contextlib.ExitStack() as stack:
        sandbox.call("spin", {"cpu_s": 0.0})
        assert sandbox.pid is not None
        for pid in (sandbox.pid, *(stack.enter_context(running(BUSY)) for _ in range(4))):
            os.sched_setaffinity(pid, cpu)
        # when / then it has more time than it needs, but less than passes
        assert sandbox.call("spin", {"cpu_s": 0.25}, seconds=0.5) == "done"
        with pytest.raises(SandboxSlow):
            sandbox.call("spin", {"cpu_s": 1.5}, seconds=0.5)


def test_a_process_that_sleeps_or_has_ended_waits_for_no_cpu() -> None:
    with running("import time; time.sleep(1000)") as pid, contextlib.closing(CpuWaits(pid)) as waits:
        until(lambda: not waits.is_runnable())
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        assert waits.seconds() == (0.0, 0.0)
        assert not waits.is_runnable()
