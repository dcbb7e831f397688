"""Cubins: real ones, and such as nobody's compiler writes."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from iaprof.gpu.code import CodeFunction, CodeObjectError
from iaprof.gpu.nvidia.architectures import is_cubin
from iaprof.gpu.nvidia.cubin import read_cubin
from iaprof.gpu.nvidia.lines import read_lines
from iaprof.gpu.vendors import of_code
from limits import Within
from unit import elf_patching, elfwriter as elf
from unit.gpu.nvidia.cubins import PLAIN, SCALE, WITH_LINES, cubin


@pytest.mark.parametrize("data", [PLAIN, WITH_LINES], ids=["plain", "lines"])
def test_kernels_lie_where_their_code_is_in_the_file(data: bytes) -> None:
    assert is_cubin(data)
    assert of_code(data).name == "nvidia"
    code = read_cubin(data)
    assert [(kernel.name, kernel.size) for kernel in code.kernels] == [(SCALE, 512), ("reduce", 2304)]
    for kernel in code.kernels:
        offset, size = elf_patching.bounds_of(data, f".text.{kernel.name}")
        assert (kernel.address, kernel.code) == (offset, data[offset : offset + size])
        assert len(kernel.code) % 128 == 0
    assert code.placed
    assert not code.has_debug


def test_a_copy_of_a_function_has_its_own_name() -> None:
    scale, reduce = read_cubin(PLAIN).kernels
    assert scale.functions == ()
    assert reduce.functions == (CodeFunction("_Z6summedPKfi", 0x4D0, 0x430),)


def test_the_same_code_has_one_fingerprint_with_and_without_lines() -> None:
    assert [each.fingerprint for each in read_cubin(PLAIN).kernels] == [
        each.fingerprint for each in read_cubin(WITH_LINES).kernels
    ]


def test_no_cubin() -> None:
    for data, why in (
        (b"", "not an ELF file"),
        (b"\x7fELF", "cut short"),
        (elf.zebin([elf.kernel("k")]), "for machine 205, not for an NVIDIA GPU"),
        (cubin([elf.kernel("k")], bits=1), "64-bit"),
        (cubin([elf.kernel("k")], table=0), "no section table"),
        (cubin([elf.kernel("k")], count=60_000), "its section table of 60000 entries ends outside"),
        (cubin([elf.Section(".text.k", claimed_size=1 << 63)]), "cut short"),
        (cubin([elf.Section(".text.k", bytes(64), claimed_offset=(1 << 64) - 32)]), "cut short"),
    ):
        with pytest.raises(CodeObjectError, match=why):
            read_cubin(data)


def test_symbols_outside_of_sections() -> None:
    symbols = [
        elf.Symbol("k", 0, 0, 64),
        elf.Symbol("behind", 0, 64, 8),
        elf.Symbol("far", 0, (1 << 64) - 8, 1 << 63),
        elf.Symbol("nowhere", 5000, 0, 8),
        elf.Symbol("long", 0, 32, 1 << 63),
        elf.Symbol("$", 0, 16, 0),
        elf.Symbol("$k$", 0, 48, 4),
    ]
    (kernel,) = read_cubin(cubin([elf.kernel("k")], symbols)).kernels
    assert kernel.functions == (CodeFunction("$", 16, 0), CodeFunction("long", 32, 32), CodeFunction("$k$", 48, 4))


def test_sections_that_share_their_bytes(within: Within) -> None:
    """A file of one megabyte that declares sixteen gigabytes of code."""
    shared = [elf.Section(f".text.{number}", claimed_offset=0, claimed_size=1 << 20) for number in range(16_000)]
    data = cubin(shared).ljust(1 << 20, b"\0")
    tracemalloc.start()
    with within(10), pytest.raises(CodeObjectError, match="its sections overlap"):
        read_cubin(data)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_thousands_of_kernels(within: Within) -> None:
    data = cubin([elf.kernel(f"k{number}", bytes(16)) for number in range(20_000)])
    with within(20):
        kernels = read_cubin(data).kernels
    assert len({kernel.address for kernel in kernels}) == 20_000


def test_cut_at_every_byte(within: Within) -> None:
    with within(60):
        for length in range(0, len(WITH_LINES), 7):
            reads(WITH_LINES[:length])


def test_flipped_bits(within: Within) -> None:
    generator = random.Random(47)
    with within(120):
        for _ in range(1_500):
            data = bytearray(WITH_LINES)
            for _ in range(generator.randrange(1, 12)):
                data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            reads(bytes(data))


def reads(data: bytes) -> None:
    """Reads everything of a damaged cubin; no other error than the reader's own may come of it."""
    for read in (read_cubin, read_lines):
        try:
            read(data)
        except CodeObjectError:
            continue


def test_no_path_of_the_machine_that_made_them() -> None:
    assert b"/tmp" not in PLAIN + WITH_LINES
    assert b"/home" not in PLAIN + WITH_LINES
