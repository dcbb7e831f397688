"""Whole stacks: what BPF and the learner have of each call, frame by frame against gdb's or libgcc's unwinder."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter as CountOf, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import MAX_DEPTH, Counter
from iaprof.formats.wire.unwind_rules import Walked
from integration.probed import Call, Probed, probed
from integration.recording import copy_of_build, environment, iaprof
from stacks.debugger import HERE, build, library, stops
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough, usually

pytestmark = pytest.mark.bpf
THREADS = 4
ROUNDS, CHILDREN, FORKS = 40, 20, 500  # of lineage.c

BUILDS = {
    "g++ -O2": ("g++", "-O2"),
    "full control-flow protection": ("g++", "-O2", "-fcf-protection=full"),
    "native, no PLT": ("g++", "-O3", "-march=native", "-fno-plt"),
    "clang": ("clang++", "-O2"),
    "stripped": ("g++", "-O2", "-s", "-rdynamic"),  # so that gdb still finds probe_me
    "static": ("g++", "-O2", "-static"),
    "static-pie": ("g++", "-Os", "-static-pie"),
    "realigned": ("g++", "-O2", "-mstackrealign", "-mavx2"),
}


def compared(seen: Probed, command: Sequence[str | Path | int], folder: Path) -> int:
    """Runs a program under gdb; each call's stack is the one that gdb has. Gives how many calls there were."""
    calls: dict[tuple[int, int, int], Call] = {}

    def read() -> None:
        calls.update({(call.pid, call.tid, call.number): call for call in seen.calls()})

    told = {(stop.pid, stop.tid, stop.number): stop.pcs for stop in stops(command, folder, before_the_end=read)}
    assert calls.keys() == told.keys()
    wrong = []
    for key, call in calls.items():
        # gdb stops behind the probe
        if call.ips[1:] != tuple(told[key][1:MAX_DEPTH]) or call.walked is not Walked.WHOLE:
            wrong.append((key, call.walked, call.presumed, [hex(ip) for ip in call.ips], [hex(pc) for pc in told[key]]))
    assert seen.counted(Counter.COPIES_LOST) == 0
    assert not wrong
    return len(calls)


@pytest.mark.parametrize("name", usually(["g++ -O2", "clang"], BUILDS))
def test_every_stack_of_a_c_program(tmp_path: Path, name: str) -> None:
    compiler, *flags = BUILDS[name]
    program = build(tmp_path, "stacks.cpp", *flags, compiler=compiler)
    with probed(program) as seen:
        assert compared(seen, [program, THREADS], tmp_path) > 200


def test_every_stack_of_a_python_program(tmp_path: Path) -> None:
    # with this Python, which has NumPy
    calls = build(tmp_path, "calls.c", "-O2", "-fPIC", "-shared")
    with probed(calls) as seen:
        assert compared(seen, [sys.executable, HERE / "python_stacks.py", calls, 3], tmp_path) > 200


def lineage(
    folder: Path, rounds: int, children: int, *libraries: Path, sudo: str = "", **more: str
) -> tuple[list[str], CaptureReader]:
    """What lineage.c told, with `more` environment, and the recording of it, as root or as this user's sudo does."""
    told, capture, build = folder / "told", folder / "c.parquet", copy_of_build(folder / "build")
    program, links = folder / "lineage", (runtime.build(build).library, f"-Wl,-rpath,{build}")
    flags = ("-O2", "-g", "-std=gnu11", f"-I{runtime.SOURCES}")
    subprocess.run(["cc", *flags, HERE / "lineage.c", *links, "-o", program], check=True)
    elf = str(runtime.debug_elf("bmg", "matmul"))
    settings = {"LAUNCHING_ELF": elf, "LAUNCHING_KERNEL": "multiply_basic", "SUDO_UID": sudo, "SUDO_GID": sudo, **more}
    with Hardware(folder / "gpu") as hardware:
        words: list[str | Path] = [program, told, str(rounds), str(children), *libraries]
        done = iaprof("record", "-o", capture, "--", *words, env=environment(hardware) | settings)
    assert done.code == 0, done.err
    return told.read_text().splitlines(), CaptureReader(capture)


def both_libraries(folder: Path) -> list[Path]:
    """Two libraries of one size, so that one is loaded where the other was."""
    return [library(folder, "loaded.c", f"lib{pad}.so", f"-DPAD={pad}") for pad in (40, 104)]


@pytest.mark.parametrize("sudo", usually([""], ["", "65534"]))
def test_code_that_changes(tmp_path: Path, sudo: str) -> None:
    """Libraries of one size at one address, forks, and programs that others become: root's, whoever called sudo."""
    libraries = both_libraries(tmp_path)
    lines, reader = lineage(tmp_path, ROUNDS, CHILDREN, *libraries, sudo=sudo)
    # most libraries were loaded where another one was before
    places = CountOf(line for line in lines if line.startswith("at "))
    assert places.most_common(1)[0][1] >= ROUNDS - 2
    assert libgcc_agrees(lines, reader) > 200


@thorough
def test_processes_that_end_before_the_recorder_knows_whose_they_are(tmp_path: Path) -> None:
    """With sudo, the caller may not read their libraries; of the process that may, all stacks are known already."""
    libraries = both_libraries(tmp_path)
    lines, reader = lineage(tmp_path, 2, CHILDREN, *libraries, sudo="65534", PARENT_PAUSES="1")
    assert libgcc_agrees(lines, reader) > 100


@thorough
def test_many_processes_that_launch_once_and_end(tmp_path: Path) -> None:
    lines, reader = lineage(tmp_path, 0, FORKS)
    assert libgcc_agrees(lines, reader) == FORKS


def libgcc_agrees(lines: list[str], reader: CaptureReader) -> int:
    """Each launch of a thread has the stack that libgcc had then; gives how many there are.

    Only copies for which the ring buffer had no room, as it may be on a busy machine, are not finished, and counted.
    """
    expected = defaultdict(list)
    for line in lines:
        if line.startswith("launch "):
            pid, tid, *ips = (int(word, 16) for word in line.split()[1:])
            expected[pid, tid].append(ips)
    found, wrong, unfinished = defaultdict(list), [], []
    stacks = {row["id"]: row for row in reader.table("stack").to_pylist()}
    for launch in sorted(reader.table("launch").to_pylist(), key=lambda row: row["time_ns"]):
        if (launch["pid"], launch["tid"]) in expected:
            found[launch["pid"], launch["tid"]].append(stacks[launch["stack"]])
    assert {key: len(each) for key, each in found.items()} == {key: len(each) for key, each in expected.items()}
    for key, each in found.items():
        for stack, ips in zip(each, expected[key], strict=True):
            if stack["ended"] == "unfinished":
                unfinished.append((key, stack["id"], stack["ips"]))
            elif stack["ended"] != "whole" or stack["ips"][-len(ips) :] != ips:
                wrong.append((key, stack["ended"], [hex(ip) for ip in stack["ips"]], [hex(ip) for ip in ips]))
    assert not wrong, (len(wrong), sum(map(len, found.values())), reader.header["probes"], wrong[-1])
    assert len(unfinished) <= reader.header["probes"]["copies_lost"], (unfinished, reader.header)
    return sum(map(len, found.values()))
