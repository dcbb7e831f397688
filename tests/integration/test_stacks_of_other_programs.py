"""Stacks of static programs, of programs with musl, and of programs that generate code."""

from __future__ import annotations

import subprocess
from collections import Counter as CountOf
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import MAX_DEPTH
from iaprof.formats.wire.unwind_rules import Walked
from integration.probed import Call, probed
from integration.recording import LAUNCH_FUNCTION, copy_of_build, environment, folded, iaprof
from stacks.debugger import Stop, build, stops
from standin import runtime
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf
ALL, OWN, THREADS = 38, 8, 3  # calls of plain.c; in main, and in each thread, before the C library calls back; threads
WITHIN = 2  # return addresses of jit.c's innermost functions, of which the program does not tell
DEEPEST = 6  # calls of generated code in jit.c, one in another


@dataclass(frozen=True)
class Seen:
    """A call, as BPF and the learner have it and as gdb has it."""

    call: Call
    stop: Stop

    @property
    def expected(self) -> tuple[int, ...]:
        """The return addresses that gdb has."""
        return tuple(self.stop.pcs[1:MAX_DEPTH])  # it stops behind the probe

    @property
    def told(self) -> tuple[int, ...]:
        """The return addresses before the first that is a guess."""
        guess = self.call.guessed.index(True) if any(self.call.guessed) else len(self.call.ips)
        return self.call.ips[1:guess]


def both(program: Path, folder: Path, *words: str | Path) -> list[Seen]:
    """A program's calls, by their numbers, run under gdb."""
    calls: list[Call] = []
    with probed(program) as seen:
        told = list(stops([program, *words], folder, before_the_end=lambda: calls.extend(seen.calls())))
    by_number = {call.number: call for call in calls}
    assert by_number.keys() == {stop.number for stop in told}
    assert len(by_number) == len(calls) == len(told)
    return [Seen(by_number[stop.number], stop) for stop in sorted(told, key=lambda stop: stop.number)]


@pytest.mark.parametrize("option", ["-static", "-static-pie"])
def test_every_stack_of_a_static_c_program(tmp_path: Path, option: str) -> None:
    found = both(build(tmp_path, "plain.c", "-O2", option), tmp_path)
    assert [each.call.ips[1:] for each in found] == [each.expected for each in found]
    assert {each.call.walked for each in found} == {Walked.WHOLE}
    assert not any(True in each.call.guessed for each in found)
    assert len(found) == ALL


def is_of_a_thread(each: Seen) -> bool:
    return each.call.tid != each.call.pid


@pytest.mark.parametrize("option", ["-static", "-pie"])
def test_stacks_of_a_program_with_musl(tmp_path: Path, option: str) -> None:
    program = build(tmp_path, "plain.c", "-O2", option, compiler="musl-gcc")
    found = both(program, tmp_path)
    assert len(found) == ALL
    own = [each for each in found if is_of_a_thread(each) or each.call.number <= OWN]
    # musl has no call frame information: callers of its functions are guesses, and no others are
    for each in found:
        # of a signal that comes to a function of musl, gdb has no more without musl's symbols
        count = len(each.told) if option == "-static" or each in own else 2
        assert each.told[:count] == each.expected[:count]
        # a guess that leads to no code is left to the recording's end: it might be code that is gone
        assert each.call.walked in (Walked.WHOLE, Walked.STUCK, Walked.MEMORY) or each.call.kept
        assert each.call.walked is not Walked.WHOLE or True in each.call.guessed
    # where musl calls main or a thread's function only one is one: it leads to the code that the kernel starts
    assert len(own) == OWN * (1 + THREADS)
    for each in own:
        assert each.call.walked is Walked.WHOLE
        assert len(each.told) == len(each.call.ips) - 2
    ends = CountOf((is_of_a_thread(each), each.call.ips[-1]) for each in own)
    assert sorted(ends.values()) == [OWN, OWN * THREADS]
    if option == "-static":
        assert {function_at(program, address) for _, address in ends} == {"_start", "__clone"}


def function_at(program: Path, address: int) -> str:
    """As nm says, of a program that lies where it was linked to."""
    words = ["nm", "--defined-only", "--numeric-sort", str(program)]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for start, _, name in map(str.split, lines) if int(start, 16) <= address][-1]


@dataclass(frozen=True)
class Jit:
    """What jit.c told: of each call the return addresses from that of the innermost function on."""

    pid: int
    stacks: list[tuple[int, ...]]


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Path]:
    """What it writes; the perf map that it leaves is removed."""
    path = tmp_path / "told"
    yield path
    if path.exists():
        perf_map(read(path)).unlink(missing_ok=True)


def read(told: Path) -> Jit:
    pid, *lines = told.read_text().splitlines()
    return Jit(int(pid), [tuple(int(word, 16) for word in line.split()) for line in lines])


def perf_map(jit: Jit) -> Path:
    return Path(f"/tmp/perf-{jit.pid}.map")


def generated(jit: Jit) -> list[range]:
    """Where the code is that the program made."""
    lines = (line.split() for line in perf_map(jit).read_text().splitlines())
    return [range(int(start, 16), int(start, 16) + int(size, 16)) for start, size, _ in lines]


@pytest.mark.parametrize("kind", ["framed", "new"])
def test_generated_code_with_frame_pointers(tmp_path: Path, told: Path, kind: str) -> None:
    found = both(build(tmp_path, "jit.c", "-O2"), tmp_path, told, kind)
    jit = read(told)
    code = generated(jit)
    within = found[0].expected[:WITHIN]
    below = found[0].expected[WITHIN + len(jit.stacks[0]) :]  # of main, in which is nothing that gdb does not know
    assert len(below) == 3
    for each, known in zip(found, jit.stacks, strict=True):
        assert each.call.walked is Walked.WHOLE
        assert each.call.ips[1:] == (*within, *known, *below)
        # the callers of generated code, and no others, are said to be guesses
        follows = [False, *(any(address in part for part in code) for address in each.call.ips)]
        assert list(each.call.guessed) == follows[:-1]
    assert len({len(each.call.ips) for each in found}) == DEEPEST


def test_generated_code_without_frame_pointers(tmp_path: Path, told: Path) -> None:
    found = both(build(tmp_path, "jit.c", "-O2"), tmp_path, told, "frameless")
    jit = read(told)
    code = generated(jit)
    for each, known in zip(found, jit.stacks, strict=True):
        # up to the generated code it is as the program knows it, and what follows is said to be a guess, or missing
        is_generated = [any(address in part for part in code) for address in known]
        right = is_generated.index(True) + 1 if True in is_generated else len(known)
        assert each.told[: WITHIN + right] == (*each.expected[:WITHIN], *known[:right])
        assert (each.call.walked is Walked.WHOLE and True not in each.call.guessed) == (True not in is_generated)


def test_functions_of_a_perf_map_are_named(tmp_path: Path, told: Path) -> None:
    folder, capture = copy_of_build(tmp_path / "build"), tmp_path / "c.parquet"
    links = ("-Wl,--no-as-needed", runtime.build(folder).library, f"-Wl,-rpath,{folder}")
    program = build(tmp_path, "jit.c", "-O2", "-g", "-DLAUNCHING", f"-I{runtime.SOURCES}", *links)
    settings = {"LAUNCHING_ELF": str(runtime.debug_elf("bmg", "matmul")), "LAUNCHING_KERNEL": "multiply_basic"}
    with Hardware(tmp_path / "gpu") as hardware:
        done = iaprof("record", "-o", capture, "--", program, told, "framed", env=environment(hardware) | settings)
    assert done.code == 0, done.err
    jit = read(told)
    perf_map(jit).unlink()
    # each launch has its whole stack, and the report has the names
    stacks = {row["id"]: row for row in CaptureReader(capture).table("stack").to_pylist()}
    launches = [row for row in CaptureReader(capture).table("launch").to_pylist() if row["pid"] == jit.pid]
    for row, known in zip(launches, jit.stacks, strict=True):
        assert tuple(stacks[row["stack"]]["ips"][1 + WITHIN : 1 + WITHIN + len(known)]) == known
    assert {stacks[row["stack"]]["ended"] for row in launches} == {"whole"}
    lines = folded(capture).splitlines()
    shown = {tuple(line.split(";-;")[0].split(";")[2:]) for line in lines if line.split(";")[1] == str(jit.pid)}
    assert shown, (len(launches), lines[:3])
    for marked in shown:
        frames = tuple(frame.removesuffix("_[guessed]") for frame in marked)
        assert frames[0] == "_start"
        first = frames.index("main") + 1
        depth = (len(frames) - first - 4) // 2
        assert frames[first:] == (*("in_c", "jit_with_frame") * depth, "in_c", "stop", "look", LAUNCH_FUNCTION)
