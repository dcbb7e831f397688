"""Frames of Python in stacks of launches, of interpreters as people have them: each is what sys._getframe tells."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture import CaptureReader
from integration.recording import environment, folded, iaprof
from pythons.interpreters import NAMES, started_as
from stacks.debugger import HERE
from standin import runtime
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf
ROUNDS = 10
PROGRAM = HERE / "python_launches.py"


def calls_library(folder: Path) -> Path:
    library, linked = folder / "libcalls.so", runtime.build().library
    words = ("cc", *runtime.COMMON, "-O2", "-fPIC", "-shared", f"-I{runtime.SOURCES}", HERE / "launching_calls.c")
    subprocess.run([*words, linked, f"-Wl,-rpath,{linked.parent}", "-o", library], check=True)
    return library


@pytest.mark.parametrize("name", NAMES)
def test_each_frame_is_what_the_interpreter_tells(tmp_path: Path, name: str) -> None:
    # given
    python, capture, told = started_as(name), tmp_path / "cap.parquet", tmp_path / "told"
    program = [*python, PROGRAM, calls_library(tmp_path), runtime.debug_elf("bmg", "matmul"), "multiply_basic", told]
    # when
    with Hardware(tmp_path / "gpu", "bmg") as hardware:
        done = iaprof("record", "-o", capture, "--", *program, str(ROUNDS), env=environment(hardware))
    assert done.code == 0, done.err
    # then, in the order in which each thread launched
    expected: dict[int, list[Any]] = defaultdict(list)
    for line in told.read_text().splitlines():
        tid, frames = line.split("\t")
        expected[int(tid)].append([tuple(frame) for frame in json.loads(frames)])
    found = recorded(CaptureReader(capture))
    assert {tid: len(each) for tid, each in found.items()} == {tid: len(each) for tid, each in expected.items()}
    launches = [launch for each in expected.values() for launch in each]
    assert len(launches) > 1000
    wrong = [
        (number, frames, wanted)
        for tid, each in expected.items()
        for number, (frames, wanted) in enumerate(zip(found[tid], each, strict=True))
        if frames != wanted
    ]
    # only another code object that exec made at the same address may be taken for one that was seen shortly before
    others = [each for each in wrong if all(file != "<made>" for file, *_ in each[2])]
    assert not others, json.dumps(others[:2], indent=1)
    assert len(wrong) < len(launches) / 20
    # and readers see them, callers above the library below
    shown = folded(capture)
    assert f"py::step:{PROGRAM};py::plain:{PROGRAM};" in shown


def recorded(reader: CaptureReader) -> dict[int, list[Any]]:
    """File, name and line of each launch's frames of Python, the innermost first, by thread."""
    codes = {row["id"]: (row["file"], row["name"]) for row in reader.table("python_code").to_pylist()}
    stacks = {row["id"]: row for row in reader.table("stack").to_pylist()}
    found: dict[int, list[Any]] = defaultdict(list)
    for launch in sorted(reader.table("launch").to_pylist(), key=lambda row: row["time_ns"]):
        frames = stacks[launch["stack"]]["python"] or []
        found[launch["tid"]].append([(*codes.get(frame["code"], ("", "")), frame["line"]) for frame in frames])
    return found
