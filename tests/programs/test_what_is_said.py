# SPDX-License-Identifier: Apache-2.0
"""What a recording of real programs says of itself, and the exit code that it ends with."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from iaprof.formats.capture.reader import CaptureReader
from programs.programs import LEVEL_ZERO_V1, Programs, Run
from programs.recording import LONGEST, record

FAILURES = ("no-device", "aborts", "usage")


def failing(programs: Programs, how: str) -> Run:
    """dpnp without a GPU that it may use, and with a selector that makes SYCL abort; clpeak with an unknown option."""
    if how == "usage":
        return programs.program("clpeak", "--nonsense")
    selector = {"no-device": "cuda:gpu", "aborts": "nonsense"}[how]
    return programs.python("with_dpnp.py", {"ONEAPI_DEVICE_SELECTOR": selector})


@pytest.mark.parametrize("how", FAILURES)
def test_the_exit_code_is_the_program_s(programs: Programs, how: str, tmp_path: Path) -> None:
    # given
    run = failing(programs, how)
    words, environment = run.started(tmp_path)
    alone = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, timeout=LONGEST)
    assert alone.returncode
    # when
    recording = record(programs, run, tmp_path)
    # then
    assert recording.code == (alone.returncode if alone.returncode > 0 else 128 - alone.returncode)
    assert recording.recorded == []


def test_a_library_that_sees_no_launch_is_told(programs: Programs, tmp_path: Path) -> None:
    """clpeak is started by system(), which passes what --launches=inject puts into a program by."""
    clpeak = programs.program("clpeak", "--global-bandwidth").with_settings(PROGRAMS_LEDGER=str(tmp_path / "ledger"))
    script = "import os, sys; sys.exit(os.waitstatus_to_exitcode(os.system(sys.argv[1])))"
    run = replace(clpeak, words=[sys.executable, "-c", script, shlex.join(clpeak.words)])

    recording = record(programs, run, tmp_path, "--launches=inject")

    assert recording.code == 0
    assert recording.launches > 0
    assert recording.recorded == []
    stalls = recording.info["counts"]["stalls"]
    assert stalls > 0
    told = (
        f"no launch was seen, though process {recording.pid} mapped libigdrcl.so and {stalls:,} stall records came: "
        "the program may not have loaded the library that iaprof puts into it, or it does not call the driver through "
        "the OpenCL loader; try --launches=attach"
    )
    assert told in recording.said
    assert told in " ".join(recording.told("info").split())


@pytest.mark.parametrize("own_root", [False, True], ids=["our-root", "its-own-root"])
def test_libraries_without_a_build_id_are_named(programs: Programs, own_root: bool, tmp_path: Path) -> None:
    """Those of oneAPI, which are on the stack of each launch of dpnp."""
    # given
    libraries = ("libsycl.so.9", "libur_adapter_level_zero.so.0")
    for library in libraries:
        words = ["readelf", "--notes", str(programs.folder / "usr/local/lib" / library)]
        assert "Build ID" not in subprocess.run(words, capture_output=True, text=True, check=True).stdout
    run = programs.python("with_dpnp.py", {})
    if own_root:
        run = programs.in_its_own_root(tmp_path, "python3.14", script="with_dpnp.py")
    # when
    recording = record(programs, run.with_settings(**LEVEL_ZERO_V1), tmp_path)
    # then
    assert recording.code == 0
    for _, path in recording.paths:
        assert {Path(file).name for file, _ in path} >= set(libraries)
    rows = CaptureReader(recording.capture).table("module").to_pylist()
    named = {Path(row["path"]).name: (row["build_id"], bool(row["source"]), row["problem"]) for row in rows}
    assert {library: named.get(library) for library in libraries} == dict.fromkeys(libraries, (None, True, ""))
    ends = recording.info["stack_ends"]["launches"]
    assert ends["whole"] == ends["stacks"] == len(recording.recorded) > 0
