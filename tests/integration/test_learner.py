"""The learner's process: what happens when it, or the recorder, ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.rule_table import Spaces
from iaprof.record.unwinding.learner_process import MOST_STARTS, SYNC, LearnerProcess
from integration.walking import LONGEST_S
from limits import Within
from waiting import until

pytestmark = pytest.mark.bpf


def ready(learner: LearnerProcess) -> None:
    learner.is_ready = False
    while not learner.is_ready:
        assert learner.wait() == []


def test_what_a_program_loads_is_counted_before_it_maps_a_driver() -> None:
    # given
    with contextlib.closing(LaunchProbes()) as probes:
        list(probes.libraries.running())
        # when
        words = [sys.executable, "-c", "import ctypes; [ctypes.CDLL('libc.so.6') for _ in range(7)]; input()"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
            assert program.stdin is not None
            spaces = Spaces(*(probes.maps[name] for name in ("spaces", "loads", "missed_paths")))
            until(lambda: spaces.loads(program.pid) >= 7)
            program.stdin.write(b"\n")
            program.stdin.close()


def test_a_learner_whose_recorder_is_gone_ends_without_a_word(
    capfd: pytest.CaptureFixture[str], within: Within
) -> None:
    # given a recorder that ends before it reads the answer to a request
    probes = LaunchProbes()
    learner = LearnerProcess(probes)
    child = learner._child
    assert child is not None
    # when
    child.channel.send(SYNC)
    child.channel.close()
    # then
    with within(LONGEST_S):
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        assert (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
    learner.close()
    probes.close()
    assert capfd.readouterr().err == ""


def test_a_learner_that_is_killed_is_started_again_but_not_for_ever(within: Within) -> None:
    probes = LaunchProbes()
    learner = LearnerProcess(probes)
    with within(LONGEST_S):
        for left in range(MOST_STARTS - 1, -1, -1):
            ready(learner)
            assert learner._child is not None
            os.kill(learner._child.pid, signal.SIGKILL)
            os.waitid(os.P_PID, learner._child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
            assert list(learner.read()) == []
            assert (learner.fileno() >= 0) is bool(left)
        # and the CPU time of all of them is known
        assert learner.cpu_seconds > 0
        # and the recorder does not wait for a learner then
        assert learner.has_finished()
        assert learner.finish() == []
    probes.close()
