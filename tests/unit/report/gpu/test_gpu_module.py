"""Whole modules as the report sees them: real ones, damaged ones, and readers that fail or lie."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.gpu.intel.instruction_set import Platform
from iaprof.gpu.intel.zebin import read_zebin
from iaprof.report.gpu import module as gpu_module
from iaprof.report.gpu.decoder import gpu_sandbox, in_json
from iaprof.report.gpu.module import GpuFrame, GpuModuleLoader, InstructionInfo
from iaprof.sandbox.parent import Limits, Sandbox, SandboxDied
from limits import Within
from unit import elfwriter as elf, fakeiga
from unit.zebins import KERNELS, MODULES, PLATFORMS, debug_elf, disassembly, line_rows, plain_zebin


@pytest.fixture(scope="module")
def modules() -> Iterator[GpuModuleLoader]:
    with GpuModuleLoader() as made:
        yield made


@pytest.mark.parametrize(("device", "module"), MODULES)
def test_every_instruction_of_real_modules(modules: GpuModuleLoader, device: str, module: str) -> None:
    loaded = modules.load(debug_elf(device, module), PLATFORMS[device])
    assert loaded.problems == ()
    assert [kernel.name for kernel in loaded.kernels] == KERNELS[module]
    rows = line_rows(device, module)
    for kernel in loaded.kernels:
        expected = disassembly(device, module, kernel.name)
        assert [(each.offset, each.text) for each in kernel.instructions] == expected
        assert kernel.demangled == kernel.name
        assert kernel.file.endswith({"attention": "/attention.clcpp", "matmul": "/matmul.cl"}[module])
        for each in kernel.instructions:
            assert kernel.at(each.offset) is each
            assert each.frames[0].function == kernel.name
            assert (each.frames[-1].file, each.frames[-1].line) == rows.at(kernel.address + each.offset)


def test_inlined_functions_are_frames(modules: GpuModuleLoader) -> None:
    (kernel,) = modules.load(debug_elf("ptl", "attention"), Platform.XE3).kernels
    seen = " ".join(frame.function for each in kernel.instructions for frame in each.frames)
    for name in (
        "workgroup<float, reduce::Max>",
        "workgroup<float, reduce::Sum>",
        "Max::apply",
        "Sum::apply",
        "dot",
        "scale",
    ):
        assert name in seen


def test_offsets_at_which_nothing_starts(modules: GpuModuleLoader) -> None:
    kernel = modules.load(debug_elf("bmg", "matmul"), Platform.XE2).kernels[0]
    assert kernel.instructions[0].size == 16
    inside = kernel.at(8)
    assert (inside.offset, inside.size, inside.mnemonic, inside.text) == (8, 0, "[not an instruction]", "")
    assert inside.frames == kernel.instructions[0].frames
    for offset in (-1, -1 << 60, kernel.code_size, 1 << 60):
        assert kernel.at(offset) == InstructionInfo(
            offset, 0, "[not an instruction]", "", (), (GpuFrame("multiply_basic", "", 0),)
        )


@pytest.mark.parametrize(("device", "module"), MODULES)
def test_many_offsets_have_the_codes_of_each(modules: GpuModuleLoader, device: str, module: str) -> None:
    for kernel in modules.load(debug_elf(device, module), PLATFORMS[device]).kernels:
        nothing = (-(1 << 60), -1, 8, kernel.code_size, 1 << 60)
        offsets = np.array([*nothing, *(each.offset for each in kernel.instructions)], np.int64).astype(np.uint64)
        codes, which = kernel.codes_at(offsets)
        for offset, code in zip(offsets, which.tolist(), strict=True):
            at = kernel.at(int(offset.astype(np.int64)))
            assert codes[code] == (at.mnemonic, at.frames)
            alone, numbers = kernel.codes_at(np.array([offset]))
            assert (alone, numbers.tolist()) == ([codes[code]], [0])


def test_only_some_kernels(modules: GpuModuleLoader) -> None:
    whole = modules.load(debug_elf("bmg", "matmul"), Platform.XE2)
    address = whole.kernels[1].address
    part = modules.load(debug_elf("bmg", "matmul"), Platform.XE2, only=[address | 0xFFFF << 48])
    assert [kernel.name for kernel in part.kernels] == KERNELS["matmul"]
    assert [bool(kernel.instructions) for kernel in part.kernels] == [False, True, False]
    assert part.kernels[1].instructions == whole.kernels[1].instructions
    assert part.kernels[0].at(0).frames == (GpuFrame("multiply_basic", "", 0),)


def test_an_unknown_generation(modules: GpuModuleLoader) -> None:
    loaded = modules.load(debug_elf("bmg", "matmul"), None)
    assert any("generation is not known" in problem for problem in loaded.problems)
    info = loaded.kernels[1].at(0)
    assert (info.mnemonic, info.frames[0].line) == ("[no decoder]", 13)


def test_without_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(tmp_path / "none.so"))
    with GpuModuleLoader() as modules:
        loaded = modules.load(debug_elf("bmg", "matmul"), Platform.XE2)
    assert [problem for problem in loaded.problems if "install libigc2" in problem]
    assert loaded.kernels[0].instructions == ()
    info = loaded.kernels[0].at(0x180)
    assert (info.mnemonic, info.size, info.frames[-1].line > 0) == ("[no decoder]", 0, True)


def test_without_debug_information(modules: GpuModuleLoader) -> None:
    code = read_zebin(debug_elf("bmg", "matmul")).kernels[0].code
    loaded = modules.load(elf.zebin([elf.kernel("_ZTSZ4mainEUlvE_", code, 0x1000)]), Platform.XE2)
    (kernel,) = loaded.kernels
    assert loaded.problems == ()
    assert kernel.demangled == "main::{lambda()#1}"
    assert kernel.file == ""
    assert {each.frames for each in kernel.instructions} == {(GpuFrame("main::{lambda()#1}", "", 0),)}


def test_a_plain_zebin_has_instructions_but_no_lines(modules: GpuModuleLoader) -> None:
    loaded = modules.load(plain_zebin("bmg", "matmul"), Platform.XE2)
    assert any("no GPU addresses" in problem for problem in loaded.problems)
    assert loaded.kernels[0].instructions
    assert loaded.kernels[0].instructions[5].frames == (GpuFrame("multiply_basic", "", 0),)


def test_code_that_is_none(modules: GpuModuleLoader) -> None:
    code = read_zebin(debug_elf("bmg", "matmul")).kernels[0].code
    sections = [
        elf.kernel("empty", b"", 0x1000),
        elf.kernel("short", b"1234", 0x2000),
        elf.kernel("good", code, 0x3000),
    ]
    damaged = elf.kernel("damaged", code[:64] + b"\xff" * 16 + code[80:], 0x4000)
    loaded = modules.load(elf.zebin([*sections, damaged]), Platform.XE2)
    empty, short, good, bad = loaded.kernels
    assert empty.at(0).mnemonic == "[not an instruction]"
    assert short.at(0).mnemonic == "[undecodable]"
    assert good.at(0).mnemonic == "mov"
    assert bad.at(64).mnemonic == "[undecodable]"
    assert bad.at(0).mnemonic == "mov"
    assert loaded.problems == ("kernel 'short' was not decoded: 4 bytes are not an instruction: the shortest has 8",)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not an ELF file"),
        (b"\x7fELF" + bytes(100), "64-bit little-endian"),
        (elf.zebin([], machine=elf.X86_64), "machine 62"),
        (debug_elf("bmg", "matmul")[:20_000], "cut short"),
    ],
)
def test_what_is_no_zebin_is_a_problem(modules: GpuModuleLoader, data: bytes, why: str) -> None:
    loaded = modules.load(data, Platform.XE2)
    assert loaded.kernels == ()
    (problem,) = loaded.problems
    assert why in problem


def test_a_decoder_that_dies_on_one_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything else is there all the same: lines, names, and the other kernels' instructions."""
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(fakeiga.build(tmp_path, fakeiga.ABORT)))
    data = bytearray(debug_elf("bmg", "matmul"))
    code = read_zebin(bytes(data)).kernels[1].code
    data[data.index(code) + 1024 if code == read_zebin(bytes(data)).kernels[0].code else data.index(code)] = ord("E")
    with GpuModuleLoader() as modules:
        loaded = modules.load(bytes(data), Platform.XE2)
        assert modules.load(debug_elf("bmg", "matmul"), Platform.XE2).problems == ()
    assert [kernel.at(0x180).mnemonic for kernel in loaded.kernels] == ["nop", "[undecodable]", "nop"]
    assert all(kernel.at(0x180).frames[-1].line for kernel in loaded.kernels)
    (problem,) = loaded.problems
    assert "'multiply_local_access' was not decoded: the reader process died of SIGABRT" in problem


def test_a_decoder_that_dies_on_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, within: Within) -> None:
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(fakeiga.build(tmp_path, fakeiga.ABORT)))
    with GpuModuleLoader() as modules:
        data = elf.zebin([elf.kernel(f"k{number}", b"E" * 64, number << 12) for number in range(1, 100)])
        with within(10):  # it stops trying
            loaded = modules.load(data, Platform.XE2)
    assert {kernel.at(0).mnemonic for kernel in loaded.kernels} == {"[undecodable]"}


def test_lines_that_take_too_long_cost_only_lines() -> None:
    with gpu_sandbox(Limits(stage_seconds=0.0005)) as sandbox:
        loaded = GpuModuleLoader(sandbox).load(debug_elf("bmg", "attention"), None)
    assert any("debug information takes too long to read" in problem for problem in loaded.problems)
    assert loaded.kernels[0].at(0).frames == (GpuFrame("attention_scores", "", 0),)


def test_modules_that_waste_too_much_time_cost_the_others_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "_MAX_PROBLEM_SECONDS", 1e-9)
    with GpuModuleLoader() as modules:
        assert modules.load(debug_elf("bmg", "attention"), Platform.XE2).problems == ()
        assert modules.load(b"no zebin", Platform.XE2).problems
        left = modules.load(debug_elf("bmg", "attention"), Platform.XE2)
    assert [kernel.name for kernel in left.kernels] == KERNELS["attention"]
    assert left.problems == ("it was not read: modules before it took too long",)


def test_no_child_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with GpuModuleLoader() as modules:
        loaded = modules.load(debug_elf("bmg", "attention"), Platform.XE2)
    assert [kernel.name for kernel in loaded.kernels] == ["attention_scores"]
    assert "cannot be started" in loaded.problems[0]


def test_cut_short_anywhere(modules: GpuModuleLoader) -> None:
    whole = debug_elf("lnl", "attention")
    for length in range(0, len(whole), 211):
        loaded = modules.load(whole[:length], Platform.XE2)
        assert loaded.kernels == ()
        assert len(loaded.problems) == 1


@pytest.mark.parametrize(("device", "module"), [("bmg", "attention"), ("pvc", "matmul"), ("ptl", "attention")])
def test_flipped_bytes(modules: GpuModuleLoader, within: Within, device: str, module: str) -> None:
    """A hundred damaged copies each, most of them where code and DWARF are: never an exception, and quick."""
    whole = debug_elf(device, module)
    generator = random.Random(f"{device} {module}")
    names = [b".debug_info", b".debug_abbrev", b".debug_line", b".debug_ranges"]
    assert all(name in whole for name in names)
    first = whole.index(b"clang version") - 40 if b"clang version" in whole else 0x5000
    loads, kernels, problems = 100, 0, 0
    with within(30):
        for _ in range(loads):
            data = bytearray(whole)
            low, high = generator.choice([(0, len(data)), (0x500, 0x1500), (first, first + 0x1800), (64, 0x600)])
            for _ in range(generator.choice([1, 3, 30])):
                data[generator.randrange(low, min(high, len(data)))] = generator.randrange(256)
            loaded = modules.load(bytes(data), PLATFORMS[device])
            for kernel in loaded.kernels:
                for offset in range(-8, kernel.code_size + 8, 8):
                    assert kernel.at(offset).frames
            assert all(problem.strip() for problem in loaded.problems)
            kernels += len(loaded.kernels)
            problems += bool(loaded.problems)
    assert kernels > loads / 2
    assert 0 < problems < loads


class Liar(Sandbox):
    """Stands in for a sandbox whose child is in an attacker's hands."""

    def __init__(self, answer: Any) -> None:
        super().__init__("nobody")
        self.answer = answer

    def call(self, operation: str, *_: object, **__: object) -> Any:
        if operation == "module":
            return self.answer
        raise SandboxDied("it died")


def damaged(value: Any, generator: random.Random, depth: int = 0) -> Any:
    """A copy of the answer in which one thing, somewhere, is something else."""
    rubbish: list[Any] = [None, -1, 1 << 70, 3.5, "\ud800", "x", [], {}, True, [[]], [1, 2, 3], {"offset": [0]}]
    if depth > 1 and generator.random() < 0.3:
        return copy.deepcopy(generator.choice(rubbish))
    if isinstance(value, dict) and value:
        key = generator.choice(list(value))
        if generator.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: damaged(value[key], generator, depth + 1)}
    if isinstance(value, list) and value:
        index = generator.randrange(len(value))
        if generator.random() < 0.1:
            return value[:index] + value[index + 1 :]
        return [*value[:index], damaged(value[index], generator, depth + 1), *value[index + 1 :]]
    return copy.deepcopy(generator.choice(rubbish))


def test_problems_are_for_people(modules: GpuModuleLoader) -> None:
    names = [f"\x1b[31m{number}\n" for number in range(100)]
    loaded = modules.load(elf.zebin([elf.kernel(name, b"123") for name in names]), Platform.XE2)
    assert len(loaded.problems) == 21
    assert loaded.problems[-1] == "and 80 more problems"
    assert all(problem.isprintable() for problem in loaded.problems)
    assert [kernel.name for kernel in loaded.kernels] == names


def test_answers_of_a_child_in_an_attackers_hands() -> None:
    data = debug_elf("bmg", "matmul")
    with gpu_sandbox() as sandbox:
        honest = sandbox.call("module", {"instruction_set": in_json(Platform.XE2), "only": None, "decode": True}, data)
    assert len(GpuModuleLoader(Liar(honest)).load(data, Platform.XE2).kernels) == 3
    generator = random.Random(6)
    refused = instructions = 0
    for _ in range(1500):
        loaded = GpuModuleLoader(Liar(damaged(honest, generator))).load(data, Platform.XE2)
        refused += any("nonsense" in problem for problem in loaded.problems)
        for kernel in loaded.kernels:
            kernel.name.encode()
            for offset in (0, 8, 64, kernel.code_size - 16, kernel.code_size):
                info = kernel.at(offset)
                "".join([info.mnemonic, info.text, *(frame.function + frame.file for frame in info.frames)]).encode()
                assert all(type(frame.line) is int for frame in info.frames)
                instructions += info.size > 0
    assert refused > 700
    assert instructions > 600


def test_kernels_with_the_same_code_share_their_instructions() -> None:
    code = read_zebin(debug_elf("bmg", "matmul")).kernels[0].code
    sections = [elf.kernel(f"kernel_{number}", code, 0x1000 + 0x10000 * number) for number in range(3)]
    data = elf.zebin([*sections, elf.kernel("other", code[:64], 0x80000)])
    with gpu_sandbox() as sandbox:
        honest = sandbox.call("module", {"instruction_set": in_json(Platform.XE2), "only": None, "decode": True}, data)
    assert [type(kernel["instructions"]) for kernel in honest["kernels"]] == [dict, int, int, dict]
    first, second, third, other = GpuModuleLoader(Liar(honest)).load(data, Platform.XE2).kernels
    assert first.decoded is second.decoded is third.decoded
    assert len(first.instructions) > len(other.instructions) > 0
    assert second.instructions[5].text == first.instructions[5].text


@pytest.mark.parametrize("wrong", [1, 2, -1, 3, 1 << 70, True, 0.0])
def test_instructions_of_a_kernel_that_does_not_have_them(wrong: object) -> None:
    code = read_zebin(debug_elf("bmg", "matmul")).kernels[0].code
    data = elf.zebin([elf.kernel("first", code, 0x1000), elf.kernel("second", code, 0x20000)])
    with gpu_sandbox() as sandbox:
        honest = sandbox.call("module", {"instruction_set": in_json(Platform.XE2), "only": None, "decode": True}, data)
    honest["kernels"][1]["instructions"] = wrong
    loaded = GpuModuleLoader(Liar(honest)).load(data, Platform.XE2)
    assert any("nonsense" in problem for problem in loaded.problems)


def test_instructions_of_code_of_another_length_or_without_any() -> None:
    code = read_zebin(debug_elf("bmg", "matmul")).kernels[0].code
    data = elf.zebin([elf.kernel("first", code, 0x1000), elf.kernel("second", code[:64], 0x20000)])
    with gpu_sandbox() as sandbox:
        honest = sandbox.call("module", {"instruction_set": in_json(Platform.XE2), "only": None, "decode": True}, data)
    honest["kernels"][1]["instructions"] = 0
    longer = GpuModuleLoader(Liar(honest)).load(data, Platform.XE2)
    honest["kernels"][0]["instructions"], honest["kernels"][1]["code_size"] = None, len(code)
    none = GpuModuleLoader(Liar(honest)).load(data, Platform.XE2)
    assert all(any("nonsense" in problem for problem in each.problems) for each in (longer, none))
