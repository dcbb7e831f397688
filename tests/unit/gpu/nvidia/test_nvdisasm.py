"""The decoder: the real nvdisasm on real kernels if it is installed, and one that misbehaves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from iaprof.gpu.instructions import UNDECODABLE, Decoding, NoDecoder, NotDecoded, Program
from iaprof.gpu.nvidia import nvdisasm
from iaprof.gpu.nvidia.architectures import Sm
from iaprof.gpu.nvidia.cubin import read_cubin
from iaprof.gpu.nvidia.nvdisasm import Nvdisasm, candidates, installed
from iaprof.report.gpu.module import NO_DECODER, GpuModuleLoader
from iaprof.report.gpu.reader import GpuReader
from iaprof.sandbox.programs import open_program
from limits import Within
from unit.elfwriter import kernel as section
from unit.fakeprogram import build_nvdisasm
from unit.gpu.nvidia.cubins import PLAIN, cubin

NOP, JUMP, BAD, NAMELESS = (bytes([first]) + bytes(15) for first in (b"\5"[0], b"B"[0], 0xBB, 0xEE))
EVIL = b"E" + bytes(15)


class Counted(Program):
    """A program that counts its runs."""

    def __init__(self, program: Program) -> None:
        self.program, self.runs = program, 0

    def run(self, choice: int, data: bytes, most: int, seconds: float) -> tuple[int, bytes, bytes]:
        self.runs += 1
        return self.program.run(choice, data, most, min(seconds, 1.0))


class Opened:
    """A decoder with a program that counts its runs."""

    def __init__(self) -> None:
        self.decoder = Nvdisasm(self._open)

    def _open(self, path: str, choices: Sequence[Sequence[str]]) -> Program:
        self.counted = Counted(open_program(path, choices))
        return self.counted

    def decode(self, code: bytes) -> Decoding:
        return self.decoder.decode(Sm.SM90, code)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Opened]:
    """Makes a decoder whose program does these C statements at an instruction that begins with an E."""

    def make(evil: str = "abort()") -> Opened:
        monkeypatch.setenv(nvdisasm.PROGRAM_VARIABLE, str(build_nvdisasm(tmp_path, evil)))
        return Opened()

    return make


def test_columns_and_operands_that_count_from_the_kernel(fake: Callable[[], Opened]) -> None:
    opened = fake()
    opened.decoder.prepare(Sm.SM90, [NOP * 8, NOP + JUMP + JUMP])
    for _ in range(2):
        found = opened.decode(NOP + JUMP + JUMP)
        assert found.pcs == [0, 16, 32]
        assert found.sizes == [16] * 3
        assert found.mnemonics == ["NOP", "BRA", "BRA"]
        assert found.texts == ["NOP.X R5", "@!P0 BRA.U 0x0", "@!P0 BRA.U 0x10"]
        assert found.targets == [[], [0], [16]]
        assert found.message == ""
    assert opened.decode(NOP * 8).mnemonics == ["NOP"] * 8
    assert opened.counted.runs == 1
    assert opened.decode(JUMP).texts == ["@!P0 BRA.U -0x10"]
    assert opened.decode(JUMP).targets == [[]]


def test_code_without_instructions_and_with_a_part_of_one(fake: Callable[[], Opened]) -> None:
    opened = fake()
    opened.decoder.prepare(Sm.SM90, [])
    assert opened.decode(NOP + b"rest").mnemonics == ["NOP"]
    assert opened.decode(b"short").pcs == []
    assert opened.decode(b"").pcs == []


def test_bad_instructions_spoil_only_themselves(fake: Callable[[], Opened]) -> None:
    opened = fake()
    zeros = bytes(16)
    codes = [NOP + BAD + NOP + BAD, NOP, zeros + NOP]
    opened.decoder.prepare(Sm.SM90, codes)
    assert opened.counted.runs == 2
    assert [opened.decode(code).mnemonics for code in codes] == [
        ["NOP", UNDECODABLE, "NOP", UNDECODABLE], ["NOP"], [UNDECODABLE, "NOP"],
    ]  # fmt: skip
    assert opened.decode(codes[0]).message == "2 of its instructions are unknown to nvdisasm"
    assert opened.decode(codes[1]).message == ""


@pytest.mark.parametrize("evil", ["abort()", "exit(1)", "for (;;) ;", 'for (;;) puts("x")', 'puts("/*0*/ x")'])
def test_a_program_that_fails_on_one_kernel(fake: Callable[[str], Opened], within: Within, evil: str) -> None:
    opened = fake(evil)
    codes = [NOP * number for number in range(1, 9)]
    with within(60):
        opened.decoder.prepare(Sm.SM90, [*codes, NOP + EVIL])
        with pytest.raises(NotDecoded, match=r"nvdisasm (fails|takes too long)"):
            opened.decode(NOP + EVIL)
    assert opened.counted.runs < 12
    if evil in ("abort()", "exit(1)"):
        for code in codes:
            assert opened.decode(code).mnemonics == ["NOP"] * (len(code) // 16)
    assert opened.decode(NOP * 50).mnemonics == ["NOP"] * 50


def test_bad_instructions_without_a_place(fake: Callable[[], Opened]) -> None:
    opened = fake()
    codes = [NOP * number for number in range(1, 17)] + [NOP + NAMELESS]
    opened.decoder.prepare(Sm.SM90, codes)
    for code in codes[:-1]:
        assert opened.decode(code).mnemonics == ["NOP"] * (len(code) // 16)
    with pytest.raises(NotDecoded, match="nvdisasm fails: Illegal instruction found"):
        opened.decode(codes[-1])


def test_hundreds_of_bad_kernels_take_few_runs(fake: Callable[[], Opened]) -> None:
    opened = fake()
    codes = [NOP * number + NAMELESS for number in range(200)]
    opened.decoder.prepare(Sm.SM90, codes)
    assert opened.counted.runs < 20
    for code in codes:
        with pytest.raises(NotDecoded):
            opened.decode(code)
    assert opened.counted.runs < 20


def test_what_is_kept_is_bounded(fake: Callable[[], Opened], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvdisasm, "_MOST_KEPT", 1024)
    monkeypatch.setattr(nvdisasm, "_LONGEST_CODE", 4096)
    opened = fake()
    codes = [bytes([1 + number]) * 16 * 20 for number in range(10)]
    opened.decoder.prepare(Sm.SM90, codes)
    for code in codes * 2:
        assert len(opened.decode(code).pcs) == 20
        assert len(opened.decoder._kept) <= 4
    assert len(opened.decode(NOP * 256).pcs) == 256
    with pytest.raises(NotDecoded, match="its 4112 bytes are more than are decoded"):
        opened.decode(NOP * 257)


def test_an_instruction_set_that_the_program_does_not_know(fake: Callable[[], Opened]) -> None:
    with pytest.raises(NoDecoder, match=r"/nvdisasm does not know SM70: pip install nvidia-cuda-nvdisasm"):
        fake().decoder.decode(Sm.SM70, NOP)


def test_no_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(nvdisasm.PROGRAM_VARIABLE, str(tmp_path / "none"))
    assert installed() == ""
    with pytest.raises(NoDecoder, match="NVIDIA's nvdisasm was not found: pip install nvidia-cuda-nvdisasm"):
        Nvdisasm(open_program)
    with GpuModuleLoader() as modules:
        module = modules.load(PLAIN, Sm.SM90)
    assert module.problems == (f"NVIDIA's nvdisasm was not found: {nvdisasm.WHAT_TO_INSTALL}",)
    assert module.kernels[0].at(0).mnemonic == NO_DECODER


def test_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(nvdisasm.PROGRAM_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", f"/one{os.pathsep}relative{os.pathsep}{os.pathsep}/two")
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    monkeypatch.setenv("CUDA_PATH", "")
    monkeypatch.setattr("sys.path", ["", str(tmp_path)])
    assert list(candidates()) == [
        "/one/nvdisasm",
        "/two/nvdisasm",
        "/cuda/bin/nvdisasm",
        "/usr/local/cuda/bin/nvdisasm",
        *(f"{tmp_path}/{folder}/nvdisasm" for folder in (
            "nvidia/cu13/bin", "nvidia/cuda_nvcc/bin", "triton/backends/nvidia/bin",
        )),
    ]  # fmt: skip
    program = tmp_path / "nvidia" / "cu13" / "bin" / "nvdisasm"
    program.parent.mkdir(parents=True)
    program.write_text("")
    assert installed() == ""
    program.chmod(0o755)
    assert installed() == f"{program} {program.stat().st_mtime_ns}"


def test_a_module_in_the_sandbox(fake: Callable[[], Opened]) -> None:
    fake()
    sections = [section("good", NOP * 4), section("bad", NOP + BAD), section("evil", EVIL)]
    with GpuModuleLoader() as modules:
        module = modules.load(cubin(sections), Sm.SM90)
        outline = modules.load(cubin(sections), Sm.SM90, only=())
    assert [[each.mnemonic for each in kernel.instructions] for kernel in module.kernels] == [
        ["NOP"] * 4, ["NOP", UNDECODABLE], [],
    ]  # fmt: skip
    assert module.problems == ("kernel 'evil' was not decoded: nvdisasm fails: it does not say why",)
    assert [kernel.address for kernel in outline.kernels] == [kernel.address for kernel in module.kernels]


def test_modules_are_decoded_together(fake: Callable[[], Opened]) -> None:
    fake()
    reader = GpuReader(40.0)
    decoder = reader._decoders["nvidia"]
    assert isinstance(decoder, Nvdisasm)
    counted = decoder._program = Counted(decoder._program)
    modules = [cubin([section(f"k{number}", NOP * (number + 1)), section("other", JUMP)]) for number in range(5)]
    kernels = [read_cubin(module).kernels[0] for module in modules]
    asked = [{"instruction_set": ["nvidia", 90], "only": [kernel.address]} for kernel in kernels]
    for module, parameters in zip(modules, asked, strict=True):
        assert reader.expect(parameters, bytearray(module), []) is None
    assert reader.expect(asked[0], bytearray(b"no cubin"), []) is None
    for module, parameters, kernel in zip(modules, asked, kernels, strict=True):
        found: Any = reader.module({**parameters, "decode": True}, bytearray(module), [])
        assert found["problems"] == []
        assert len(found["kernels"][0]["instructions"]["offset"]) == len(kernel.code) // 16
        assert found["kernels"][1]["instructions"] is None
    assert counted.runs == 1


@pytest.fixture(scope="module")
def real() -> Iterator[Nvdisasm]:
    try:
        yield Nvdisasm(open_program)
    except NoDecoder as error:
        pytest.skip(str(error))


def test_the_real_program(real: Nvdisasm) -> None:
    scale, reduce = read_cubin(PLAIN).kernels
    real.prepare(Sm.SM90, [scale.code, reduce.code])
    found = real.decode(Sm.SM90, reduce.code)
    assert found.message == ""
    assert found.pcs == list(range(0, 2304, 16))
    text = dict(zip(found.pcs, found.texts, strict=True))
    targets = dict(zip(found.pcs, found.targets, strict=True))
    mnemonic = dict(zip(found.pcs, found.mnemonics, strict=True))
    assert (text[0xD0], targets[0xD0], mnemonic[0xD0]) == ("CALL.REL.NOINC 0x4d0", [0x4D0], "CALL")
    assert (text[0x90], targets[0x90], mnemonic[0x90]) == ("@P0 BRA 0xf0", [0xF0], "BRA")
    assert (text[0x30], targets[0x30], mnemonic[0x30]) == ("BSSY B0, 0x100", [], "BSSY")
    assert text[0x810] == "RET.REL.NODEC R2 0x0"
    assert set(found.mnemonics) >= {"LDG", "FFMA", "HFMA2", "BAR", "STS", "EXIT", "NOP"}
    # and what is no instruction, among others
    code = bytearray(reduce.code)
    code[0x40:0x50] = b"\xff" * 16
    code[0x60:0x70] = bytes(16)
    found = real.decode(Sm.SM90, bytes(code))
    assert [at for at, each in zip(found.pcs, found.mnemonics, strict=True) if each == UNDECODABLE] == [0x40, 0x60]
    assert [each for at, each in zip(found.pcs, found.texts, strict=True) if at not in (0x40, 0x60)] == [
        each for at, each in text.items() if at not in (0x40, 0x60)
    ]


def test_the_real_program_on_noise(real: Nvdisasm, within: Within) -> None:
    with within(60):
        for length in (16, 160, 16_000):
            try:
                found = real.decode(Sm.SM90, os.urandom(length))
            except NotDecoded as error:
                assert re.match("nvdisasm (fails|finds|takes)", str(error))
            else:
                assert len(found.pcs) == length // 16
