# SPDX-License-Identifier: Apache-2.0
"""Stacks of real programs: no frame in them is false, and what is missing is said by number."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture import CaptureReader
from programs.programs import LAUNCHES, LEVEL_ZERO_V1, LEVEL_ZERO_V2, Programs, Run
from programs.recording import Recording, record

PROGRAMS = ("dpnp-level-zero-v1", "dpnp-level-zero-v2", "openvino", "clpeak")
LONGEST_CALL = 7  # bytes


def started(programs: Programs, name: str, folder: Path) -> Run:
    """One of PROGRAMS."""
    own = {"PROGRAMS_LEDGER": str(folder / "ledger")}
    if name == "clpeak":
        return programs.program("clpeak", "--global-bandwidth").with_settings(**own)
    if name == "openvino":
        return programs.python("with_openvino.py", own)
    return programs.python("with_dpnp.py", own | (LEVEL_ZERO_V1 if name.endswith("v1") else LEVEL_ZERO_V2))


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


def stacks(recording: Recording) -> list[tuple[int, list[int]]]:
    """Launches of each stack that the program's launches have, and its addresses, the innermost first."""
    launches = Counter(row["stack"] for row in recording.recorded)
    rows: list[dict[str, Any]] = CaptureReader(recording.capture).table("stack").to_pylist()
    return [(launches[row["id"]], row["ips"]) for row in rows if row["id"] in launches]


def place(mappings: list[dict[str, Any]], address: int) -> tuple[str, int]:
    """The file that was mapped there, and where in it; an empty name where nothing was."""
    for row in mappings:
        if row["start"] <= address < row["start"] + row["length"]:
            return row["path"], address - row["start"] + row["offset"]
    return "", 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_stacks(programs: Programs, name: str, tmp_path: Path) -> None:
    # when
    recording = record(programs, started(programs, name, tmp_path), tmp_path)
    # then each address of a stack, but where the probe was, is behind a call instruction of a file
    assert recording.code == 0, recording.said
    found, mappings = stacks(recording), recording.table("mapping")
    places = [[place(mappings, address) for address in addresses] for _, addresses in found]
    for path, offset in {where for each in places for where in each[1:]}:
        with open(path, "rb") as file:
            file.seek(offset - LONGEST_CALL)
            assert is_call(file.read(LONGEST_CALL)), f"{path}+{offset:#x}"
    # and it is said how many reach the program's start, and where the others end
    (told,) = [part for part in recording.said.split("; ") if part.startswith("stacks: ")]
    ends = recording.info["stack_ends"]["launches"]
    assert told.startswith(f"stacks: {ends['whole']:,} of {ends['stacks']:,} launches (")
    assert ends["stacks"] == sum(count for count, _ in found) == recording.launches
    libraries: Counter[str] = Counter()
    for (count, _), each in zip(found, places, strict=True):
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
    innermost = {functions.get((Path(each[0][0]).name, each[0][1]), "") for each in places}
    assert innermost <= {name for names in LAUNCHES.values() for name in names}
