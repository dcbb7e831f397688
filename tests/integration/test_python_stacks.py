"""Stacks through a real CPython: of one that was built with frame pointers and names its functions, and of another."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.symbols.unwind.file_code import read_prologues
from integration.recording import LAUNCH_FUNCTION, environment, folded, iaprof
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough, usually

pytestmark = pytest.mark.bpf
ROOT = Path(__file__).resolve().parents[2]
LAUNCHES = 40
PROGRAM = """\
import importlib.util, os, sys

_, module, told, launches = sys.argv
spec = importlib.util.spec_from_file_location("launching", module)
launching = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launching)


def step():
    launching.launch()


def train(steps):
    for _ in range(steps):
        step()


train(int(launches))
launching.wait()
with open(told, "w") as file:
    file.write(str(os.getpid()))
"""


@dataclass(frozen=True)
class Run:
    """A program in Python that was recorded."""

    capture: Path
    program: Path
    pid: str
    stacks: dict[tuple[str, ...], int]  # frames of the CPU, outermost first, and their samples


@pytest.fixture(scope="module")
def launching(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension module that launches."""
    output = tmp_path_factory.mktemp("module") / "launching.so"
    library = runtime.build().library
    source = runtime.SOURCES / "launching_module.c"
    flags = [*runtime.COMMON, "-std=gnu11", "-O2", "-fPIC", "-shared", f"-I{runtime.SOURCES}"]
    links = [str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", str(output), str(source), *links], check=True)
    return output


@pytest.fixture(scope="module")
def with_frame_pointers() -> Path:
    """A Python of its own, which is unpacked where the user's caches are when it is not there yet."""
    done = subprocess.run(
        [ROOT / "scripts" / "python-with-frame-pointers"], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(done.stdout.strip())


@pytest.fixture
def own_names() -> Iterator[list[Path]]:
    """Files to remove in the end: CPython leaves its perf map or jitdump where it is."""
    paths: list[Path] = []
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def run(folder: Path, python: Path, launching: Path, own_names: list[Path], *options: str) -> Run:
    """Records the program."""
    program, capture, told = folder / "program.py", folder / "cap.parquet", folder / "pid"
    program.write_text(PROGRAM)
    with Hardware(folder / "gpu", "bmg") as hardware:
        variables = {
            "LAUNCHING_ELF": str(runtime.debug_elf("bmg", "matmul")),
            "LAUNCHING_KERNEL": "multiply_basic",
        }
        words: list[str | Path] = ["--", python, *options, program, launching, told, str(LAUNCHES)]
        done = iaprof("record", "-o", capture, *words, env=environment(hardware) | variables)
    assert done.code == 0, done.err
    pid = told.read_text()
    own_names += [path for path in (Path(f"/tmp/perf-{pid}.map"), Path(f"/tmp/jit-{pid}.dump")) if path.exists()]
    launches = CaptureReader(capture).table("launch", ("pid",))["pid"].to_pylist()
    assert launches.count(int(pid)) == LAUNCHES
    return Run(capture, program, pid, stacks_of(folded(capture), pid))


def stacks_of(text: str, pid: str) -> dict[tuple[str, ...], int]:
    """The CPU's part of a process's folded stacks."""
    stacks: dict[tuple[str, ...], int] = {}
    for line in text.splitlines():
        stack, count = line.rsplit(" ", 1)
        _, owner, *frames = stack.split(";-;")[0].split(";")
        if owner == pid:
            stacks[tuple(frames)] = stacks.get(tuple(frames), 0) + int(count)
    assert stacks
    return stacks


@pytest.mark.parametrize(
    ("variable", "option", "kind"),
    usually([("", ("-X", "perf_jit"), ".dump")], [("1", (), ".map"), ("", ("-X", "perf_jit"), ".dump")]),
)
def test_functions_of_python_follow_one_another(
    tmp_path: Path,
    with_frame_pointers: Path,
    launching: Path,
    own_names: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    option: tuple[str, ...],
    kind: str,
) -> None:
    # given a Python that names its functions in a perf map or in a jitdump
    monkeypatch.setenv("PYTHONPERFSUPPORT", variable)
    # when
    recorded = run(tmp_path, with_frame_pointers, launching, own_names, *option)
    # then what stands before Python's functions is the C library's first one only: not the interpreter, and nothing
    # of what the walk met behind it
    python = [f"py::{name}:{recorded.program}" for name in ("<module>", "train", "step")]
    assert recorded.stacks
    for frames in recorded.stacks:
        begin = frames.index(python[0])
        assert all(re.fullmatch(r"\[libc\.so\.6\+0x[0-9a-f]+\]|__libc_start.*", frame) for frame in frames[:begin])
        assert list(frames[begin:]) == [*python, "launching_launch", "launch_kernel", LAUNCH_FUNCTION]
    # and when that file is gone, the capture still has the names; and the interpreter's frames, for who wants them
    assert [path.suffix for path in own_names] == [kind]
    own_names[0].unlink()
    assert stacks_of(folded(recorded.capture), recorded.pid) == recorded.stacks
    whole = stacks_of(iaprof("report", recorded.capture, "--no-hide-cpython").out, recorded.pid)
    assert whole
    for frames in whole:
        places = [frames.index(function) for function in python]
        assert all(later - earlier > 2 for earlier, later in pairwise(places))
        assert len(frames) > 15


@thorough
def test_a_python_without_frame_pointers_has_whole_stacks(
    tmp_path: Path, launching: Path, own_names: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # given the system's Python, which names no functions
    monkeypatch.delenv("PYTHONPERFSUPPORT", raising=False)
    python = Path("/usr/bin/python3").resolve()
    with python.open("rb") as file:
        prologues = read_prologues(file.fileno())
    assert prologues is not None
    assert not prologues.frame_pointers
    # when
    recorded = run(tmp_path, python, launching, own_names)
    # then stacks begin with the program's start, and all of their frames are frames
    whole = stacks_of(iaprof("report", recorded.capture, "--no-hide-cpython").out, recorded.pid)
    assert whole
    for frames in whole:
        assert frames[0] == "_start"
        assert list(frames[-3:]) == ["launching_launch", "launch_kernel", LAUNCH_FUNCTION]
        assert len(frames) > 10
        assert not any(frame.startswith("0x") for frame in frames)
