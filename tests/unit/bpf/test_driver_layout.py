# SPDX-License-Identifier: Apache-2.0
"""Driver layouts as files, places of probes in functions, and invalid answers to `iaprof calibrate`."""

import dataclasses
import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from elftools.elf.elffile import ELFFile

import elf_sections
from iaprof.bpf import driver_layout
from iaprof.bpf.driver_layout import (
    MAX_ENTRIES,
    MAX_PATH,
    SHIPPED,
    Action,
    Entry,
    Field,
    Layout,
    LayoutError,
    find_layout,
    known_builds,
)
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.bpf.probes.packed_layout import packed_layout
from iaprof.record.calibrate import calibrate
from iaprof.record.calibrate.answer import Answer
from iaprof.record.calibrate.code import Code, Problem, probe_offset
from iaprof.record.calibrate.level_zero import read_level_zero
from iaprof.record.calibrate.opencl import OpenCLAnswer, _handle_path, read_opencl
from iaprof.record.calibrate.opencl_own import HandlePath
from iaprof.record.calibrate.opencl_search import growing

SHIPPED_FILES = sorted(SHIPPED.glob("*.json"))


@pytest.fixture
def layout() -> Layout:
    return Layout.from_json(SHIPPED_FILES[0].read_bytes())


@pytest.mark.parametrize("path", SHIPPED_FILES, ids=lambda path: path.stem[:8])
def test_each_shipped_layout_is_found_by_its_build_id(path: Path) -> None:
    found = find_layout(path.stem)

    assert found and found.build_id == path.stem
    assert Layout.from_json(found.to_json()) == found
    assert {entry.action for entry in found.entries} >= {Action.LAUNCH, Action.KERNEL_GONE}


@pytest.mark.parametrize(
    "wrong",
    [
        {"build_id": "../../etc/passwd"},
        {"entries": []},
        {"classes": []},
        {"classes": list(range(9))},
        {"address": []},
        {"size": {"path": [], "bits": 32}},
        {"size": {"path": [8] * (MAX_PATH + 1), "bits": 32}},
        {"size": {"path": [-8], "bits": 32}},
        {"size": {"path": [8], "bits": 16}},
        {"size": {"path": ["8"], "bits": 32}},
        {"binary": None},
        {"module_bias": -8},
        {"dispatch": {"first": 8, "many": 1, "size": -1, "kernel": [0, 0]}},
        {"dispatch": {"first": 8, "many": 1, "size": 8, "kernel": [0]}},
        {"dispatch": None},
        {"gpu": {"path": [8, 8], "bits": 32}},
        {"gpu": {"path": [8, 8, 8], "bits": 64}},
        {"size": {"path": [8, 8], "bits": 32, "per_gpu": [8]}},
        {"size": {"path": [8, 8], "bits": 32, "per_gpu": [0, -8]}},
        {"code_range": [1]},
        {"code_range": None},
        {"name": None},
    ],
    ids=str,
)
def test_an_invalid_layout_is_refused(layout: Layout, wrong: dict[str, object]) -> None:
    told = json.loads(layout.to_json()) | wrong

    with pytest.raises(LayoutError):
        Layout.from_json(json.dumps(told))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '"layout"', "[" * 100_000, "\0"], ids=lambda text: text[:9])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.from_json(text)


def test_an_array_of_kernels_needs_its_length(layout: Layout) -> None:
    entry = Entry("many", Action.LAUNCH_MANY, 0x1000, handle=2)

    with pytest.raises(LayoutError):
        Layout.from_json(dataclasses.replace(layout, entries=(*layout.entries, entry)).to_json())


@pytest.mark.parametrize("action", [Action.KERNEL_GONE, Action.MODULE_GONE])
def test_a_layout_must_say_what_ends_a_handle(layout: Layout, action: Action) -> None:
    entries = tuple(entry for entry in layout.entries if entry.action is not action)

    with pytest.raises(LayoutError):
        Layout.from_json(dataclasses.replace(layout, entries=entries).to_json())


def test_paths_with_too_many_steps_in_total_are_refused(layout: Layout) -> None:
    long, another, third = (Field((offset,) * MAX_PATH) for offset in (8, 16, 24))
    wide = dataclasses.replace(layout, kernel_class=long, address=(another,))

    assert len(packed_layout(wide)) == len(packed_layout(layout))
    with pytest.raises(LayoutError, match="steps together"):
        packed_layout(dataclasses.replace(wide, address=(another, third)))


def test_calibrated_layouts_are_found_and_shipped_ones_take_precedence(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_layout, "CACHE", tmp_path)
    monkeypatch.setattr(calibrate, "CACHE", tmp_path)
    calibrated = dataclasses.replace(layout, build_id=layout.build_id[::-1], version="calibrated")

    stored = calibrate.store(calibrated, None)
    calibrate.store(dataclasses.replace(layout, version="calibrated"), None)

    assert stored.parent == tmp_path and stored.stat().st_mode & 0o777 == 0o644
    assert find_layout(calibrated.build_id) == calibrated
    assert find_layout(layout.build_id) == layout
    assert find_layout("../" + calibrated.build_id) is None
    stored.write_text("{}")
    with pytest.raises(LayoutError, match="remove it"):
        find_layout(calibrated.build_id)


def test_others_may_enter_the_folders_of_calibrated_layouts(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "CACHE", tmp_path / "iaprof" / "layouts")
    before = os.umask(0o077)
    try:
        stored = calibrate.store(layout, None)
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in (stored.parent, stored.parent.parent)] == [0o755, 0o755]


def given_away(path: Path) -> None:
    os.chown(path, 65534, 0)


def writable(path: Path) -> None:
    path.chmod(0o666)


def writable_by_a_group(path: Path) -> None:
    path.chmod(0o664)


def no_file(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.root
@pytest.mark.parametrize("spoil", [given_away, writable, writable_by_a_group, no_file])
def test_a_layout_that_others_could_have_changed_is_refused(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(driver_layout, "CACHE", tmp_path)
    calibrated = dataclasses.replace(layout, build_id=layout.build_id[::-1])
    path = tmp_path / f"{calibrated.build_id}.json"
    path.write_text(calibrated.to_json())
    assert calibrated.build_id in known_builds()

    spoil(path)

    with pytest.raises(LayoutError, match="users other than root and you can change it"):
        find_layout(calibrated.build_id)
    assert calibrated.build_id not in known_builds() and layout.build_id in known_builds()


# How zeCommandListAppendLaunchKernelWithParameters, ...WithArguments and zexCommandListAppendVariableLaunchKernel
# begin in NEO's 1.15.39122.
PARAMETERS = (
    "f30f1efa 4883ec78 48896c2450 4889742408 6448 8b2c2528000000 48896c2438 488bac2480000000 4885ff 0f8447010000"
)
ARGUMENTS = (
    "f30f1efa 4881ecc8000000 4889c8 48899c2498000000 8b9c24e8000000 4889ac24a0000000 488bac24f0000000 "
    "4c89a424a8000000 4c8ba424e0000000 4c89b424b8000000 4c8bb424d0000000 4c89bc24c0000000 4c8bbc24d8000000 48893424 "
    "4889542430 894c2438 4c89442420 44894c2428 64488b0c2528000000 48898c2488000000 31c9 4885ff 0f84d0010000"
)
VARIABLE = (
    "f30f1efa 4883ec78 4889742408 4889542410 48890c24 448944241c 64488b042528000000 4889442438 31c0 4885ff 0f8406030000"
)
# zeCommandQueueExecuteCommandLists of the same.
EXECUTE = (
    "f30f1efa 4883ec38 660fefc0 64488b042528000000 4889442428 31c0 48c7042400000000 c644241801 0f11442408 4885ff "
    "0f84ed99e0ff"
)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("f30f1efa 4157", 4),  # endbr64; push %r15
        ("4157", 0),
        ("f30f1efa 4885ff 0f8440010000", 7),  # test %rdi,%rdi; je
        ("f30f1efa 4d85c0 7402", 7),  # test %r8,%r8; je
        ("f30f1efa e900000000", 4),
        ("f30f1efa 90", 4),
        ("f30f1efa 4883ec78 55", 8),  # sub $0x78,%rsp; push %rbp
        (PARAMETERS, 0x2B),
        (ARGUMENTS, 0x8A),
        (VARIABLE, 0x2E),
        (EXECUTE, 0x31),
        ("440f578424 90", 0),  # no xorps of two registers
        ("4883ec18 450f57c0 440f29442410 c7442404ffffffff 90", 22),  # xorps %xmm8; movaps to 16(%rsp); movl to 4(%rsp)
        ("4883ec18 0f298424 10000000 90", 12),
        ("4883ec18 48896c2408 4883ec20 31ed 90", 15),  # rsp changes after rbp was saved
        ("4883ec18 4889e8 4c89c9 4d89c7 90", 13),  # mov to %rax, of %r9 to %rcx, of %r8 to %r15
        ("4883ec18 8d442408 488d442410 90", 13),  # lea 8(%rsp),%eax; lea 16(%rsp),%rax
    ],
)
def test_a_probe_goes_where_the_kernel_emulates_and_what_it_reads_is_there(code: str, expected: int) -> None:
    assert probe_offset(bytes.fromhex(code), {0, 1}) == expected


@pytest.mark.parametrize(
    "code",
    [
        "",
        "f30f1efa 488507 7402",  # test of memory
        "f30f1efa 48c7c100000000 90",
        "f30f1efa ff2500000000",  # jmp through memory
        "f30f1efa 4885ff 48ff",
        "4889fe 90",  # mov %rdi,%rsi
        "488bfe 90",  # the same of %rsi,%rdi, encoded the other way round
        "31ff 90",
        "4883ec18 488b742408 90",
        "4883ec18 8b3c24 90",
        "4883ec18 488d7c2408 90",  # lea 8(%rsp),%rdi
        "64488b3c2528000000 90",  # mov %fs:0x28,%rdi
        "4889c4 90",  # mov %rax,%rsp
        "4883ec18 488b2424 90",  # mov (%rsp),%rsp
        "4883ec18 488d642408 90",  # lea 8(%rsp),%rsp
        "4883ec80 90",  # sub $-128,%rsp
        "4881ec00000080 90",
        "4883e4f0 90",  # and $-16,%rsp
        "4883c418 90",  # add
        "4883ec18 48890424 488945f8 90",  # mov %rax,-8(%rbp)
        "4883ec18 4889 04f4 90",  # mov %rax,(%rsp,%rsi,8)
        "4883ec18 4a89 0424 90",  # mov %rax,(%rsp,%r12)
        "4883ec18 4989 0424 90",  # mov %rax,(%r12)
        "4883ec18 410f110424 90",  # movups %xmm0,(%r12)
        "4883ec18 0f1104f4 90",  # movups %xmm0,(%rsp,%rsi,8)
        "4883ec18 0f110424",  # and nothing behind it
        "4883ec18 49c7042400000000 90",  # movq $0,(%r12)
        "4883ec18 c74500 00000000 90",  # movl $0,0(%rbp)
        "4883ec18 660f6fc6",
    ],
)
def test_no_probe_goes_behind_what_may_change_what_it_reads(code: str) -> None:
    assert probe_offset(bytes.fromhex(code), {0, 1}) == 0


# How the destructor of a kernel begins in OpenCL's 26.27.39122.
DESTRUCTOR = (
    "f30f1efa 4883ec28 488d0511b27700 48891c24 488d9fa0000000 48896c2408 4889fd 4c896c2418 4989dd 4c89642410 488907 "
    "488b8798000000 4839d8 7412"
)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (DESTRUCTOR, 60),
        ("488945f8 90", 4),  # mov %rax,-8(%rbp)
        ("4839f7 90", 3),  # cmp %rsi,%rdi
        ("488b3f 90", 0),  # mov (%rdi),%rdi
        ("488d3d00000000 90", 0),  # lea 0(%rip),%rdi
        ("488d7f10 90", 0),  # lea 16(%rdi),%rdi
        ("4889c7 90", 0),  # mov %rax,%rdi
        ("498903 90", 3),  # mov %rax,(%r11)
        ("4c8b1f 90", 3),  # mov (%rdi),%r11
        ("a840 90", 2),  # test $64,%al
        ("48890487 90", 0),  # mov %rax,(%rdi,%rax,4)
        ("48890425 00000000 90", 0),
        ("4c8b2424 90", 4),
        ("488b2424 90", 0),  # mov (%rsp),%rsp
        ("488907", 0),
    ],
)
def test_what_is_in_memory_may_change_where_only_an_argument_is_needed(code: str, expected: int) -> None:
    assert probe_offset(bytes.fromhex(code), {0}, keeps_memory=False) == expected


def test_paths_may_grow_with_the_number_of_the_gpu() -> None:
    found = [
        [((8, 160), (8, 168)), ((8, 0), (8, 8)), ((16, 4), (16, 12))],
        [((8, 400), (8, 408)), ((8, 0), (8, 8)), ((16, 0), (16, 8))],  # the last goes back
        [((8, 640), (8, 648)), ((8, 0), (8, 8)), ((8, 900), (8, 908))],
    ]

    assert growing(found) == [((8, 0), (8, 8), (0, 0)), ((8, 160), (8, 168), (0, 240))]


def test_other_arguments_may_be_gone() -> None:
    # xor %edx,%edx; xor %esi,%esi; nop
    assert [probe_offset(bytes.fromhex("31d2 31f6 90"), needed) for needed in ({0}, {0, 1}, {0, 2})] == [4, 0, 0]


@pytest.mark.parametrize(
    ("code", "at"),
    [
        (
            # sub $72,%rsp; mov 16(%rsi),%rax; pxor; xor %esi,%esi; movaps, movq, mov, movdqa, movups of the stack; call
            "4883ec48 488b4610 660fefc0 31f6 0f29442420 48c744241000000000 4889442428 660f6f442420 0f110424 e8",
            43,
        ),
        # mov 96(%rsi),%rcx; mov 88(%rsi),%rax; add %rdx,%rcx; mov %rax,%rsi; mov %rcx,%rdx; xor %ecx,%ecx; jmp
        ("488b4e60 488b4658 4801d1 4889c6 4889ca 31c9 e9", 19),
        ("4801f7 90", 0),  # add %rsi,%rdi
    ],
)
def test_what_arguments_point_to_may_be_read_before_the_probe(code: str, at: int) -> None:
    prologue = bytes.fromhex(f"f30f1efa {code}")
    assert probe_offset(prologue, {0}, keeps_memory=False) == (at + 4 if at else 0)
    assert probe_offset(prologue, {0}) == 0


OF_HANDLES = {kind: {"functions": [1, 2], "bias": 16} for kind in ("Kernel", "Program")}
ANSWER: dict[str, Any] = {"version": "1", "functions": {}, "candidates": {}, "gone": OF_HANDLES}
_Answer = TypeVar("_Answer", bound=Answer)


@pytest.mark.parametrize(
    "told",
    [
        [],
        {},
        {"version": "1", "functions": {}},
        {"version": "1", "functions": {"zeKernelDestroy": "x"}, "candidates": {}},
        {"version": "1", "functions": {}, "candidates": {"module": [[[8]]]}},
        {"version": "1", "functions": {}, "candidates": {"size": [[[]]]}},
        {"version": "1", "functions": {}, "candidates": {"size": [7]}},
        {"version": "1", "functions": {}, "candidates": []},
        ANSWER | {"functions": {"zeModuleDestroy": math.inf, "clFinish": math.inf}},
        ANSWER | {"functions": {"zeModuleDestroy": -1, "clFinish": -1}},
    ],
    ids=str,
)
@pytest.mark.parametrize("read", [read_level_zero, read_opencl])
def test_nonsense_in_an_answer_is_refused(read: Callable[[Any], Answer], told: object) -> None:
    assert calibrate._read(ANSWER, read)
    with pytest.raises(Problem, match="its answer makes no sense"):
        calibrate._read(told, read)


@pytest.mark.parametrize("own", [[math.inf], [1 << 63], [-1], [1] * (MAX_ENTRIES + 1)], ids=lambda own: str(own[:1]))
def test_places_that_no_file_has_are_nonsense(own: list[Any]) -> None:
    def answer(places: list[Any], read: Callable[[Any], _Answer]) -> _Answer:
        of_level_zero = read is read_level_zero
        return calibrate._read(ANSWER | {"own": [[at, 0, 0, 0] if of_level_zero else at for at in places]}, read)

    assert [place.address for place in answer([1], read_level_zero).own] == [1] == list(answer([1], read_opencl).own)
    for read in (read_level_zero, read_opencl):
        with pytest.raises(Problem, match="its answer makes no sense"):
            answer(own, read)


def test_what_is_no_call_gets_no_probe(tmp_path: Path) -> None:
    """Given a library with one function, and a process that claims that a call is at its beginning."""
    (tmp_path / "one.c").write_text("int one(void) { return 1; }")
    subprocess.run(["cc", "-shared", "-o", tmp_path / "one.so", tmp_path / "one.c"], check=True)
    with (tmp_path / "one.so").open("rb") as file:
        elf = LibraryFile(file)
        symbols = ELFFile(file)
        (place,) = symbols.address_offsets(elf_sections.symbol(symbols, "one")["st_value"])
        with pytest.raises(Problem, match="a call where there is none"):
            Code(elf, file).call(place)


def opencl_answer(**told: object) -> OpenCLAnswer:
    """A process's answer with only what concerns the driver's own kernels."""
    return read_opencl(ANSWER | told)


def test_devices_must_agree_how_copies_launch_kernels() -> None:
    way, other = [192, 3368, 352, 144, 312, 16], [8, 3368, 352, 144, 312, 16]
    both, one = opencl_answer(own=[1], ways=[way, other], list=16), opencl_answer(own=[2], ways=[way], list=16)

    assert _handle_path([both, one]) == HandlePath(*way)
    assert _handle_path([both, opencl_answer(own=[2], ways=[[0] * 6], list=16)]) is None
    assert _handle_path([both, opencl_answer(own=[2], ways=[way], list=8)]) is None
    assert _handle_path([both, opencl_answer(own=[], ways=[way], list=16)]) is None
