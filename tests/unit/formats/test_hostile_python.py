"""Frames of Python in captures from strangers: nonsense is harmless or one sentence, whatever there is of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.formats.header.stack_counts import DEEPEST, NO_CODE
from limits import Within
from thorough import thorough, usually
from unit.capturing import HEADER, capture, launch, record, stall
from unit.formats.test_hostile_captures import reports
from unit.in_process import Done, iaprof

A = 0x8000_0001_0000
LONG = "x" * (1 << 14)
LARGEST = {"code": (1 << 32) - 1, "line": (1 << 32) - 1, "at": (1 << 16) - 1}
CODE = {"id": 0, "name": "train", "file": "/srv/train.py", "first_line": 3}


def rows(*frames: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    """A stall whose launch has a stack of two addresses and these frames."""
    stack = {"id": 11, "time_ns": 1, "pid": 7, "truncated": False, "ips": [0x1010, 0x1021], "ended": "whole",
             "marks": None, "python": list(frames), "python_ended": "whole"}  # fmt: skip
    return {
        "stall": [stall(9, record(A, sbid=3))],
        "launch": [launch(2, 7, A, 11, name="k")],
        "stack": [stack | more],
        "mapping": [{"time_ns": 0, "pid": 7, "start": 0x1000, "length": 0x9000, "offset": 0, "path": "/x",
                     "build_id": None}],
        "python_code": [CODE],
    }  # fmt: skip


def frame(code: int = 0, line: int = 1, at: int = 1) -> dict[str, int]:
    return {"code": code, "line": line, "at": at}


def shown(path: Path, *words: str) -> str:
    """The stack that has the three samples."""
    done = iaprof("report", path, "-q", "--frames", "cpu", *words)
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith(" 3\n")
    return done.out.removesuffix(" 3\n")


@pytest.mark.parametrize("member", LARGEST)
def test_absurd_numbers(tmp_path: Path, member: str) -> None:
    for value in (0, 1, 2, LARGEST[member] >> 1, LARGEST[member] - 1, LARGEST[member]):
        path = capture(tmp_path / "c", **rows(frame() | {member: value}))
        found = reports(path)["folded"]
        assert found.count("py::") == 1
        assert found.endswith(" 3\n")
        name = "py::[unknown]" if member == "code" and value else "py::train:/srv/train.py"
        assert name in found


@pytest.mark.parametrize("member", LARGEST)
def test_a_frame_without_a_member(tmp_path: Path, member: str) -> None:
    path = capture(tmp_path / "c", **rows(frame(), frame() | {member: None}))
    with pytest.raises(CaptureError, match="column 'python' has nulls"):
        CaptureReader(path).table("stack")
    done = iaprof("report", path)
    assert done.code == 1
    assert done.err.startswith(f"iaprof: {path} is damaged in its stack rows: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("member", KINDS["python_code"].names)
def test_a_code_object_without_a_member(tmp_path: Path, member: str) -> None:
    path = capture(tmp_path / "c", **(rows(frame()) | {"python_code": [CODE | {member: None}]}))
    done = iaprof("report", path)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert f"column '{member}' has nulls" in done.err


def test_a_stack_of_frames_without_addresses(tmp_path: Path) -> None:
    for ended in ("whole", None):
        path = capture(tmp_path / "c", **rows(frame(), frame(5), ips=[], ended=ended))
        assert shown(path).endswith("py::[unknown];py::train:/srv/train.py")
        assert shown(path, "--python", "train")


@pytest.mark.parametrize("header", [HEADER, HEADER | {"stack_ends": {}}], ids=["with strays", "cut"])
def test_an_end_that_is_none_is_not_whole(tmp_path: Path, header: dict[str, Any]) -> None:
    for ended in ("nonsense", "", None):
        path = capture(tmp_path / "c", header, **rows(frame(), python_ended=ended, ended=None))
        assert "0 of 3 samples with Python functions (0.0 %) have all of them, 3 damaged" in iaprof("report", path).err


def test_several_code_objects_of_one_number_are_the_first(tmp_path: Path) -> None:
    codes = [CODE | {"name": name} for name in ("first", "second")]
    path = capture(tmp_path / "c", **(rows(frame()) | {"python_code": codes}))
    assert "py::first:" in shown(path)


def test_what_is_called_as_no_code_object_is_none(tmp_path: Path) -> None:
    path = capture(tmp_path / "c", **(rows(frame(NO_CODE)) | {"python_code": [CODE | {"id": NO_CODE}]}))
    assert "py::[unknown]" in shown(path)
    assert "3 without a name" in iaprof("report", path).err


def test_names_stay_in_their_place(tmp_path: Path) -> None:
    evil = "a;b\n\x1b[2J\u202e"
    codes = [CODE | {"name": evil, "file": evil}, CODE | {"id": 1, "name": "", "file": ""}]
    path = capture(tmp_path / "c", **(rows(frame(), frame(1)) | {"python_code": codes}))
    (line,) = shown(path, "--lines").splitlines()
    assert line.isprintable()
    assert line.split(";") == ["py::[unknown]", "py::a:b\\x0a\\x1b[2J\\u202e:a:b\\x0a\\x1b[2J\\u202e:1", "[x+0x10]"]
    for text in reports(path).values():
        assert "\x1b" not in text
        assert "\u202e" not in text


# Very many


def lists(lengths: list[int], **members: Any) -> pa.Array:
    """A column `python` with so many frames in each row."""
    count = sum(lengths)
    type_ = KINDS["stack"].field("python").type
    given = {"code": np.zeros(count, np.uint32), "line": np.ones(count, np.uint32), "at": np.ones(count, np.uint16)}
    frames = pa.StructArray.from_arrays([pa.array(each) for each in (given | members).values()], list(given))
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, frames.cast(type_.value_type), type=type_)


def capture_of(path: Path, python: pa.Array, **kinds: pa.StructArray) -> Path:
    """A capture with a stack, a launch and a stall for each row of a column `python`."""
    number = np.arange(len(python), dtype=np.uint64)
    one = rows(id=0)
    with path.open("wb") as file:
        writer = CaptureWriter(file)
        for kind in ("stack", "launch", "stall"):
            columns = {name: [value] * len(python) for name, value in one[kind][0].items()}
            if kind == "stack":
                columns |= {"id": pa.array(number + np.uint64(11)), "python": python}
            elif kind == "launch":
                columns |= {"address": pa.array(A + number * 64), "stack": pa.array(number + np.uint64(11))}
            else:
                columns |= {"w0": [stall(9, record(A + 64 * n, sbid=3))["w0"] for n in number.tolist()]}
            fields = list(KINDS[kind])
            arrays = [pa.array(columns[f.name], f.type) if isinstance(columns[f.name], list) else columns[f.name]
                      for f in fields]  # fmt: skip
            writer.write(kind, pa.StructArray.from_arrays(arrays, fields=fields))
        given = {kind: pa.array(one[kind], KINDS[kind]) for kind in ("mapping", "python_code")} | kinds
        for kind, of_kind in given.items():
            writer.write(kind, of_kind)
        writer.close(HEADER)
    return path


def test_of_a_million_frames_so_many_are_read_as_a_stack_can_have(tmp_path: Path, within: Within) -> None:
    count = 1_000_000
    path = capture_of(tmp_path / "c", lists([count], at=np.arange(count, dtype=np.uint32).astype(np.uint16)))
    with within(10):
        assert shown(path).count("py::train") == DEEPEST
    path = capture_of(tmp_path / "c", lists([count]))
    with within(10):
        assert shown(path).count("py::train") == DEEPEST


@pytest.fixture(scope="module")
def of_one_name(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 GB of names in a small file, of which a stack needs two."""
    count = 1_000_000
    texts = pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), pa.array([LONG]))
    codes = pa.StructArray.from_arrays(
        [np.arange(count, dtype=np.uint32), texts, texts, np.ones(count, np.uint32)],
        fields=[f.with_type(texts.type) if f.name in ("name", "file") else f for f in KINDS["python_code"]],
    )
    path = tmp_path_factory.mktemp("names") / "c"
    capture_of(path, lists([3], code=np.array([5, 5, 7], np.uint32)), python_code=codes)
    assert path.stat().st_size < 8_000_000
    return path


def test_a_million_code_objects_of_one_long_name_take_little_memory(of_one_name: Path, within: Within) -> None:
    with within(10):
        done = limited("report", str(of_one_name), "-q", "--frames", "cpu")
    assert (done.code, done.err) == (0, "")
    assert done.out.count(f"py::{LONG}:{LONG}") == 3


@pytest.mark.parametrize("verb", usually(["query"], ["archive", "merge", "query"]))
def test_they_are_copied_and_asked_for_with_little_memory(
    of_one_name: Path, tmp_path: Path, within: Within, verb: str
) -> None:
    output, other = tmp_path / "out", capture(tmp_path / "other", HEADER | {"part": 9}, **rows(frame()))
    asked = "SELECT count(*), max(length(name)) FROM python_codes"
    words = {
        "archive": ("--redact", "-o", str(output)),
        "merge": (str(other), "-o", str(output)),
        "query": (asked, "--format", "csv"),
    }
    with within(20):
        done = limited(verb, str(of_one_name), *words[verb])
    assert done.code == 0, done.err
    if verb == "query":
        assert done.out.splitlines()[-1] == f"1000000,{len(LONG)}"
    else:
        assert output.stat().st_size < 8_000_000
        assert sum(part.count("python_code") for part in CaptureReader(output).parts) >= 1_000_000
        tables = (table for part in CaptureReader(output).parts for table in part.tables("python_code"))
        names = {name for table in tables for chunk in table["name"].chunks for name in chunk.dictionary.to_pylist()}
        assert (LONG in names) == (verb == "merge")


@thorough
def test_many_stacks_of_very_many_frames_take_little_time_and_memory(tmp_path: Path, within: Within) -> None:
    # given five million frames, of which a fifth is read
    count = 1000
    path = capture_of(tmp_path / "c", lists([5_000] * count))
    with within(30):
        done = limited("report", str(path), "-q", "--frames", "cpu")
    assert (done.code, done.err) == (0, "")
    (line,) = done.out.splitlines()
    assert line.endswith(f" {3 * count}")
    assert line.count("py::train") == DEEPEST


def limited(*words: str) -> Done:
    """Runs the command with little memory, of which the kernel sees to it that it takes no more."""
    command = [sys.executable, "-m", "iaprof", *words, "--memory-limit", "1G"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    return Done(done.returncode, done.stdout, done.stderr)
