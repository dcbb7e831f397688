"""Frames of Python in stacks of launches, of interpreters as people have them: each is what sys._getframe tells."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture import CaptureReader
from iaprof.formats.launches import MAX_PYTHON
from iaprof.record.spool import FrameKind
from integration.recording import LONGEST_WAIT_S, ended, environment, folded, spooled, start, until
from pythons.interpreters import HERE, NAMES, started_as
from standin import runtime
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf
ROUNDS = 10
TIMES = 20  # of cases.py
PROGRAMS = HERE / "programs"
MADE = ("<made>", "<string>")  # files of code objects of exec and eval


def calls_library(folder: Path) -> Path:
    library, linked = folder / "libcalls.so", runtime.build().library
    words = ("cc", *runtime.COMMON, "-O2", "-fPIC", "-shared", f"-I{runtime.SOURCES}", PROGRAMS / "launching_calls.c")
    subprocess.run([*words, linked, f"-Wl,-rpath,{linked.parent}", "-o", library], check=True)
    return library


@pytest.mark.parametrize("is_running", [False, True], ids=["started by the recorder", "running"])
@pytest.mark.parametrize("name", NAMES)
def test_each_frame_is_what_the_interpreter_tells(tmp_path: Path, name: str, is_running: bool) -> None:
    # given
    python, told, go = started_as(name), tmp_path / "told", tmp_path / "go"
    program = [*python, str(PROGRAMS / "launches.py"), *map(str, arguments(tmp_path)), str(ROUNDS), str(go)]
    # when
    capture = recorded(tmp_path, program, is_running)
    # then, in the order in which each thread launched
    expected, found = frames_told(told), frames_found(CaptureReader(capture))
    found = {tid: each for tid, each in found.items() if tid in expected}
    assert {tid: len(each) for tid, each in found.items()} == {tid: len(each) for tid, each in expected.items()}
    launches = [launch for each in expected.values() for launch in each]
    assert len(launches) > 1000
    assert len({json.dumps(launch) for launch in launches}) > 50
    wrong = [
        (number, frames, wanted)
        for tid, each in expected.items()
        for number, (frames, wanted) in enumerate(zip(found[tid], each, strict=True))
        if frames != wanted
    ]
    # only another code object that exec or eval made at the same address may be taken for one that was seen just before
    others = [each for each in wrong if all(file not in MADE for file, *_ in each[2])]
    assert not others, json.dumps(others[:2], indent=1)
    assert len(wrong) < len(launches) / 20
    # and readers see them, callers above the library below
    program_file = PROGRAMS / "launches.py"
    assert f"py::step:{program_file};py::plain:{program_file};py::launch:" in folded(capture)


@pytest.mark.parametrize("case", ["plain", "long_table", "thread_of_c", "stale"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_seldom_met(tmp_path: Path, name: str, case: str) -> None:
    (found,), (expected,) = cases(tmp_path, name, case)
    assert found == expected
    assert len(expected) == TIMES


def test_long_names_are_marked(tmp_path: Path) -> None:
    ((frames,),), ((expected,),) = cases(tmp_path, "own", "long_names")
    assert [line for *_, line in frames] == [line for *_, line in expected]
    for (*texts, _), (*wanted, _) in zip(frames, expected, strict=True):
        for text, whole in zip(texts, wanted, strict=True):
            assert text == whole or (text.endswith("…") and whole.startswith(text[:-1]) and len(text) > 200)
    assert any(text.endswith("…") for *texts, _ in frames for text in texts)


def test_more_frames_than_are_kept_are_said_to_be_missing(tmp_path: Path) -> None:
    ((frames,),), ((expected,),) = cases(tmp_path, "own", "deep")
    assert len(expected) > 400
    assert frames == expected[: len(frames)]
    assert len(frames) >= MAX_PYTHON - 2
    ended = CaptureReader(tmp_path / "cap.parquet").table("stack")["python_ended"].to_pylist()
    assert "deep" in ended


def test_another_interpreter_in_the_same_process(tmp_path: Path) -> None:
    """Which was executed by the first one."""
    # given
    first, second, third = (arguments(tmp_path, name) for name in ("told", "told2", "told3"))
    goes = [str(tmp_path / f"go{name}") for name in ("", "2", "3")]
    program = [str(PROGRAMS / "cases.py"), "executes_another"]
    last = [*started_as("trixie"), program[0], "plain", *third, goes[2]]
    words = [*started_as("own"), *program, *first, goes[0], *started_as("bookworm"), *program, *second, goes[1], *last]
    # when
    capture = recorded(tmp_path, words, is_running=False, goes=3)
    # then
    expected = [*frames_told(tmp_path / "told").values(), *frames_told(tmp_path / "told2").values()]
    expected += frames_told(tmp_path / "told3").values()
    assert list(frames_found(CaptureReader(capture)).values()) == [[launch for each in expected for launch in each]]


def cases(folder: Path, name: str, case: str) -> tuple[list[Any], list[Any]]:
    """Frames of each launch of cases.py, by thread: those recorded, and those told."""
    words = [*started_as(name), str(PROGRAMS / "cases.py"), case, *arguments(folder), str(folder / "go")]
    capture = recorded(folder, words, is_running=False)
    return list(frames_found(CaptureReader(capture)).values()), list(frames_told(folder / "told").values())


def arguments(folder: Path, told: str = "told") -> list[str]:
    """Of programs, for launching."""
    words = (calls_library(folder), runtime.debug_elf("bmg", "matmul"), "multiply_basic", folder / told)
    return [str(word) for word in words]


def recorded(folder: Path, program: list[str], is_running: bool, goes: int = 1) -> Path:
    """Records a program that begins when there is a file `go` (then `go2`, `go3`), as its interpreter is known then."""
    capture = folder / "cap.parquet"
    with Hardware(folder / "gpu", "bmg") as hardware:
        running = subprocess.Popen(program, env=os.environ | environment(hardware)) if is_running else None
        recorder = start(hardware, capture, *(() if running else ("--", *program)))
        try:
            for number in range(1, goes + 1):
                until(lambda number=number: is_known(capture, str(folder / "told"), number), recorder)
                (folder / f"go{number if number > 1 else ''}").touch()
            if running is not None:
                assert running.wait(LONGEST_WAIT_S) == 0
            ended(recorder, interrupt=is_running)
        finally:
            kill(running, recorder)
    return capture


def frames_told(file: Path) -> dict[int, list[Any]]:
    """Frames of each launch by thread, as the program told them."""
    told: dict[int, list[Any]] = defaultdict(list)
    for line in file.read_text().splitlines():
        tid, frames = line.split("\t")
        told[int(tid)].append([tuple(frame) for frame in json.loads(frames)])
    return told


def is_known(capture: Path, argument: str, times: int) -> bool:
    """Whether a recorder knows so many interpreters of the program that has this argument."""
    known = 0
    for told in spooled(capture, FrameKind.INTERPRETER):
        with contextlib.suppress(OSError):
            known += argument in Path(f"/proc/{told['pid']}/cmdline").read_text().split("\0")
    return known >= times


def kill(*programs: subprocess.Popen[Any] | None) -> None:
    """Ends what a test that failed left."""
    for program in filter(None, programs):
        if program.poll() is None:
            program.kill()
            program.wait()


def frames_found(reader: CaptureReader) -> dict[int, list[Any]]:
    """File, name and line of each launch's frames of Python, the innermost first, by thread."""
    codes = {row["id"]: (row["file"], row["name"]) for row in reader.table("python_code").to_pylist()}
    stacks = {row["id"]: row for row in reader.table("stack").to_pylist()}
    found: dict[int, list[Any]] = defaultdict(list)
    for launch in sorted(reader.table("launch").to_pylist(), key=lambda row: row["time_ns"]):
        frames = stacks[launch["stack"]]["python"] or []
        found[launch["tid"]].append([(*codes.get(frame["code"], ("", "")), frame["line"]) for frame in frames])
    return found
