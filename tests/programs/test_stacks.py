# SPDX-License-Identifier: Apache-2.0
"""Stacks of real programs: all of them are whole and gdb's, from the first launch on, and that is said by number."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from programs.gdb import record_under_gdb
from programs.programs import LAUNCHES, LEVEL_ZERO_V1, LEVEL_ZERO_V2, OPENCL, Programs, Run
from programs.recording import Places, Recording, record

DPNP = {"dpnp-level-zero-v1": LEVEL_ZERO_V1, "dpnp-level-zero-v2": LEVEL_ZERO_V2, "dpnp-opencl": OPENCL}
PROGRAMS = (*DPNP, "pyopencl", "openvino", "clpeak")
LONGEST_CALL = 7  # bytes


def started(programs: Programs, name: str, folder: Path) -> Run:
    """One of PROGRAMS."""
    own = {"PROGRAMS_LEDGER": str(folder / "ledger")}
    if name == "clpeak":
        return programs.program("clpeak", "--global-bandwidth").with_settings(**own)
    if name in DPNP:
        return programs.python("with_dpnp.py", own | DPNP[name])
    return programs.python(f"with_{name}.py", own)


@pytest.fixture(scope="module", params=PROGRAMS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def recording(programs: Programs, name: str, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """One of PROGRAMS, which nothing but the recorder looked at."""
    folder = tmp_path_factory.mktemp(name)
    recording = record(programs, started(programs, name, folder), folder)
    assert recording.code == 0, recording.said
    return recording


def is_call(code: bytes) -> bool:
    """Whether a call instruction of x86-64 ends with these bytes: relative, or through a register or memory."""
    if code[-5:-4] == b"\xe8":
        return True
    for length in range(2, LONGEST_CALL + 1):
        opcode, modrm = code[-length : 2 - length or None]
        mode, register, base = modrm >> 6, modrm >> 3 & 7, modrm & 7
        sib = mode != 3 and base == 4
        displacement = {0: 4 if base == 5 else 0, 1: 1, 2: 4, 3: 0}[mode]
        if sib and mode == 0 and length > 2 and code[len(code) - length + 2] & 7 == 5:
            displacement = 4
        if opcode == 0xFF and register == 2 and length == 2 + sib + displacement:
            return True
    return False


def of_kernels(recording: Recording, other: Recording) -> Counter[tuple[str, Places]]:
    """Launches, by kernel and path, of the kernels that the other one has, too."""
    names = {name for name, _ in other.paths}
    return Counter({(name, path): count for (name, path), count in recording.paths.items() if name in names})


def test_stacks_are_gdb_s(programs: Programs, name: str, recording: Recording, tmp_path: Path) -> None:
    # given the same program under gdb
    with_gdb, stops = record_under_gdb(programs, started(programs, name, tmp_path), tmp_path)
    # then each launch has the stack that gdb saw there
    assert with_gdb.code == 0, with_gdb.said
    assert len(stops) == with_gdb.launches > 0
    in_threads = sorted(with_gdb.recorded, key=lambda launch: launch["tid"])
    for launch, stop in zip(in_threads, sorted(stops, key=lambda stop: stop.tid), strict=True):
        stack = with_gdb.stacks[launch["stack"]]
        assert (launch["tid"], stack["ips"], stack["ended"]) == (stop.tid, stop.pcs, "whole")
    # and without gdb each kernel was launched by the same paths as often; oneMKL may have multiplied by other kernels
    alone, common = of_kernels(recording, with_gdb), of_kernels(with_gdb, recording)
    assert alone == common
    assert common.total() > 0.5 * min(recording.launches, with_gdb.launches)


def test_the_first_launch_has_its_whole_stack(recording: Recording) -> None:
    first = recording.recorded[0]
    assert recording.stacks[first["stack"]]["ended"] == "whole"
    assert not first["flags"] & LaunchFlags.PRESUMED


def test_stacks(recording: Recording) -> None:
    # then each address of a stack, but where the probe was, is behind a call instruction of a file
    for path, offset in {where for _, each in recording.paths for where in each[1:]}:
        with open(path, "rb") as file:
            file.seek(offset - LONGEST_CALL)
            assert is_call(file.read(LONGEST_CALL)), f"{path}+{offset:#x}"
    # and it is said how many are whole, and where the others end
    (told,) = [part for part in recording.said.split("; ") if part.startswith("stacks: ")]
    ends = recording.info["stack_ends"]["launches"]
    assert told.startswith(f"stacks: {ends['whole']:,} of {ends['stacks']:,} launches (")
    assert recording.paths.total() == recording.launches
    assert ends["stacks"] == recording.all_paths.total()
    libraries: Counter[str] = Counter()
    for (_, each), count in recording.all_paths.items():
        libraries[Path(each[-1][0]).name] += count
    others = {end["library"]: end["count"] for end in ends["ends"]}
    assert ends["whole"] >= 0.999 * ends["stacks"]
    assert ends["guessed"] == 0
    assert ends["whole"] + sum(others.values()) == ends["stacks"]
    assert all(count <= libraries[library] for library, count in others.items())
    # and the innermost frame has the name of what the program called
    reader = CaptureReader(recording.capture)
    modules = {row["id"]: Path(row["path"]).name for row in reader.table("module").to_pylist()}
    functions = {
        (modules[row["module"]], row["address"]): row["function"] for row in reader.table("symbol").to_pylist()
    }
    innermost = {functions.get((Path(each[0][0]).name, each[0][1]), "") for _, each in recording.paths}
    assert innermost <= {name for names in LAUNCHES.values() for name in names}
