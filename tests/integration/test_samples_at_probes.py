"""CPU samples of a program at the places where uprobes are, whose instructions run elsewhere.

The truth is the program's own structure (tests/stacks/entries.c): main calls middle, that inner, that each function.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from iaprof.bpf.perf_event import CpuClock
from iaprof.bpf.processes import running_pids
from iaprof.formats.wire.unwind_rules import Walked
from integration.probed import probed
from stacks.debugger import HERE

pytestmark = pytest.mark.bpf

FUNCTIONS = ("push_rbx", "push_rbp", "push_r12", "nop", "endbr64", "sub", "nop5", "ret", "jmp", "call", "mov")
HZ = 9_973
COPIES = 0x7FFF_FFFF_E000  # TASK_SIZE less a page: the kernel's copies of instructions (xol_add_vma, uprobes.c)
LIBRARY = "[library]"
SECONDS = 2


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("entries") / "entries"
    sources = [HERE / "entries.c", HERE / "entries.S"]
    flags = ["-O1", "-fomit-frame-pointer", "-fno-optimize-sibling-calls", "-no-pie", "-fcf-protection=none"]
    subprocess.run(["gcc", *flags, *sources, "-o", made], check=True)
    return made


class Names:
    """The functions of the program; its PLT and .init, and addresses outside it, count as libraries."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            elf = ELFFile(file)
            table = elf.get_section_by_name(".symtab")
            assert isinstance(table, SymbolTableSection)
            unnamed = [section for section in elf.iter_sections() if section.name in (".init", ".plt")]
            self._unnamed = [range(each["sh_addr"], each["sh_addr"] + each["sh_size"]) for each in unnamed]
            self._functions = sorted(
                (symbol["st_value"], symbol["st_size"], symbol.name)
                for symbol in table.iter_symbols()
                if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_value"]
            )

    def of(self, ip: int) -> str:
        at = bisect.bisect_right(self._functions, (ip, 1 << 64)) - 1
        start, size, name = self._functions[max(at, 0)]
        return name if start <= ip < start + size else LIBRARY if self._is_of_a_library(ip) else hex(ip)

    def _is_of_a_library(self, ip: int) -> bool:
        return any(ip in addresses for addresses in self._unnamed) or 0x7E << 40 < ip < COPIES


def taken(program: Path) -> Iterator[tuple[Walked, list[int]]]:
    """The stacks of CPU samples of the program, each of its functions probed."""
    with probed(cpu_samples=True) as seen, contextlib.closing(CpuClock(seen._probes.maps["on_sample"], HZ)) as clock:
        for function in FUNCTIONS:
            seen.probe(program, f"enter_{function}", behind=0)
        seen._probes.exclude(running_pids(), launches=False)
        seen._probes.include([os.getpid()])
        process = subprocess.Popen([program, str(SECONDS)])  # returns when the program has begun
        clock.enable(True)
        samples = []
        while process.poll() is None:
            time.sleep(0.01)
            seen._probes.launches.read()
            samples.append(seen._probes.samples.read())
            seen.walking.stacks()
        clock.enable(False)
        stacks = seen.walking.stacks()
    for row in np.concatenate(samples):
        if row["pid"] == process.pid and int(row["stack"]) in stacks:
            ips, walked = stacks[int(row["stack"])]
            yield walked, ips


def test_no_sample_at_a_probe_lacks_a_caller(program: Path) -> None:
    names = Names(program)
    found: Counter[tuple[Walked, tuple[str, ...]]] = Counter()
    for walked, ips in taken(program):
        found[walked, tuple(names.of(ip - (place > 0)) for place, ip in enumerate(ips))] += 1
    # then each whole stack that has one of the functions is one that the program can have
    outer = ("inner", "middle", "main", LIBRARY, LIBRARY, "_start")
    entered = {(f"enter_{name}", *outer) for name in FUNCTIONS}
    jumped = {("enter_jumped", *outer), ("enter_jumped", "enter_call", *outer)}
    whole = Counter({stack: count for (walked, stack), count in found.items() if walked is Walked.WHOLE})
    seen = {stack for stack in whole if stack[0].startswith("enter_")}
    # (but a few of 50,000 samples, where another interrupt came while the kernel pushed r12, which is 0)
    pushed = ("enter_push_r12",)
    assert seen - {pushed} == entered | jumped
    assert whole[pushed] <= 3
    assert sum(whole[stack] for stack in entered) > 0.3 * found.total()
    # and those that were not finished in time have no wrong caller, with the same exception
    beginnings = {stack[:depth] for stack in entered | jumped for depth in range(1, len(stack))}
    cut = Counter({stack: count for (walked, stack), count in found.items() if walked is not Walked.WHOLE})
    wrong = {stack: cut[stack] for stack in cut if stack[0].startswith("enter_") and stack not in beginnings}
    assert all(stack[0].startswith("enter_push_") for stack in wrong), wrong
    assert sum(wrong.values()) <= 3, wrong
    # and none is in a copy of an instruction or in a trampoline, which lie outside program and libraries
    assert not [stack for _, stack in found if any(name.startswith("0x") for name in stack)]
