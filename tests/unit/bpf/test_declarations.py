"""The BPF programs' declarations, which a C compiler compares with the dtypes that user space reads and writes."""

from __future__ import annotations

import itertools
import os
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from iaprof.bpf import loader, programs as module
from iaprof.bpf.bytecode import BytecodeError
from iaprof.bpf.loader import load
from iaprof.bpf.programs import PHASES, SAMPLE_PROGRAMS, check_maps, declarations, shipped, source
from iaprof.bpf.structs import ARG, LAYOUT, PYTHON, SPACE, Phase, pack
from iaprof.formats.wire.launches import PYTHON_OFFSETS, Counter, LaunchFlags

TYPES = "".join(
    f"typedef {'' if sign == 's' else 'un'}signed {name} {sign}{bits};\n"
    for sign, (name, bits) in itertools.product("su", (("char", 8), ("short", 16), ("int", 32), ("long", 64)))
)


def compiled(folder: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    text = "\n".join(["#include <stddef.h>", TYPES, declarations(), *lines, "int main(void) { return 0; }"])
    (folder / "declared.c").write_text(text)
    words = [os.environ.get("CC", "cc"), "-fsyntax-only", "declared.c"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


def members(dtype: np.dtype[np.void]) -> Iterator[tuple[str, int, int]]:
    """Yields name, offset and size in bytes of each member."""
    for name in dtype.names or ():
        yield name, dtype.fields[name][1], dtype[name].itemsize  # type: ignore[index]


def test_each_member_has_the_offset_and_size_of_its_dtype(tmp_path: Path) -> None:
    asserted = [
        f'_Static_assert(offsetof(struct {of}, {name}) == {at}{size}, "{of}.{name}");'
        for of, dtype in module._STRUCTS.items()
        for name, at, bytes_ in members(dtype)
        for size in [f" && sizeof(((struct {of} *)0)->{name}) == {bytes_}" if bytes_ else ""]
    ]
    assert len(asserted) > 150
    done = compiled(tmp_path, *asserted)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("wrong", ["offsetof(struct launch, iba) == 33", "sizeof(struct arg) == 15", "COUNTERS == 1"])
def test_wrong_declarations_do_not_compile(wrong: str, tmp_path: Path) -> None:
    assert "static assertion failed" in compiled(tmp_path, f'_Static_assert({wrong}, "");').stderr


def test_a_struct_to_which_c_adds_padding_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = np.dtype([("a", "u1"), ("b", "<u8")])
    monkeypatch.setitem(module._STRUCTS, "padded", padded)
    assert re.search("static assertion failed.*padded", compiled(tmp_path).stderr)


def test_enums_have_the_values_of_python_s(tmp_path: Path) -> None:
    told = {f"LAUNCH_{each.name}": each.value for each in LaunchFlags} | {each.name: each.value for each in Counter}
    told |= {"COUNTERS": len(Counter), "PHASES": len(Phase)}
    done = compiled(tmp_path, *(f'_Static_assert({name} == {value}, "{name}");' for name, value in told.items()))
    assert done.returncode == 0, done.stderr


def test_the_source_has_each_definition_once() -> None:
    text = source().text
    for name in module._STRUCTS:
        assert len(re.findall(rf"\bstruct {name} \{{", text)) == 1, name
    for name in module._ENUMS:
        assert len(re.findall(rf"\benum {name} \{{", text)) == 1, name


def test_tail_calls_lead_to_existing_programs_of_the_same_type() -> None:
    known = set(source().functions)
    for phases, programs in PHASES.items():
        assert set(programs.values()) <= known | {f"on_wait_{name.lower()}" for name in Phase.__members__}, phases
        assert {each in SAMPLE_PROGRAMS for each in programs.values()} == {phases == "sample_phases"}


def test_the_shipped_programs_maps_have_elements_of_these_sizes() -> None:
    check_maps(shipped())
    assert module._ELEMENTS.keys() <= shipped().maps.keys()


@pytest.mark.parametrize(("name", "change"), [("waits", {"value_bytes": 88}), ("wait_sites", {"key_bytes": 20})])
def test_programs_with_other_elements_are_not_loaded(
    name: str, change: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: object) -> int:
        raise AssertionError("a map was made")

    monkeypatch.setattr(loader, "create_map", made)
    good = shipped()
    other = good._replace(maps={**good.maps, name: good.maps[name]._replace(**change)})
    with pytest.raises(BytecodeError, match=f"in their map {name}, not of"):
        load(other, {}, {})


def test_packed_values_are_read_back_by_the_dtype() -> None:
    (arg,) = np.frombuffer(pack(ARG, -7, 3, 1, 2, 1, 32, True, 8), ARG)
    assert [arg[name] for name in ARG.names or () if name != "pad"] == [-7, 3, 1, 2, 1, 32, 1, 8]
    (space,) = np.frombuffer(pack(SPACE, 1, 2, 3, 4, 5, 54), SPACE)
    assert (space["of"].tolist(), int(space["number"]), int(space["shift"])) == ((1, 2, 3, 4), 5, 54)
    offsets = range(1, len(PYTHON_OFFSETS) + 1)
    (python,) = np.frombuffer(pack(PYTHON, 1 << 40, 1 << 63, 0, *offsets), PYTHON)
    assert [int(python["layout"][name]) for name in PYTHON_OFFSETS] == list(offsets)
    for values in ((), range(300), [-1] * 1000):
        with pytest.raises(struct.error):
            pack(LAYOUT, *values)
