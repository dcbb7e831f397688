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
from iaprof.record.spool import FrameKind
from integration.recording import LONGEST_WAIT_S, ended, environment, folded, spooled, start, until
from pythons.interpreters import NAMES, started_as
from stacks.debugger import HERE
from standin import runtime
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf
ROUNDS = 10
PROGRAM = HERE / "python_launches.py"
MADE = ("<made>", "<string>")  # files of code objects of exec and eval


def calls_library(folder: Path) -> Path:
    library, linked = folder / "libcalls.so", runtime.build().library
    words = ("cc", *runtime.COMMON, "-O2", "-fPIC", "-shared", f"-I{runtime.SOURCES}", HERE / "launching_calls.c")
    subprocess.run([*words, linked, f"-Wl,-rpath,{linked.parent}", "-o", library], check=True)
    return library


@pytest.mark.parametrize("is_running", [False, True], ids=["started by the recorder", "running"])
@pytest.mark.parametrize("name", NAMES)
def test_each_frame_is_what_the_interpreter_tells(tmp_path: Path, name: str, is_running: bool) -> None:
    # given
    python, capture, told, go = started_as(name), tmp_path / "cap.parquet", tmp_path / "told", tmp_path / "go"
    words = [calls_library(tmp_path), runtime.debug_elf("bmg", "matmul"), "multiply_basic", told, ROUNDS, go]
    program = [*python, str(PROGRAM), *map(str, words)]
    # when
    with Hardware(tmp_path / "gpu", "bmg") as hardware:
        running = subprocess.Popen(program, env=os.environ | environment(hardware)) if is_running else None
        recorder = start(hardware, capture, *(() if running else ("--", *program)))
        try:
            until(lambda: is_known(capture, str(told)), recorder)
            go.touch()
            if running is not None:
                assert running.wait(LONGEST_WAIT_S) == 0
            ended(recorder, interrupt=is_running)
        finally:
            kill(running, recorder)
    # then, in the order in which each thread launched
    expected: dict[int, list[Any]] = defaultdict(list)
    for line in told.read_text().splitlines():
        tid, frames = line.split("\t")
        expected[int(tid)].append([tuple(frame) for frame in json.loads(frames)])
    found = recorded(CaptureReader(capture), {*expected})
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
    shown = folded(capture)
    assert f"py::step:{PROGRAM};py::plain:{PROGRAM};" in shown


def is_known(capture: Path, argument: str) -> bool:
    """Whether a recorder knows the interpreter of the program that has this argument."""
    for told in spooled(capture, FrameKind.INTERPRETER):
        with contextlib.suppress(OSError):
            if argument in Path(f"/proc/{told['pid']}/cmdline").read_text().split("\0"):
                return True
    return False


def kill(*programs: subprocess.Popen[Any] | None) -> None:
    """Ends what a test that failed left."""
    for program in filter(None, programs):
        if program.poll() is None:
            program.kill()
            program.wait()


def recorded(reader: CaptureReader, threads: set[int]) -> dict[int, list[Any]]:
    """File, name and line of each launch's frames of Python, the innermost first, by thread of these."""
    codes = {row["id"]: (row["file"], row["name"]) for row in reader.table("python_code").to_pylist()}
    stacks = {row["id"]: row for row in reader.table("stack").to_pylist()}
    found: dict[int, list[Any]] = defaultdict(list)
    launches = (row for row in reader.table("launch").to_pylist() if row["tid"] in threads)
    for launch in sorted(launches, key=lambda row: row["time_ns"]):
        frames = stacks[launch["stack"]]["python"] or []
        found[launch["tid"]].append([(*codes.get(frame["code"], ("", "")), frame["line"]) for frame in frames])
    return found
