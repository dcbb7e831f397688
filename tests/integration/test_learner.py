"""The process that finishes stacks: what happens when it, or the recorder, is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.rule_table import Spaces
from iaprof.record.unwinding.learning import MOST_STARTS, SYNC, Learning
from integration.walking import LONGEST_S
from limits import Within
from waiting import until

pytestmark = pytest.mark.bpf


def ready(learning: Learning) -> None:
    learning.is_ready = False
    while not learning.is_ready:
        assert learning.wait() == []


def test_what_a_program_loads_is_counted_before_it_maps_a_driver() -> None:
    # given
    with contextlib.closing(LaunchProbes()) as probes:
        list(probes.libraries.running())
        # when
        words = [sys.executable, "-c", "import ctypes; [ctypes.CDLL('libc.so.6') for _ in range(7)]; input()"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
            assert program.stdin is not None
            until(lambda: Spaces(*(probes.maps[name] for name in ("spaces", "loads", "ways"))).loads(program.pid) >= 7)
            program.stdin.write(b"\n")
            program.stdin.close()


def test_a_learner_whose_recorder_is_gone_ends_without_a_word(
    capfd: pytest.CaptureFixture[str], within: Within
) -> None:
    # given a recorder that ends before it reads the answer to what it asked
    probes = LaunchProbes()
    learning = Learning(probes)
    child = learning._child
    assert child is not None
    # when
    child.channel.send(SYNC)
    child.channel.close()
    # then
    with within(LONGEST_S):
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        assert (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
    learning.close()
    probes.close()
    assert capfd.readouterr().err == ""


def test_a_learner_that_is_killed_is_started_again_but_not_for_ever(within: Within) -> None:
    probes = LaunchProbes()
    learning = Learning(probes)
    with within(LONGEST_S):
        for left in range(MOST_STARTS - 1, -1, -1):
            ready(learning)
            assert learning._child is not None
            os.kill(learning._child.pid, signal.SIGKILL)
            os.waitid(os.P_PID, learning._child.pid, os.WEXITED | os.WNOWAIT)  # it stays to be waited for
            assert list(learning.read()) == []
            assert (learning.fileno() >= 0) is bool(left)
        # and it is known what they took
        assert learning.cpu_seconds > 0
        # and nobody waits for it then
        assert learning.has_finished()
        assert learning.finish() == []
    probes.close()
