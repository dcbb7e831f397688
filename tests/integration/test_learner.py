"""The learner's process: what happens when it, or the recorder, ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.rule_table import Spaces
from iaprof.record.unwinding.learner_process import MOST_STARTS, SYNC, LearnerProcess
from integration.walking import LONGEST_S
from limits import Within

pytestmark = pytest.mark.bpf


def ready(learner: LearnerProcess) -> None:
    learner.is_ready = False
    while not learner.is_ready:
        assert learner.wait() == []


LOADS = """
import _ctypes, ctypes, sys
for word in sys.stdin:
    library = ctypes.CDLL(sys.argv[1])
    if word == "again\\n":
        _ctypes.dlclose(ctypes.CDLL(sys.argv[1])._handle)  # it stays, as it was loaded twice
    _ctypes.dlclose(library._handle) if word != "keep\\n" else None
    print(flush=True)
"""


def test_what_a_program_unloads_is_counted_before_it_maps_a_driver(tmp_path: Path) -> None:
    # given a program that runs with a dynamic linker that is watched
    library = tmp_path / "some.so"
    subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", library], check=True)
    with contextlib.closing(LaunchProbes(cpu_samples=False)) as probes:
        list(probes.libraries.running())
        spaces = Spaces(probes.maps)
        words: list[str | Path] = [sys.executable, "-c", LOADS, library]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
            to_program, answers = program.stdin, program.stdout
            assert to_program is not None and answers is not None

            def counted(word: bytes) -> int:
                to_program.write(word + b"\n")
                to_program.flush()
                answers.readline()
                return spaces.unloads(program.pid)

            # then only what unmaps the library counts
            before = counted(b"load")
            assert [counted(word) - before for word in (b"load", b"again", b"load", b"keep", b"load", b"again")] == [
                1, 2, 3, 3, 3, 3,
            ]  # fmt: skip
            to_program.close()


@pytest.mark.parametrize("has_maps", [True, False])
def test_a_learner_whose_recorder_is_gone_ends_without_a_word(
    capfd: pytest.CaptureFixture[str], within: Within, has_maps: bool
) -> None:
    # given a recorder that ends before it reads the answer to a request, or before it has loaded its programs
    probes = LaunchProbes(cpu_samples=False)
    learner = LearnerProcess()
    child = learner._child
    assert child is not None
    if has_maps:
        learner.learn_from(probes)
        child.channel.send(SYNC)
    # when
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
    probes = LaunchProbes(cpu_samples=False)
    learner = LearnerProcess()
    learner.learn_from(probes)
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


def test_a_learner_that_dies_before_it_has_its_maps_is_started_again(within: Within) -> None:
    probes = LaunchProbes(cpu_samples=False)
    learner = LearnerProcess()
    assert learner._child is not None
    os.kill(learner._child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, learner._child.pid, os.WEXITED | os.WNOWAIT)
    # when
    learner.learn_from(probes)
    assert list(learner.read()) == []
    # then
    with within(LONGEST_S):
        ready(learner)
    learner.close()
    probes.close()
