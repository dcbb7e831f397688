# SPDX-License-Identifier: Apache-2.0
"""Layouts of Vulkan drivers as files, and invalid answers of the process that calibrates one."""

import dataclasses
import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile

import elf_sections
from iaprof.bpf.driver_layout import (
    MAX_BOUND_OFFSET,
    MAX_ENTRIES,
    Action,
    Entry,
    Field,
    Layout,
    LayoutError,
    Operations,
)
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.bpf.probes.packed_layout import packed_entry, packed_layout
from iaprof.bpf.structs import ENTRY, LAYOUT
from iaprof.record.calibrate import calibrate
from iaprof.record.calibrate.code import Code, Problem
from iaprof.record.calibrate.vulkan import VulkanAnswer, read_vulkan, vulkan_layout
from iaprof.record.calibrate.vulkan_driver import window

WINDOW = (0x2_0000_0000, 0xC000_0000)
LAYOUT_26 = Layout(
    build_id="65357002cea32750",
    driver="vulkan",
    version="26.2.6",
    entries=(
        Entry("vkCmdDispatchBase", Action.LAUNCH, 0x30AE34, 0),
        Entry("vkCmdDraw", Action.DRAW, 0x3195D9, 0),
        Entry("vkDestroyPipeline", Action.SHADER_GONE, 0x53C8D7, 1),
        Entry("vkCmdExecuteCommands", Action.INCLUDE, 0x2F3A04, 2, 1),
        Entry("vkQueueSubmit2", Action.SUBMIT, 0x515520, 2, 1),
        Entry("blorp_exec", Action.OPERATION, 0x2E50F4, 1),
    ),
    address=(Field((0xB8,), bits=32),),
    size=Field((0xC0,), bits=32),
    code=Field((0xB0,)),
    name=None,
    allocation=None,
    kernel_class=Field((0x40,)),
    classes=(0x1A0EF40,),
    window=WINDOW,
    bound=(0xC260,),
    pipeline=0xB0,
    drawn=(0x5A00,),
    stages=(0xAF8, 0x58),
    kind=(0x48, 1, 0),
    stage=0x48,
    simd=0xD0,
    operations=Operations(0x48, 0x774, 0x790, 0x1C, 0, ((0, "blorp blit"), (1, "blorp copy"), (30, "blorp clear"))),
)


MANY_RETURNS = """
int other(int *a);
int f(int *a, int b) { int big[300]; if (b == 0xC3C3C3) return other(big) + 0xC3; a[b] = 0x11C3; if (a[3]) return a[4];
    other(a); switch (b) { case 1: other(big); return 0xC3; case 2: return other(a + 1) ^ 0xC3C3; } return other(big); }
"""


@pytest.mark.parametrize("level", ["-O0", "-O1", "-O2", "-O3", "-Os"])
def test_returns_of_a_function_are_those_of_objdump(level: str, tmp_path: Path) -> None:
    # given: a function with bytes 0xC3 in instructions, too
    library = tmp_path / "l.so"
    (tmp_path / "l.c").write_text(MANY_RETURNS)
    subprocess.run(["cc", level, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "l.c")], check=True)
    text = subprocess.run(["objdump", "-d", "--disassemble=f", str(library)], capture_output=True, text=True).stdout
    instructions = [line.split("\t") for line in text.splitlines() if line.count("\t") >= 2]
    returns = {int(at.rstrip(":"), 16) for at, _, name, *_ in instructions if name.strip() == "ret"}
    assert sum("c3" in code for _, code, *_ in instructions) > len(returns) > 0
    # then
    with library.open("rb") as file:
        elf = LibraryFile(file)
        (start,) = {int(line.split()[0], 16) for line in text.splitlines() if line.endswith("<f>:")}
        found = Code(elf, file).returns(elf.offset(start, executable=True))
    assert found and set(found) <= returns


@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None])
def test_a_file_without_call_frames_has_no_returns(damage: bytes | None, tmp_path: Path) -> None:
    library = tmp_path / "l.so"
    (tmp_path / "l.c").write_text(MANY_RETURNS)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-fno-asynchronous-unwind-tables", "-o", str(library), str(tmp_path / "l.c")],
        check=True,
    )
    with library.open("rb") as file:
        code = Code(LibraryFile(file), file)
        place = next(segment.offset for segment in code.elf.loads if segment.flags & 1)
        other = tmp_path / "other"
        other.write_bytes(library.read_bytes() if damage is None else damage)
        with other.open("rb") as changed:
            assert Code(code.elf, changed).returns(place) == []


def test_a_layout_is_as_it_was_written() -> None:
    assert Layout.from_json(LAYOUT_26.to_json()) == LAYOUT_26
    assert LAYOUT_26.has_lists and not LAYOUT_26.has_own_kernels
    assert LAYOUT_26.has_operations
    packed = packed_layout(LAYOUT_26)
    assert len(packed) == LAYOUT.itemsize
    at = LAYOUT.fields["operation_names"][1] if LAYOUT.fields else 0
    names = [packed[at + 16 * number : at + 16 * number + 16].rstrip(b"\0").decode() for number in range(32)]
    assert (names[0], names[1], names[30]) == ("blorp blit", "blorp copy", "blorp clear")
    assert {*names[2:30], names[31]} == {"blorp"}, "the last one is that of all numbers from there on"
    assert {len(packed_entry(LAYOUT_26, entry, 0)) for entry in LAYOUT_26.entries} == {ENTRY.itemsize}


def test_a_layout_with_mesh_shaders_has_their_stages() -> None:
    meshed = dataclasses.replace(LAYOUT_26, mesh=True)
    assert Layout.from_json(meshed.to_json()) == meshed != LAYOUT_26
    stages = [np.frombuffer(packed_layout(each), LAYOUT)["stage_count"][0] for each in (LAYOUT_26, meshed)]
    assert stages == [5, 8]


OPERATIONS: dict[str, Any] = {"function": 72, "kernel": 8, "data": 16, "size": 28, "kind": 0, "names": [[0, "blorp"]]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": None},
        {"window": [0, 1]},
        {"window": [WINDOW[0] + 4096, 4096]},
        {"window": [1 << 48, 4096]},
        {"window": [WINDOW[0], 0]},
        {"window": [WINDOW[0], (1 << 32) + 1]},
        {"window": [WINDOW[0]]},
        {"bound": []},
        {"bound": [8, 8, 8]},
        {"bound": [MAX_BOUND_OFFSET + 1]},
        {"bound": [-8]},
        {"bound": ["8"]},
        {"drawn": []},
        {"drawn": [8, 8, 8]},
        {"drawn": [MAX_BOUND_OFFSET + 1]},
        {"stages": [8]},
        {"stages": [8, 1 << 16]},
        {"kind": [8, 1]},
        {"operations": None},
        {"operations": {"function": 8}},
        *(
            {"operations": OPERATIONS | other}
            for other in (
                {"kernel": 1 << 16},
                {"data": -8},
                {"names": [[31, "blorp"]]},
                {"names": [[-1, "blorp"]]},
                {"names": [[0, ""]]},
                {"names": [[0, "a" * 16]]},
                {"names": [[0, "a\nb"]]},
                {"names": [[0]]},
            )
        ),
        {"kind": [-8, 1, 0]},
        {"pipeline": -8},
        {"pipeline": 1 << 16},
        {"address": [{"path": [8], "bits": 32}] * 2},
        {"module": {"path": [8], "bits": 64}},
    ],
    ids=str,
)
def test_an_invalid_layout_is_refused(wrong: dict[str, Any]) -> None:
    told = json.loads(LAYOUT_26.to_json()) | wrong
    if "module" in wrong:
        told["entries"].append({**told["entries"][0], "action": "module-gone"})
    with pytest.raises(LayoutError):
        Layout.from_json(json.dumps(told))


@pytest.mark.parametrize("action", [Action.LAUNCH_MANY, Action.OWN_LAUNCH, Action.TRANSFER_UNKNOWN, Action.WAIT])
def test_functions_of_other_drivers_are_refused(action: Action) -> None:
    count = 1 if action is Action.LAUNCH_MANY else None
    entry = Entry("zeCommandListAppendImageCopy", action, 0x1000, 0, count)
    with pytest.raises(LayoutError):
        Layout.from_json(dataclasses.replace(LAYOUT_26, entries=(*LAYOUT_26.entries, entry)).to_json())


def test_what_ends_a_shader_must_be_known() -> None:
    entries = tuple(entry for entry in LAYOUT_26.entries if entry.action is not Action.SHADER_GONE)
    with pytest.raises(LayoutError):
        Layout.from_json(dataclasses.replace(LAYOUT_26, entries=entries).to_json())


DEVICE: dict[str, Any] = {
    "name": "BMG",
    "version": "26.2.6",
    "functions": {"vkCmdDispatchBase": 1, "vkDestroyPipeline": 2},
    "forwarding": [],
    "window": WINDOW,
    "pipeline": 0xB0,
    "start": 0xB8,
    "size": 0xC0,
    "code": 0xB0,
    "class": (0x40, 3),
    "simd": 0xD0,
    "bound": [[0xC260]],
}

FOUND: dict[str, Any] = OPERATIONS | {"names": [[0, "copy"], [4, "blit"]], "places": [1, 2]}


@pytest.mark.parametrize(
    "told",
    [
        [],
        {},
        {"devices": 7},
        {"devices": [{}]},
        *({"devices": [{key: value for key, value in DEVICE.items() if key != missing}]} for missing in DEVICE),
        {"devices": [DEVICE | {"window": [math.inf, 1]}]},
        {"devices": [DEVICE | {"window": [1]}]},
        {"devices": [DEVICE | {"functions": {"vkCmdDispatchBase": -1}}]},
        {"devices": [DEVICE | {"class": [8, 1 << 60]}]},
        {"devices": [DEVICE | {"bound": [[None]]}]},
        {"devices": [DEVICE | {"drawn": 7}]},
        {"devices": [DEVICE | {"stages": [8]}]},
        {"devices": [DEVICE | {"kind": [8, None, 1]}]},
        {"devices": [DEVICE | {"operations": {}}]},
        {"devices": [DEVICE | {"operations": FOUND | {"names": [[1, "Copy\n"]]}}]},
        {"devices": [DEVICE | {"operations": FOUND | {"places": [1]}}]},
        {"devices": [DEVICE | {"operations": FOUND | {"places": [-1, 1]}}]},
        {"devices": [DEVICE | {"operations": FOUND | {"size": math.inf}}]},
    ],
    ids=lambda told: str(told)[:60],
)
def test_nonsense_in_an_answer_is_refused(told: object) -> None:
    assert calibrate._read({"devices": [DEVICE]}, read_vulkan)
    with pytest.raises(Problem, match="its answer makes no sense"):
        calibrate._read(told, read_vulkan)


def test_devices_without_a_result_are_named() -> None:
    answers, left_out = read_vulkan({"devices": [DEVICE, {"name": "LNL\x1b[2J", "problem": "no\nway"}]})
    assert list(answers) == ["BMG"]
    assert left_out == {"LNL\\x1b[2J": "no\\x0away"}
    with pytest.raises(Problem, match="it cannot be loaded"):
        read_vulkan({"problem": "it cannot be loaded"})


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> tuple[Code, dict[str, int]]:
    """A library with functions for two generations of GPUs, and the places in its file."""
    folder = tmp_path_factory.mktemp("library")
    names = ("vkCmdDispatchBase", "second", "vkDestroyPipeline", "vkQueueSubmit2")
    (folder / "l.c").write_text("void *table[2] = {table};\n" + "".join(f"void {name}(void) {{}}\n" for name in names))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "l.so", folder / "l.c"], check=True)
    file = (folder / "l.so").open("rb")
    symbols = ELFFile(file)
    places = {}
    for name in (*names, "table"):
        (places[name],) = symbols.address_offsets(elf_sections.symbol(symbols, name)["st_value"])
    return Code(LibraryFile(file), file), places


def answers(code: tuple[Code, dict[str, int]], *devices: dict[str, Any]) -> Sequence[VulkanAnswer]:
    """The answers of devices that differ from the first one in these members."""
    places = code[1]
    functions = {name: places[name] for name in ("vkCmdDispatchBase", "vkDestroyPipeline", "vkQueueSubmit2")}
    first = DEVICE | {"functions": functions, "class": (0x40, places["table"])}
    told = [first | {"name": str(number)} | device for number, device in enumerate(devices)]
    return list(read_vulkan({"devices": told})[0].values())


def test_a_layout_has_the_functions_of_all_devices(code: tuple[Code, dict[str, int]]) -> None:
    places = code[1]
    second = {"functions": {"vkCmdDispatchBase": places["second"], "vkDestroyPipeline": places["vkDestroyPipeline"]}}
    layout, *_ = vulkan_layout("ab" * 8, code[0], answers(code, {}, second))
    names = [entry.name for entry in layout.entries]
    assert names == ["vkCmdDispatchBase", "vkCmdDispatchBase", "vkDestroyPipeline", "vkQueueSubmit2"]
    assert layout.bound == (0xC260,)


def test_a_function_that_only_calls_another_has_no_probe(code: tuple[Code, dict[str, int]]) -> None:
    functions = {**answers(code, {})[0].functions, "vkCmdDispatch": code[1]["second"]}
    for forwarding, count in (["vkCmdDispatch"], 0), ([], 1):
        told = {"functions": functions, "forwarding": forwarding}
        layout, *_ = vulkan_layout("ab" * 8, code[0], answers(code, told))
        assert [entry.name for entry in layout.entries].count("vkCmdDispatch") == count


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"start": 8}, "0 and 1 do not have their shaders in the same way"),
        ({"window": (WINDOW[0], 4096)}, "0 and 1 do not have their shaders in the same way"),
        ({"bound": [[8]]}, "devices disagree on how a command buffer leads to its bound shader"),
        ({"class": (0x40, 0)}, "do not have their shaders in the same way"),
    ],
    ids=str,
)
def test_devices_must_agree(code: tuple[Code, dict[str, int]], other: dict[str, Any], why: str) -> None:
    with pytest.raises(Problem, match=why):
        vulkan_layout("ab" * 8, code[0], answers(code, {}, other))


DRAWS: dict[str, Any] = {"drawn": [[8], [0x5A00]], "stages": (0xAF8, 0x58), "kind": (0x48, 1, 0)}


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (
            DRAWS | {"drawn": [[16]]},
            "devices disagree on how a command buffer leads to the shaders with which it draws",
        ),
        (DRAWS | {"stages": (8, 8)}, "devices disagree on how a command buffer leads"),
        (DRAWS | {"kind": (0x48, 2, 0)}, "devices disagree on how a command buffer leads"),
        ({"no_draws": "no way"}, "as 1, no way"),
    ],
    ids=str,
)
def test_without_agreement_on_draws_dispatches_are_recorded_alone(
    code: tuple[Code, dict[str, int]], other: dict[str, Any], why: str
) -> None:
    functions = {**answers(code, {})[0].functions, "vkCmdDraw": code[1]["second"]}
    both = {"functions": functions}
    layout, no_draws, _ = vulkan_layout("ab" * 8, code[0], answers(code, both | DRAWS, both | DRAWS))
    assert (layout.has_draws, layout.drawn, no_draws) == (True, (8,), "")
    layout, no_draws, _ = vulkan_layout("ab" * 8, code[0], answers(code, both | DRAWS, both | other))
    assert (layout.has_draws, layout.drawn, layout.stages) == (False, (), (0, 0))
    assert no_draws.startswith(why)
    assert [entry.name for entry in layout.entries] == ["vkCmdDispatchBase", "vkDestroyPipeline", "vkQueueSubmit2"]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"operations": {"kernel": 8}}, "devices disagree on how its operations lead to their kernels"),
        ({"operations": None, "no_own": "no\nway"}, "as 1, no\\x0away"),
        ({"operations": None}, "as 1, its copies are unknown"),
    ],
    ids=str,
)
def test_without_agreement_on_its_own_operations_these_are_not_recorded(
    code: tuple[Code, dict[str, int]], other: dict[str, Any], why: str
) -> None:
    found = FOUND | {"kernel": 16, "places": [code[1]["second"], code[1]["vkQueueSubmit2"]]}
    second = other | {"operations": found | other["operations"] if other["operations"] else None}
    layout, _, no_own = vulkan_layout("ab" * 8, code[0], answers(code, {"operations": found}, {"operations": found}))
    assert (layout.has_operations, no_own) == (True, "")
    assert layout.operations
    assert layout.operations.names == ((0, "blorp copy"), (4, "blorp blit"))
    layout, _, no_own = vulkan_layout("ab" * 8, code[0], answers(code, {"operations": found}, second))
    assert (layout.has_operations, layout.operations) == (False, None)
    assert no_own == why


@pytest.mark.parametrize("name", ["vkCmdDispatchBase", "vkDestroyPipeline"])
def test_what_is_missing_is_named(code: tuple[Code, dict[str, int]], name: str) -> None:
    functions = {key: place for key, place in answers(code, {})[0].functions.items() if key != name}
    with pytest.raises(Problem, match=f"it has no {name}"):
        vulkan_layout("ab" * 8, code[0], answers(code, {"functions": functions}))


def test_what_is_no_code_gets_no_probe(code: tuple[Code, dict[str, int]]) -> None:
    functions = dict(answers(code, {})[0].functions) | {"vkCmdDispatchBase": code[1]["table"]}
    with pytest.raises(Problem, match="in no segment of code"):
        vulkan_layout("ab" * 8, code[0], answers(code, {"functions": functions}))


def test_the_number_of_entries_is_limited(code: tuple[Code, dict[str, int]]) -> None:
    entry = LAYOUT_26.entries[0]
    with pytest.raises(LayoutError):
        Layout.from_json(dataclasses.replace(LAYOUT_26, entries=(entry,) * (MAX_ENTRIES + 1)).to_json())


def test_the_range_of_shaders_is_what_the_driver_prints() -> None:
    line = b"0x0000000200000000-0x00000002c0000000: "
    before = b"0x00000002c0000000-0x0000000300000000: dynamic_state_pool\n"
    for printed in (b"MESA-INTEL: info:    " + line + b"shader_heap\n", b"   " + line + b"instruction_state_pool\n"):
        assert window(before + printed) == WINDOW
    assert window(before) is window(b"") is None
    assert window(line + b"shader_heap\n" + line.replace(b"2", b"3") + b"shader_heap\n") == (
        WINDOW[0] + (1 << 32),
        WINDOW[1],
    )


def test_a_layout_file_that_users_can_change_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from iaprof.bpf import driver_layout

    monkeypatch.setattr(driver_layout, "CACHE", tmp_path)
    path = tmp_path / f"{LAYOUT_26.build_id}.json"
    path.write_text(LAYOUT_26.to_json())
    assert driver_layout.find_layout(LAYOUT_26.build_id) == LAYOUT_26
    path.chmod(0o666)
    with pytest.raises(LayoutError, match="not trusted"):
        driver_layout.find_layout(LAYOUT_26.build_id)
