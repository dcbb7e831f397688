"""What BPF copies of stacks that it cannot walk: which memory, and of which stacks."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
from collections import Counter as Counted
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.bpf.maps import RingBuffer
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.libraries import LAUNCH
from iaprof.bpf.probes.usdt import Arg, Probe
from iaprof.bpf.structs import ArgKind
from iaprof.formats.wire.launches import COPY, Counter
from iaprof.formats.wire.unwind_rules import ADDRESS_BITS, Walked
from integration.probed import Call, Probed, probed
from stacks.debugger import build, offset_of
from waiting import until

pytestmark = pytest.mark.bpf

PAGE = 4096
BURST = 1000  # stacks of at most five pages fit into the ring buffer
NUMBER, NONE = Arg(ArgKind.REGISTER, base=5), Arg(ArgKind.CONSTANT)


def test_memory_above_a_threads_stack_is_not_copied(tmp_path: Path) -> None:
    # given a thread whose stack is between other memory
    program = build(tmp_path, "neighbours.c", "-O1", "-g")
    with contextlib.closing(LaunchProbes(cpu_samples=False)) as probes, program.open("rb") as file:
        probe = Probe("", LAUNCH, offset_of(program, "probe_me") + 4, 0, (NUMBER, NONE, NONE, NONE))
        assert probes._attach(file.fileno(), [probe]) == ""
        ring = RingBuffer(probes.maps["copies"], probes.sizes.copied_pages * PAGE, COPY)
        # when it launches, and no rules are known
        told = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout
        addresses = sorted(address for address in ring.read()["address"].tolist() if address)
        ring.close()
    # then its stack is copied up to its control block
    frame, block = map(int, told.split())
    assert addresses[0] <= frame
    assert addresses == list(range(addresses[0], block + 1, PAGE))


@pytest.mark.parametrize("words", [["thread"], []])
def test_a_threads_first_stack_is_whole_though_a_large_frame_is_in_it(tmp_path: Path, words: list[str]) -> None:
    program = build(tmp_path, "large.c", "-O1")
    with probed(program) as seen, subprocess.Popen([program, *words], stdin=subprocess.PIPE) as process:
        (call,) = arrived(seen, 1, process)
    assert call.walked is Walked.WHOLE
    assert not call.kept


def test_a_rule_that_was_replaced_is_learnt_again_though_the_learner_gets_no_cpu_meanwhile(tmp_path: Path) -> None:
    program = build(tmp_path, "bursts.c", "-O1")
    with probed(program) as seen, subprocess.Popen([program], stdin=subprocess.PIPE, text=True) as process:
        launched = 0

        def launch(count: int) -> None:
            nonlocal launched
            launched += count
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
            until(lambda: seen.counted(Counter.LAUNCHES) >= launched, process)

        # given a program whose rules are known, but for one that was replaced while the learner gets no CPU
        launch(1)
        (first,) = arrived(seen, 1, process)
        assert first.walked is Walked.WHOLE
        forget_rule(seen, first.ips[1])
        child = seen.walking.learner._child
        assert child is not None
        os.kill(child.pid, signal.SIGSTOP)
        launch(BURST)
        os.kill(child.pid, signal.SIGCONT)
        # when that happens again soon
        copied = Counted([call.walked for call in arrived(seen, BURST, process)])
        forget_rule(seen, first.ips[1])
        launch(1)
        (last,) = arrived(seen, 1, process)
    # then all of these have their stacks
    assert copied == {Walked.WHOLE: BURST}
    assert last.walked is Walked.WHOLE


def test_a_burst_of_small_stacks_is_whole_though_the_learner_gets_no_cpu_meanwhile(tmp_path: Path) -> None:
    # given a program whose stack has few pages, without rules
    program = build(tmp_path, "bursts.c", "-O1")
    with probed(program) as seen, subprocess.Popen([program], stdin=subprocess.PIPE, text=True) as process:
        child = seen.walking.learner._child
        assert child is not None and process.stdin is not None
        # when it launches by many paths before any is learnt
        os.kill(child.pid, signal.SIGSTOP)
        process.stdin.write(f"{BURST}\n")
        process.stdin.flush()
        until(lambda: seen.counted(Counter.LAUNCHES) >= BURST, process)
        os.kill(child.pid, signal.SIGCONT)
        # then each has its stack
        walked = Counted(call.walked for call in arrived(seen, BURST, process))
        assert not seen.counted(Counter.COPIES_LOST)
    assert walked == {Walked.WHOLE: BURST}


def arrived(seen: Probed, count: int, process: subprocess.Popen[Any]) -> list[Call]:
    """So many calls: BPF counts a launch before it sends it."""
    calls: list[Call] = []

    def are_enough() -> bool:
        calls.extend(seen.calls())
        return len(calls) >= count

    until(are_enough, process)
    return calls


def forget_rule(seen: Probed, address: int) -> None:
    """Removes the rules for a return address, as a new rule may that needs the place."""
    probes = seen._probes
    with mmap.mmap(probes.maps["rules"], 64 << probes.sizes.rule_bits) as table:
        slots = np.frombuffer(table, np.uint64).reshape(-1, 2)
        found = slots[:, 0] & np.uint64((1 << ADDRESS_BITS) - 1) == address
        assert found.sum() == 1
        slots[found] = 0
        del slots
