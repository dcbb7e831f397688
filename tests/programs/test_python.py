# SPDX-License-Identifier: Apache-2.0
"""Functions of Python in the stacks of a large program: dpnp's own tests, in an interpreter as Debian makes it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture.reader import CaptureReader
from programs.programs import LEVEL_ZERO_V2, Programs
from programs.recording import Recording, record

FILES = ("test_sort.py", "test_statistics.py")
LEAST = 0.999  # of the launches
LAUNCHES, PATHS = 5000, 1000


@pytest.fixture(scope="module")
def recording(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("dpnp-tests")
    run = programs.python("with_dpnp_tests.py", LEVEL_ZERO_V2, *(programs.dpnp_tests / name for name in FILES))
    recording = record(programs, run, folder)
    assert recording.code == 0, recording.said
    return recording


def python_of(recording: Recording) -> dict[int, tuple[tuple[str, str, int], ...]]:
    """File, name and line of each stack's frames of Python, the innermost first."""
    codes = {
        row["id"]: (row["file"], row["name"])
        for row in CaptureReader(recording.capture).table("python_code").to_pylist()
    }
    return {
        number: tuple((*codes.get(frame["code"], ("", "")), frame["line"]) for frame in stack["python"] or ())
        for number, stack in recording.stacks.items()
    }


def test_every_launch_was_recorded(recording: Recording) -> None:
    assert len(recording.recorded) == recording.launches > LAUNCHES


def test_stacks_pass_through_pytest_and_the_test(recording: Recording) -> None:
    python, what = python_of(recording), Counter[str]()
    for launch in recording.recorded:
        frames, stack = python[launch["stack"]], recording.stacks[launch["stack"]]
        what[problem(recording, stack, frames)] += 1
    assert what[""] >= LEAST * len(recording.recorded), what
    assert len({launch["stack"] for launch in recording.recorded}) > PATHS
    assert len({python[launch["stack"]] for launch in recording.recorded}) > PATHS / 4


def problem(recording: Recording, stack: dict[str, Any], frames: tuple[tuple[str, str, int], ...]) -> str:
    """What is wrong with a stack; nothing if it is as it has to be."""
    if stack["ended"] != "whole":
        return f"it is {stack['ended']}"
    if stack["python_ended"] != "whole" or not all(name and line for _, name, line in frames):
        return f"its Python is {stack['python_ended']}, or a frame has no name or line"
    if frames[-1][1] != "<module>" or Path(frames[-1][0]).name != "with_dpnp_tests.py":
        return f"it does not begin in the program, but in {frames[-1]}"
    if not any("/_pytest/" in file for file, _, _ in frames):
        return "it does not pass through pytest"
    if not any(Path(file).name in FILES and "test_" in name for file, name, _ in frames):
        return "it does not pass through a test"
    if "libze_intel_gpu" not in recording.place(stack["ips"][0])[0]:
        return "it does not end in the driver"
    return ""
