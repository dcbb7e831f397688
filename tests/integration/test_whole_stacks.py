"""Launches through a library without frame pointers: their stacks are whole, and where one is cut, that is said."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.calls import calls
from iaprof.symbols.names.names import ModuleKind
from integration.recording import IAPROF, LAUNCH_FUNCTION, copy_of_build, environment, folded, iaprof
from stacks.debugger import offset_of, stops
from stacks.without_btf import WITHOUT_BTF
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough

pytestmark = pytest.mark.bpf
LIBRARY = "libstrays.so"
EACH = 20  # launches with each kind of data
KINDS = ("heap", "code", "none")
CUT = f"[cut in {LIBRARY}: no call frame information]"


@dataclass(frozen=True)
class Strays:
    """The program and its library."""

    program: Path
    runtime: Path

    def environment(self, told: Path) -> dict[str, str]:
        """What it needs to know."""
        elf = str(runtime.debug_elf("bmg", "matmul"))
        return {"LAUNCHING_ELF": elf, "LAUNCHING_KERNEL": "multiply_basic", "LAUNCHING_TOLD": str(told)}


def build(folder: Path, *flags: str) -> Strays:
    """With the library compiled with these flags."""
    folder = copy_of_build(folder)
    programs = runtime.build(folder)
    source, library, program = runtime.SOURCES / "strays.c", folder / LIBRARY, folder / "strays"
    compiler, common = os.environ.get("CC", "cc"), ("-Wall", "-Wextra", "-Werror", "-std=gnu11", f"-I{runtime.SOURCES}")
    without = ("-O2", "-fomit-frame-pointer", "-g", "-fPIC", "-shared", "-DLIBRARY", "-Wl,--build-id=sha1", *flags)
    subprocess.run([compiler, *common, *without, "-o", library, source], check=True)
    links = (programs.library, library, f"-Wl,-rpath,{folder}")
    subprocess.run([compiler, *runtime.COMMON, *common, "-O2", "-o", program, source, *links], check=True)
    return Strays(program, folder)


NO_EH_FRAME = ("-fno-asynchronous-unwind-tables", "-fno-unwind-tables")


@pytest.fixture
def strays(tmp_path: Path) -> Strays:
    return build(tmp_path / "build", "-DHOLE=8")


@pytest.fixture
def cut(tmp_path: Path) -> Strays:
    """Without call frame information, and with more on the stack than is looked through for a return address."""
    return build(tmp_path / "build", "-DHOLE=40000", "-g0", *NO_EH_FRAME)


@pytest.fixture
def hardware(tmp_path: Path) -> Iterator[Hardware]:
    """A GPU."""
    with Hardware(tmp_path / "gpu", "bmg") as made:
        yield made


def of_gdb(strays: Strays, told: Path) -> list[tuple[str, int]]:
    """The frames of one launch, the innermost first: file and offset of what the next one returns to."""
    library = strays.runtime / "libze_intel_gpu.so.1"
    at = {library: [offset_of(library, "zeCommandListAppendLaunchKernel")]}
    command: list[str | Path] = [strays.program, "1", "heap"]
    (stop,) = stops(command, told.parent, memory=True, places=at, environment=strays.environment(told))
    assert len(stop.places) > 5
    return [(path.name, offset) for path, offset in stop.places]


def test_stacks_are_gdb_s(tmp_path: Path, hardware: Hardware, strays: Strays) -> None:
    # given
    capture, told = tmp_path / "cap.parquet", tmp_path / "told"
    frames = of_gdb(strays, told)
    # when
    done = iaprof(
        *("record", "-o", capture, "--", strays.program, str(EACH), *KINDS),
        env=environment(hardware) | strays.environment(told),
    )
    # then all launches have the one stack
    assert done.code == 0, done.err
    pid = int(told.read_text())
    reader = CaptureReader(capture)
    launches = reader.table("launch", ("pid", "stack")).to_pylist()
    used = {row["stack"] for row in launches if row["pid"] == pid}
    assert sum(row["pid"] == pid for row in launches) == EACH * len(KINDS)
    assert len(used) == 1
    stack = reader.stacks(np.array(list(used), np.uint64))
    assert stack["ended"].to_pylist() == ["whole"]
    assert stack["marks"].to_pylist() == [None]
    # and each of its return addresses is the one that gdb finds
    found = calls(stack)
    spaces = AddressSpaces(reader.table("mapping"), reader.table("process"))
    modules, inside = spaces.locate(found.pids, found.addresses, found.times)
    kept = []
    for module, offset in zip(modules[1:].tolist(), inside[1:].tolist(), strict=True):
        assert spaces.modules[module].kind is ModuleKind.FILE
        kept.append((os.path.basename(spaces.modules[module].path), offset + 1))
    assert kept[: len(frames) - 1] == frames[1:]
    assert {name for name, _ in kept[len(frames) - 1 :]} <= {"libc.so.6", "strays"}  # gdb ends at main
    # and so a reader sees all of them
    shown = {
        tuple(line.rsplit(" ", 1)[0].split(";-;")[0].split(";")[2:])
        for line in folded(capture).splitlines()
        if line.split(";")[1] == str(pid)
    }
    assert len(shown) == 1
    assert shown.pop()[-6:] == ("main", "step", "through_library", "deeper", "launch_kernel", LAUNCH_FUNCTION)


@pytest.mark.alone  # what is said is of all launches of the machine
def test_callers_of_code_without_call_frame_information_are_guesses_everywhere(
    tmp_path: Path, hardware: Hardware
) -> None:
    # given a library with small frames, so that a search of the stack finds the callers
    strays = build(tmp_path / "build", "-DHOLE=8", "-g0", *NO_EH_FRAME)
    capture, told, total = tmp_path / "cap.parquet", tmp_path / "told", EACH * len(KINDS)
    # when
    words = ("record", "-o", capture, "--", strays.program, str(EACH), *KINDS)
    done = iaprof(*words, env=environment(hardware) | strays.environment(told))
    # then what called the library's functions is marked where it was found at all, and nothing else is
    assert done.code == 0, done.err
    own = [line.split(";-;")[0].split(";") for line in folded(capture).splitlines()]
    shown = {tuple(frames[2:]) for frames in own if frames[1] == told.read_text()}
    for caller, function in (pair for stack in shown for pair in pairwise(stack)):
        is_in_library = function.removesuffix("_[guessed]") in ("through_library", "deeper")
        assert caller.endswith("_[guessed]") == (is_in_library and caller != CUT), shown
    # and no stack is whole, although some reach the program's start
    ends = CaptureReader(capture).header["stack_ends"]["launches"]
    assert (ends["stacks"], ends["whole"], ends["guessed"] + ends["cut"]) == (total, 0, total)
    assert f"stacks: 0 of {total} launches (0.0 %) have a whole stack" in done.err


@pytest.mark.alone  # what is said is of all launches of the machine
def test_how_many_reach_the_start_is_said_everywhere(tmp_path: Path, hardware: Hardware, cut: Strays) -> None:
    # given
    capture, told = tmp_path / "cap.parquet", tmp_path / "told"
    total = EACH * len(KINDS)
    kinds = f"0 of {total} launches (0.0 %) have a whole stack, {total} (100.0 %) are cut"
    # when
    done = iaprof(
        *("record", "-o", capture, "--", cut.program, str(EACH), *KINDS),
        env=environment(hardware) | cut.environment(told),
    )
    # then
    assert done.code == 0, done.err
    assert f"stacks: {kinds}; {total} end early, in {LIBRARY} ({total})" in done.err
    shown = re.sub(r"\s+", " ", iaprof("info", capture).out)
    assert f"launch stacks {kinds}" in shown
    assert f" end in {LIBRARY} ({total}) process {told.read_text()}: {total} of {total} end early" in shown
    assert f"Lost callers: of {total} launches, whose stacks do not reach the program's start" in shown
    ends = json.loads(iaprof("info", capture, "--json").out)["parts"][0]["stack_ends"]["launches"]
    library = {"library": LIBRARY, "count": total, "deep": 0}
    others = {"deep": 0, "guessed": 0, "late": 0, "presumed": ends["presumed"]}
    process = {"pid": int(told.read_text()), "stacks": total, "count": total, **others}
    assert ends["presumed"] < total
    counts = {"stacks": total, "whole": 0, "unknown": 0, "cut": total, "more": 0, "guessed_early": 0, **others}
    assert ends == counts | {"ends": [library], "processes": [process], "guesses": []}
    assert f", in process {process['pid']} ({total} of {total})" in done.err
    report = iaprof("report", capture, "--json")
    document = json.loads(report.out)
    assert document["stack_ends"]["whole"] == 0
    assert [end["library"] for end in document["stack_ends"]["ends"]] == [LIBRARY]
    samples = document["stack_ends"]["stacks"]
    assert samples > 0
    by_samples = f"stacks: 0 of {samples:,} samples (0.0 %) have a whole stack, {samples:,} (100.0 %) are cut; "
    assert by_samples in report.err
    page = tmp_path / "cap.html"
    assert iaprof("report", capture, "-o", page).code == 0
    top = json.loads(iaprof("top", capture, "--json").out)
    assert top["stack_ends"] == document["stack_ends"]
    assert top["recorded_stack_ends"] == document["recorded_stack_ends"] == CaptureReader(capture).header["stack_ends"]
    assert document["recorded_stack_ends"]["launches"] == ends
    # and the same of CPU samples
    stacks = [
        row["stack"]
        for row in CaptureReader(capture).table("cpu_sample").to_pylist()
        if row["stack"] and not row["left_out"]
    ]
    assert document["recorded_stack_ends"]["cpu_samples"]["stacks"] == len(stacks)
    assert (f" of {len(stacks):,} CPU samples (" in done.err) == bool(stacks)
    # and why stands in place of the missing frames
    shown_stacks = {tuple(line.split(";-;")[0].split(";")[2:]) for line in folded(capture).splitlines()}
    assert {frames for frames in shown_stacks if frames and frames[-1] == LAUNCH_FUNCTION} == {
        (CUT, "deeper", "launch_kernel", LAUNCH_FUNCTION)
    }


def test_without_btf_a_stack_ends_where_frame_pointers_do(tmp_path: Path, hardware: Hardware, strays: Strays) -> None:
    # given a kernel that does not say what walking by rules needs, and a library without frame pointers
    capture, told = tmp_path / "cap.parquet", tmp_path / "told"
    words = ("record", "-o", capture, "--", strays.program, str(EACH), *KINDS)
    # when
    settings = [
        f"{name}={value}" for name, value in environment(hardware).items()
    ]  # for itself, not for what starts it
    command = [*WITHOUT_BTF, "env", *settings, *IAPROF, *map(str, words)]
    done = subprocess.run(
        command, env=os.environ | strays.environment(told), capture_output=True, text=True, timeout=300
    )
    # then it says so, and the walk ends in that library
    assert done.returncode == 0, done.stderr
    assert "stacks are walked by frame pointers" in done.stderr
    pid = told.read_text()
    shown = {
        tuple(line.split(";-;")[0].split(";")[2:]) for line in folded(capture).splitlines() if line.split(";")[1] == pid
    }
    assert {frames[-2:] for frames in shown} == {("launch_kernel", LAUNCH_FUNCTION)}
    assert {frames[0] for frames in shown} == {f"[no frame pointers: {LIBRARY}]"}


@pytest.mark.alone  # what is said is of all launches of the machine
def test_stacks_with_frame_pointers_reach_the_start(tmp_path: Path, hardware: Hardware) -> None:
    # given the stand-in's own program: main, and threads
    capture = tmp_path / "cap.parquet"
    words = runtime.command([runtime.debug_elf("bmg", "matmul")], "--launches", 100, "--threads", 2)
    # when the C library's debug symbols name its first functions or not
    done = iaprof("record", "-o", capture, "--", *words, env=environment(hardware))
    # then
    assert done.code == 0, done.err
    ends = CaptureReader(capture).header["stack_ends"]["launches"]
    assert ends["whole"] == ends["stacks"] > 100
    cost = CaptureReader(capture).header["cost"]
    assert 0 < cost["learn_cpu_s"] < cost["cpu_s"]
    assert f"stacks: {ends['stacks']} of {ends['stacks']} launches (100.0 %) have a whole stack" in done.err
    assert "[cut in" not in folded(capture)


@pytest.mark.alone  # what is said is of all launches of the machine
def test_no_more_frames_than_are_wanted(tmp_path: Path, hardware: Hardware, strays: Strays) -> None:
    # given
    capture, told = tmp_path / "cap.parquet", tmp_path / "told"
    # without CPU samples, whose stacks may be unfinished when the program ends
    words = ("record", "-o", capture, "--max-stack", "4", "--cpu-freq", "0", "--", strays.program, str(EACH), *KINDS)
    # when
    done = iaprof(*words, env=environment(hardware) | strays.environment(told))
    # then
    assert done.code == 0, done.err
    assert f", {EACH * len(KINDS)} (100.0 %) are too deep; " in done.err
    reader, pid = CaptureReader(capture), int(told.read_text())
    stacks = [row for row in reader.table("stack").to_pylist() if row["pid"] == pid and row["ended"]]
    assert {(row["ended"], len(row["ips"])) for row in stacks} == {("deep", 4)}
    of_program = {
        tuple(line.rsplit(" ", 1)[0].split(";-;")[0].split(";")[2:])
        for line in folded(capture).splitlines()
        if line.split(";")[1] == str(pid)
    }
    assert of_program == {("[truncated]", "through_library", "deeper", "launch_kernel", LAUNCH_FUNCTION)}


@thorough
@pytest.mark.alone  # what is said is of all launches of the machine
def test_check_names_the_library_where_stacks_end(tmp_path: Path, cut: Strays) -> None:
    # given a program that launches as long as somebody looks
    told, forever = tmp_path / "told", str(1 << 30)
    with subprocess.Popen([cut.program, forever, "heap"], env=os.environ | cut.environment(told)) as program:
        try:
            # when
            done = iaprof("check", "--json")
        finally:
            program.kill()
    # then it says so, and of no other library
    found = {each["name"]: each for each in json.loads(done.out)["checks"] if each["group"] == "Stacks"}
    assert found[LIBRARY]["level"] == "warning"
    assert re.match(r"the stacks of [\d,]+ launches end there", found[LIBRARY]["text"])
    assert found[LIBRARY]["file"].endswith(f"/{LIBRARY}")
    expected = r"now, 0 of ([\d,]+) launches \(0.0 %\) have a whole stack, \1 \(100.0 %\) are cut; \1 end early, "
    expected += rf"in {LIBRARY} \(\1\)"
    assert re.match(expected, found["launches"]["text"])
