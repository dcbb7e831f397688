# SPDX-License-Identifier: Apache-2.0
"""Stacks of programs in Go and Java, against what the languages themselves and frame pointers say of each call."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest

from iaprof.bpf.probes.usdt import Arg
from iaprof.bpf.structs import ArgKind
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.unwind_rules import Walked
from integration.probed import FUNCTION, probed
from integration.recording import copy_of_build, environment, folded, iaprof
from programs.languages import GoProgram, Languages, build_go, build_java, prepare, rounds
from standin import runtime
from standin.hardware import Hardware

RAX = Arg(ArgKind.REGISTER, base=0)  # Go's first argument
TO_C = "runtime.asmcgocall.abi0"  # where Go changes stacks
FRAME_POINTERS = "-XX:+PreserveFramePointer"
ROUNDS = 3  # of Java


@pytest.fixture(scope="module")
def languages() -> Languages:
    return prepare()


@pytest.fixture(scope="module")
def go(languages: Languages, tmp_path_factory: pytest.TempPathFactory) -> GoProgram:
    return build_go(languages, tmp_path_factory.mktemp("go"))


def test_stacks_of_go(go: GoProgram, tmp_path: Path) -> None:
    # given Go that calls C, on another stack than its own, and Go's own functions; and C that calls Go back
    # when each does it twice
    with probed(go.path) as seen:
        seen.probe(go.path, "main.probeMe", go.behind_prologue("main.probeMe"), RAX)
        first, second = rounds(seen, [go.path, tmp_path / "told"], 2)
    known = {}
    for line in (tmp_path / "told").read_text().splitlines():
        number, *pcs = line.split()
        known[int(number)] = [int(pc, 16) for pc in pcs]
    assert len(known) == len(first) + len(second)
    assert len(first) == len(second) == 28
    for call in (*first, *second):
        names = [go.function(address) for address in call.ips]
        # Go tells from where the function asked that has then called this one
        asked, *callers = known[call.number]
        is_called_back = any(name.startswith("runtime.cgocallback") for name in map(go.function, callers))
        expected = list(takewhile(lambda pc: not go.function(pc).startswith("runtime."), callers))
        in_c = names.index(TO_C) if TO_C in names else 0
        if call.walked is Walked.STUCK and in_c == len(names) - 1 > 0:
            assert call in first  # the other stack was not copied before it was known that there is one
            continue
        # then it has Go's callers
        begin = names.index(go.function(asked)) + 1
        assert list(call.ips[begin : begin + len(expected)]) == expected
        if is_called_back:
            assert call.walked is Walked.STUCK
            assert names[-1] == "runtime.cgocallback.abi0"
        else:  # to the start of the goroutine
            assert call.walked is Walked.WHOLE
            assert list(call.ips[begin:]) == callers
            assert names[-1] == "runtime.goexit.abi0"
        # and these follow what called C; what is on C's own stack is not a guess
        assert names[0] in ({FUNCTION, "probe_me_after"} if in_c else {"main.probeMe"})
        assert set(names[in_c + 1 : begin - 1]) <= {"runtime.cgocall", "main._Cfunc_call_probe_me.abi0"}
        assert not any(call.guessed[: in_c + 1])


@pytest.mark.parametrize("options", [("-Xint",), ("-Xcomp", FRAME_POINTERS), (FRAME_POINTERS,)], ids=" ".join)
def test_stacks_of_java(languages: Languages, tmp_path: Path, options: tuple[str, ...]) -> None:
    library, told = build_java(languages, tmp_path), tmp_path / "told"
    command: list[str | Path] = [
        str(languages.java / "bin/java"),
        *options,
        "-cp",
        tmp_path,
        "Stacks",
        library,
        str(ROUNDS),
    ]
    with probed(library) as seen:
        calls = [call for each in rounds(seen, command, ROUNDS, {"TOLD": str(told)}) for call in each]
    lines = [line.split() for line in told.read_text().splitlines()]
    known = {int(line[0]): tuple(int(address, 16) for address in line[2:]) for line in lines}
    methods = {int(line[0]): int(line[1]) for line in lines}
    assert len(calls) == len(known) > 60
    for call in calls:
        expected = known[call.number]
        assert call.walked is Walked.WHOLE
        # the native function's own address is the first; the C library, where threads begin, has no frame pointers
        assert call.ips[2 : 2 + len(expected)] == expected
        assert len(call.ips) <= 2 + len(expected) + 2
        generated = call.guessed.count(True)
        if options == ("-Xint",):
            assert generated == methods[call.number] + 1  # with the code by which the virtual machine calls Java
        assert list(call.guessed) == [3 <= at < 3 + generated for at in range(len(call.ips))]


def test_methods_of_java_are_named_by_its_perf_map(languages: Languages, tmp_path: Path) -> None:
    # given a Java that names what it has compiled when it ends
    build, told, capture = copy_of_build(tmp_path / "build"), tmp_path / "told", tmp_path / "c.parquet"
    links = ("-Wl,--no-as-needed", runtime.build(build).library, f"-Wl,-rpath,{build}")
    library = build_java(languages, tmp_path, "-DLAUNCHING", f"-I{runtime.SOURCES}", *links)
    named = (FRAME_POINTERS, "-XX:+UnlockDiagnosticVMOptions", "-XX:+DumpPerfMapAtExit")
    pid, start = tmp_path / "pid", ("sh", "-c", 'echo $$ >"$0" && exec "$@"')
    program = (*start, pid, languages.java / "bin/java", "-Xcomp", *named, "-cp", tmp_path, "Stacks", library, "1")
    settings = {"LAUNCHING_ELF": str(runtime.debug_elf("bmg", "matmul")), "LAUNCHING_KERNEL": "multiply_basic"}
    # when
    with Hardware(tmp_path / "gpu") as hardware:
        done = iaprof(
            "record", "-o", capture, "--", *program, env=environment(hardware) | settings | {"TOLD": str(told)}
        )
    # then
    assert done.code == 0, done.err
    reader = CaptureReader(capture)
    process = int(pid.read_text())
    Path(f"/tmp/perf-{process}.map").unlink()
    launched = {row["stack"] for row in reader.table("launch").to_pylist() if row["pid"] == process}
    assert {row["ended"] for row in reader.table("stack").to_pylist() if row["id"] in launched} == {"whole"}
    shown = {line.split(";-;")[0] for line in folded(capture).splitlines() if line.split(";")[1] == str(process)}
    assert len(shown) > 4
    for stack in shown:
        assert "Java_Stacks_look;" in stack
        assert "[cut in" not in stack
    # callers of generated code are found by frame pointers, and marked as guesses
    assert any(";long Stacks.deep(int)_[guessed];" in stack for stack in shown)
