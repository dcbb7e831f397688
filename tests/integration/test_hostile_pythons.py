"""Processes that say they are CPython, and lie: what is recorded of them is bounded and marked."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture import CaptureReader
from iaprof.formats.launches import MAX_PYTHON
from iaprof.record.spool import FrameKind
from integration.recording import ended, folded, iaprof, spooled, start, until
from pythons.interpreters import HERE
from standin import runtime
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf
LAUNCHES = 50
INNER, OUTER = ("inner", 10), ("outer", 20)


@pytest.fixture(scope="module")
def like_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program."""
    output, linked = tmp_path_factory.mktemp("like") / "like_python", runtime.build().library
    words = ("cc", *runtime.COMMON, "-std=gnu11", "-O2", "-rdynamic", f"-I{runtime.SOURCES}")
    source = HERE / "programs" / "like_python.c"
    subprocess.run([*words, source, linked, f"-Wl,-rpath,{linked.parent}", "-o", output], check=True)
    return output


def recorded(folder: Path, program: Path, mode: str, times: int = LAUNCHES) -> CaptureReader:
    """A capture of the program, in which all of its launches are."""
    capture, go = folder / "cap.parquet", folder / "go"
    words = [program, runtime.debug_elf("bmg", "matmul"), "multiply_basic", mode, times, go]
    with Hardware(folder / "gpu", "bmg") as hardware:
        recorder = start(hardware, capture, "--", *map(str, words))
        try:
            until(lambda: spooled(capture, FrameKind.INTERPRETER), recorder)
            go.touch()
            ended(recorder, interrupt=False)
        finally:
            if recorder.poll() is None:
                recorder.kill()
                recorder.wait()
    reader = CaptureReader(capture)
    assert len(launches(reader)) == times
    assert iaprof("info", capture).code == 0
    return reader


def launches(reader: CaptureReader) -> list[dict[str, Any]]:
    names = {row["pid"] for row in reader.table("process").to_pylist() if row["comm"] == "like_python"}
    return [row for row in reader.table("launch").to_pylist() if row["pid"] in names]


def frames(reader: CaptureReader) -> Counter[tuple[str | None, tuple[tuple[str, int], ...]]]:
    """How Python ended, and names and first lines of its frames, the innermost first: by how many launches."""
    codes = {row["id"]: (row["name"], row["first_line"]) for row in reader.table("python_code").to_pylist()}
    stacks = {row["id"]: row for row in reader.table("stack").to_pylist()}
    found: Counter[tuple[str | None, tuple[tuple[str, int], ...]]] = Counter()
    for launch in launches(reader):
        stack = stacks[launch["stack"]]
        assert stack["ended"] == "whole"
        names = tuple(codes.get(frame["code"], ("", 0)) for frame in stack["python"] or ())
        found[stack["python_ended"], names] += 1
    return found


def test_who_tells_the_truth_is_believed(tmp_path: Path, like_python: Path) -> None:
    assert frames(recorded(tmp_path, like_python, "true")) == {("whole", (INNER, OUTER)): LAUNCHES}
    assert "py::outer:/fake.py;py::inner:/fake.py;zeCommandListAppendLaunchKernel" in folded(tmp_path / "cap.parquet")


@pytest.mark.parametrize("mode", ["million", "circle"])
def test_frames_without_an_end(tmp_path: Path, like_python: Path, mode: str) -> None:
    (((how, names), count),) = frames(recorded(tmp_path, like_python, mode)).items()
    assert (how, count) == ("deep", LAUNCHES)
    assert set(names) == {INNER, OUTER}
    assert MAX_PYTHON - 2 <= len(names) <= MAX_PYTHON


@pytest.mark.parametrize("mode", ["kernel", "unmapped", "odd"])
def test_frames_where_no_frame_is(tmp_path: Path, like_python: Path, mode: str) -> None:
    assert frames(recorded(tmp_path, like_python, mode)) == {("damaged", (INNER, OUTER)): LAUNCHES}


@pytest.mark.parametrize("mode", ["wrong type", "wrong table", "negative"])
def test_objects_that_are_none(tmp_path: Path, like_python: Path, mode: str) -> None:
    reader = recorded(tmp_path, like_python, mode)
    believed = () if mode != "wrong type" else (INNER,)
    assert frames(reader) == {("damaged", believed): LAUNCHES}
    assert any(row["what"] == "without Python" for row in reader.table("loss").to_pylist())


def test_code_objects_that_cannot_be_read(tmp_path: Path, like_python: Path) -> None:
    reader = recorded(tmp_path, like_python, "no code")
    assert frames(reader) == {("whole", (INNER, ("", 0))): LAUNCHES}
    assert any(row["what"] == "without names" and row["count"] for row in reader.table("loss").to_pylist())


@pytest.mark.parametrize("mode", ["endless text", "long table"])
def test_objects_without_an_end(tmp_path: Path, like_python: Path, mode: str) -> None:
    (((how, names), count),) = frames(recorded(tmp_path, like_python, mode)).items()
    assert (how, count, names[0]) == ("whole", LAUNCHES, INNER)
    assert names[1][0].startswith("outer")
    assert len(names[1][0]) < 400


@pytest.mark.parametrize("mode", ["circle of threads", "circle of interpreters"])
def test_threads_without_an_end(tmp_path: Path, like_python: Path, mode: str) -> None:
    assert frames(recorded(tmp_path, like_python, mode)) == {(None, ()): LAUNCHES}


def test_frames_that_change_while_they_are_read(tmp_path: Path, like_python: Path) -> None:
    """Whatever is read then: the launches and their native stacks are whole, and nothing is beyond its bounds."""
    reader = recorded(tmp_path, like_python, "changing", 20_000)
    found = frames(reader)
    assert all(len(names) <= MAX_PYTHON for _, names in found)
    assert os.path.getsize(tmp_path / "cap.parquet") < 50 << 20
    assert "zeCommandListAppendLaunchKernel" in folded(tmp_path / "cap.parquet")
