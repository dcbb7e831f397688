"""The decoder: what iga64 prints for real kernels, and a library that is missing, old or deadly."""

import random
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.gpu.intel import iga
from iaprof.gpu.intel.generations import platform_of
from iaprof.gpu.intel.instruction_set import Platform
from iaprof.gpu.intel.zebin import read_zebin
from iaprof.report.gpu.decoder import DecodeError, Decoder, DecoderUnavailable, gpu_sandbox
from iaprof.sandbox.parent import Limits, Sandbox
from unit import fakeiga
from unit.zebins import KERNELS, MODULES, PLATFORMS, debug_elf, disassembly, read_zebin_code

CODE = read_zebin_code("bmg", "attention")


@pytest.fixture(scope="module")
def shared() -> Iterator[Sandbox]:
    with gpu_sandbox() as sandbox:
        yield sandbox


@pytest.mark.parametrize(("device", "module"), MODULES)
def test_every_instruction_is_what_iga64_prints(device: str, module: str, shared: Sandbox) -> None:
    decoder = Decoder(PLATFORMS[device], shared)
    kernels = read_zebin(debug_elf(device, module)).kernels
    assert [kernel.name for kernel in kernels] == KERNELS[module]
    for kernel in kernels:
        expected = disassembly(device, module, kernel.name)
        found = decoder.disasm(kernel.code)
        assert [(each.address, each.text) for each in found] == expected
        starts = [offset for offset, _ in expected]
        assert [each.size for each in found[:-1]] == [after - before for before, after in pairwise(starts)]
        assert found[-1].size == 16
        for each in found:
            assert each.size == (8 if "Compacted" in each.text else 16)
            opcode = re.match(r"(?:\([^)]*\))? *([a-z0-9]+)", each.text)
            assert opcode
            assert each.mnemonic == opcode[1]
            assert set(each.targets) == {int(label) for label in re.findall(r"\bL(\d+)", each.text)}
            assert set(each.targets) <= set(starts)


def test_every_kernel_is_covered() -> None:
    assert len(MODULES) == 8
    assert sum(len(KERNELS[module]) for _, module in MODULES) == 16


def test_addresses_count_from_the_one_given(shared: Sandbox) -> None:
    decoder = Decoder(Platform.XE2, shared)
    plain, moved = decoder.disasm(CODE), decoder.disasm(CODE, 0x8000_0000_0000)
    assert [each.address + 0x8000_0000_0000 for each in plain] == [each.address for each in moved]
    assert moved[15].mnemonic == "goto"
    assert moved[15].targets == (0x8000_0000_0120, 0x8000_0000_0120)
    assert [each.text for each in plain] == [each.text for each in moved]


@pytest.mark.parametrize("length", range(8))
def test_less_than_an_instruction_is_refused(shared: Sandbox, length: int) -> None:
    with pytest.raises(DecodeError, match="shortest has 8"):
        Decoder(Platform.XE2, shared).disasm(CODE[:length])


@pytest.mark.parametrize("length", [8, 9, 15, 16, 17, 24, 100])
def test_cut_code_never_crashes(shared: Sandbox, length: int) -> None:
    decoder = Decoder(Platform.XE2, shared)
    longest = 0
    for start in range(0, 512, 8):
        try:
            found = decoder.disasm(CODE[start : start + length])
        except DecodeError as error:
            found = list(error.instructions)
        size = sum(each.size for each in found)
        assert size <= length
        longest = max(longest, size)
    assert longest > max(0, length - 16)


def test_errors_carry_igas_message_and_what_was_decoded(shared: Sandbox) -> None:
    damaged = CODE[:0x40] + b"\xff" * 16 + CODE[0x50:]
    with pytest.raises(DecodeError, match=re.escape("PC[0x40] error decoding instruction")) as caught:
        Decoder(Platform.XE2, shared).disasm(damaged)
    assert isinstance(caught.value, IaprofError)
    by_address = {each.address: each.mnemonic for each in caught.value.instructions}
    assert by_address[0x40] == "[undecodable]"
    assert by_address[0x30] == "add"
    assert by_address[len(CODE) - 16] == "illegal", "the compiler's own, which is not an error"


def test_random_bytes_never_crash(shared: Sandbox) -> None:
    generator = random.Random(5)
    for platform in Platform:
        decoder = Decoder(platform, shared)
        decoded = 0
        for _ in range(40):
            code = generator.randbytes(generator.randrange(8, 400))
            try:
                found = decoder.disasm(code)
            except DecodeError as error:
                assert str(error)
                found = list(error.instructions)
            assert all(each.mnemonic and each.size in (8, 16) for each in found)
            decoded += len(found)
        assert decoded > 100


def test_the_wrong_platforms_code(shared: Sandbox) -> None:
    with pytest.raises(DecodeError):
        Decoder(Platform.XE_HPC, shared).disasm(CODE)


def test_it_survives_the_death_of_its_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(fakeiga.build(tmp_path, fakeiga.ABORT)))
    with Decoder(Platform.XE2) as decoder:
        for _ in range(2):
            with pytest.raises(DecodeError, match=r"died on these bytes.*SIGABRT"):
                decoder.disasm(b"E" * 64)
            assert [each.mnemonic for each in decoder.disasm(bytes(32))] == ["nop"] * 4


def test_it_does_not_wait_for_a_library_that_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(fakeiga.build(tmp_path, fakeiga.LOOP)))
    with gpu_sandbox(Limits(seconds=2)) as sandbox:
        decoder = Decoder(Platform.XE2, sandbox)
        with pytest.raises(DecodeError, match="took longer than 2 s"):
            decoder.disasm(b"E" * 64)
        assert len(decoder.disasm(bytes(32))) == 4


def test_without_a_library_it_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(tmp_path / "none.so"))
    with Decoder(Platform.XE2) as decoder, pytest.raises(DecoderUnavailable, match=r"none\.so.*install libigc2"):
        decoder.disasm(CODE)


def test_a_library_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libiga64.so").write_bytes(b"\x7fELF, but not much of one")
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(tmp_path / "libiga64.so"))
    with Decoder(Platform.XE2) as decoder, pytest.raises(DecoderUnavailable, match="install libigc2"):
        decoder.disasm(CODE)
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", "libm.so.6")
    with Decoder(Platform.XE2) as decoder, pytest.raises(DecoderUnavailable, match="install libigc2"):
        decoder.disasm(CODE)


def test_a_library_that_is_too_old_for_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(fakeiga.build(tmp_path, fakeiga.ABORT)))
    with (
        Decoder(Platform.XE3) as decoder,
        pytest.raises(DecoderUnavailable, match="does not know XE3: install a newer"),
    ):
        decoder.disasm(CODE)


def test_where_the_library_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IAPROF_IGA_LIBRARY", raising=False)
    assert iga.candidates() == [f"{sys.prefix}/lib/iaprof/libiga64.so.2", "libiga64.so.2", "libiga64.so.1"]
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", "/opt/libiga64.so")
    assert iga.candidates() == ["/opt/libiga64.so"]


@pytest.mark.parametrize(
    ("version", "platform"),
    [
        ((12, 50), Platform.XE_HP),
        ((12, 55), Platform.XE_HPG),
        ((12, 57), Platform.XE_HPG),
        ((12, 60), Platform.XE_HPC),
        ((12, 71), Platform.XE_HPG),
        ((20, 1), Platform.XE2),
        ((20, 4), Platform.XE2),
        ((30, 0), Platform.XE3),
        ((30, 4), Platform.XE3),
        ((35, 10), Platform.XE3P),
        ((12, 0), None),
        ((9, 0), None),
        ((40, 0), None),
    ],
)
def test_platform_of_an_ip_version(version: tuple[int, int], platform: Platform | None) -> None:
    assert platform_of(*version) is platform


def test_equal_code_is_decoded_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = fakeiga.build(tmp_path, "static int times; if (times++) abort()")
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(library))
    with Decoder(Platform.XE2) as decoder:
        first = decoder.disasm(b"E" * 64)
        assert decoder.disasm(b"E" * 64) == first
        assert len(decoder.disasm(b"F" * 72)) == 9
        with pytest.raises(DecodeError, match="died on these bytes"):
            decoder.disasm(b"E" * 72)
