"""Which memory BPF copies of a stack that it cannot walk."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from iaprof.bpf.maps import RingBuffer
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.libraries import LAUNCH
from iaprof.bpf.probes.usdt import Arg, Probe
from iaprof.bpf.structs import ArgKind
from iaprof.formats.wire.launches import COPY
from stacks.debugger import build, offset_of

pytestmark = pytest.mark.bpf

PAGE = 4096
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
