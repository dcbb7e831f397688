"""Processes that say they are CPython, and lie: what is recorded of them is bounded and marked."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from iaprof.formats.wire.launches import MAX_PYTHON
from integration.pythons import PROGRAMS, Recording
from integration.recording import IN_TURN, folded, iaprof
from pythons.frames import launches_of
from standin import runtime
from thorough import thorough, usually
from waiting import until

pytestmark = [pytest.mark.bpf, IN_TURN]  # or others' recordings would have these processes' losses
LAUNCHES, CHANGING = 50, 20_000
MODES = (
    *("true", "million", "circle", "kernel", "unmapped", "odd", "wrong type", "wrong table", "negative", "no code"),
    *("endless text", "long table", "circle of threads", "circle of interpreters", "changing"),
)
INNER, OUTER = ("inner", 10), ("outer", 20)
Names = tuple[tuple[str, int], ...]


class Lies:
    """One recording of like_python.c in all modes."""

    def __init__(self, folder: Path) -> None:
        program, linked = folder / "like_python", runtime.build().library
        words = ("cc", *runtime.COMMON, "-std=gnu11", "-O2", "-rdynamic", f"-I{runtime.SOURCES}")
        source = PROGRAMS / "like_python.c"
        subprocess.run([*words, source, linked, f"-Wl,-rpath,{linked.parent}", "-o", program], check=True)
        self._pids = {}
        # The programs stay until the recording is over: at its end it finishes stacks whose code it had not read yet.
        with contextlib.ExitStack() as programs, Recording(folder) as recording:
            for mode in MODES:
                times, go = CHANGING if mode == "changing" else LAUNCHES, folder / mode
                told = (runtime.debug_elf("bmg", "matmul"), "multiply_basic", mode, times, go)
                process = programs.enter_context(recording.started([str(program), *map(str, told)]))
                programs.callback(process.kill)
                recording.let_go(process, go)
                until(lambda go=go: not go.exists(), process)  # type: ignore[misc]
                self._pids[mode] = process.pid
        self.reader, self.capture = recording.reader, recording.capture
        losses = self.reader.table("loss").to_pylist()
        self.losses = {row["what"]: row["count"] for row in losses if row["source"] == "stacks"}
        self._codes = {
            row["id"]: (row["name"], row["first_line"]) for row in self.reader.table("python_code").to_pylist()
        }

    def frames(self, mode: str) -> Counter[tuple[str | None, Names]]:
        """How Python ended, and names and first lines of its frames, the innermost first: by how many launches."""
        found: Counter[tuple[str | None, Names]] = Counter()
        unfinished = 0
        for _, stack in launches_of(self.reader, self._pids[mode]):
            assert stack["ended"] in ("whole", "unfinished")
            unfinished += stack["ended"] == "unfinished"
            names = tuple(self._codes.get(frame["code"], ("", 0)) for frame in stack["python"] or ())
            found[stack["python_ended"], names] += 1
        assert found.total() == (CHANGING if mode == "changing" else LAUNCHES)
        # a recorder that is busy with so many launches may not have room for all, and says so
        assert unfinished <= (self.losses.get("not copied", 0) if mode == "changing" else 0)
        return found


@pytest.fixture(scope="module")
def lies(tmp_path_factory: pytest.TempPathFactory) -> Lies:
    return Lies(tmp_path_factory.mktemp("lies"))


@thorough
def test_who_tells_the_truth_is_believed(lies: Lies) -> None:
    assert lies.frames("true") == {("whole", (INNER, OUTER)): LAUNCHES}
    assert "py::outer:/fake.py;py::inner:/fake.py;zeCommandListAppendLaunchKernel" in folded(lies.capture)


@pytest.mark.parametrize("mode", usually(["circle"], ["million", "circle"]))
def test_frames_without_an_end(lies: Lies, mode: str) -> None:
    (((how, names), count),) = lies.frames(mode).items()
    assert (how, count) == ("deep", LAUNCHES)
    assert set(names) == {INNER, OUTER}
    assert MAX_PYTHON - 2 <= len(names) <= MAX_PYTHON


@pytest.mark.parametrize("mode", ["kernel", "unmapped", "odd"])
def test_frames_where_no_frame_is(lies: Lies, mode: str) -> None:
    assert lies.frames(mode) == {("damaged", (INNER, OUTER)): LAUNCHES}


@pytest.mark.parametrize("mode", ["wrong type", "wrong table", "negative"])
def test_objects_that_are_none(lies: Lies, mode: str) -> None:
    believed = () if mode != "wrong type" else (INNER,)
    assert lies.frames(mode) == {("damaged", believed): LAUNCHES}


def test_code_objects_that_cannot_be_read(lies: Lies) -> None:
    assert lies.frames("no code") == {("whole", (INNER, ("", 0))): LAUNCHES}


def test_what_is_not_believed_or_not_read_is_said(lies: Lies) -> None:
    assert lies.losses["without Python"] >= 3
    info = iaprof("info", lies.capture).out
    assert "without Python" in info
    assert lies.reader.header["python_stacks"]["launches"]["unnamed"] >= LAUNCHES


@pytest.mark.parametrize("mode", ["endless text", "long table"])
def test_objects_without_an_end(lies: Lies, mode: str) -> None:
    (((how, names), count),) = lies.frames(mode).items()
    assert (how, count, names[0]) == ("whole", LAUNCHES, INNER)
    assert names[1][0].startswith("outer")
    assert len(names[1][0]) < 400


@pytest.mark.parametrize("mode", ["circle of threads", "circle of interpreters"])
def test_threads_without_an_end(lies: Lies, mode: str) -> None:
    assert lies.frames(mode) == {(None, ()): LAUNCHES}


def test_frames_that_change_while_they_are_read(lies: Lies) -> None:
    """Whatever is read then: no launch is lost, no native stack damaged, and nothing is beyond its bounds."""
    found = lies.frames("changing")
    assert len(found) > 1
    assert all(len(names) <= MAX_PYTHON for _, names in found)
    assert {(name[:5], line) for _, names in found for name, line in names} <= {
        INNER,
        OUTER,
        ("inner", 20),
        ("", 20),
        ("", 0),
    }
    assert os.path.getsize(lies.capture) < 50 << 20
