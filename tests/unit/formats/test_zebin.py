"""Zebins: real ones of four devices, and malformed ones."""

import random
import re
import struct

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.gpu.code import CodeFunction, CodeObjectError, canonical
from iaprof.gpu.intel.zebin import read_zebin
from limits import Within
from unit import elfwriter as elf
from unit.zebins import KERNELS, MODULES, debug_elf, disassembly, plain_zebin

_LANES = re.compile(r"\((\d+)\|M\d+\)")


@pytest.mark.parametrize(("device", "module"), MODULES)
def test_real_debug_zebin(device: str, module: str) -> None:
    zebin = read_zebin(debug_elf(device, module))
    assert [kernel.name for kernel in zebin.kernels] == KERNELS[module]
    assert zebin.has_debug
    assert zebin.placed
    for kernel in zebin.kernels:
        assert kernel.address >> 40 == 0x80, "canonical, whether or not the driver sign-extended it"
        assert len(kernel.code) % 64 == 0
        assert 0 < kernel.size < len(kernel.code), "the symbol's size, without padding"
        assert kernel.functions == ()


@pytest.mark.parametrize(("device", "module"), MODULES)
def test_a_compilers_zebin_has_the_same_kernels_without_addresses(device: str, module: str) -> None:
    plain, debug = read_zebin(plain_zebin(device, module)), read_zebin(debug_elf(device, module))
    assert not plain.placed
    assert [(each.name, each.size, each.address) for each in plain.kernels] == [
        (each.name, each.size, 0) for each in debug.kernels
    ]


@pytest.mark.parametrize(("device", "module"), MODULES)
def test_kernels_have_the_lanes_that_their_instructions_have(device: str, module: str) -> None:
    for kernel in read_zebin(debug_elf(device, module)).kernels:
        widths = [int(width) for _, text in disassembly(device, module, kernel.name) for width in _LANES.findall(text)]
        assert kernel.simd == max(widths)


@pytest.mark.parametrize(
    ("info", "simd"),
    [
        (b"kernels:\n  - name:            k\n    execution_env:\n      simd_size:       16\n", 16),
        (b'kernels:\n  - name: "\\u006b"\n    execution_env:\n      simd_size: 8\n', 8),
        (b"kernels:\n  - name: 'k'\n    execution_env:\n      simd_size: 32\n", 32),
        (b"kernels:\n  - name: k\n    execution_env:\n      grf_count: 128\n", 0),
        (b"kernels:\n  - name: k\n    execution_env:\n      simd_size: 128\n", 0),
        (b"kernels:\n  - name: l\n    execution_env:\n      simd_size: 16\n", 0),
        (b"functions:\n  - name: k\n    execution_env:\n      simd_size: 16\n", 0),
        (b"kernels:\n  - name: k\nfunctions:\n    execution_env:\n      simd_size: 16\n", 0),
        (2 * b"kernels:\n  - name: k\n    execution_env:\n      simd_size: 16\n", 0),
        (b"  - name: k\n      simd_size: 16\n", 0),
        (b"\xff\x00", 0),
        (b"", 0),
    ],
)
def test_what_is_said_of_lanes(info: bytes, simd: int) -> None:
    data = elf.zebin([elf.kernel("k", bytes(64), 0x1000), elf.Section(".ze_info", info)])
    (kernel,) = read_zebin(data).kernels
    assert kernel.simd == simd


@pytest.mark.parametrize(
    "line", [b" " * 100, b"kernels:\n  - name:" + b" " * 1000 + b"x", b"      simd_size:" + b" " * 999]
)
def test_long_lines_about_kernels_take_little_time(within: Within, line: bytes) -> None:
    info = line * (16_000_000 // len(line))
    data = elf.zebin([elf.kernel("k", bytes(64), 0x1000), elf.Section(".ze_info", info)])
    with within(3):
        read_zebin(data)


def test_canonical_addresses() -> None:
    assert canonical(0xFFFF_8000_FFBE_0000) == canonical(0x8000_FFBE_0000) == 0x8000_FFBE_0000


def test_without_symbols_sections_name_the_kernels() -> None:
    zebin = read_zebin(elf.zebin([elf.kernel("one", bytes(128), 0x1000), elf.kernel("two.x", bytes(64), 0x2000)]))
    assert [(kernel.name, kernel.address, kernel.size) for kernel in zebin.kernels] == [
        ("one", 0x1000, 128),
        ("two.x", 0x2000, 64),
    ]
    assert not zebin.has_debug


@pytest.mark.parametrize("address", [0, 0x1000, 0xFFFF_8000_0000_1000])
def test_functions_beside_the_kernel(address: int) -> None:
    symbols = [
        elf.Symbol("k", 0, address, 96),
        elf.Symbol("_entry", 0, address + 16, type=elf.NOTYPE),
        elf.Symbol("late", 0, address + 112, 500),
        elf.Symbol("helper", 0, address + 96, 16),
        elf.Symbol("elsewhere", 0, address + 4096, 16),
        elf.Symbol("in no section", 7, address, 16),
    ]
    (kernel,) = read_zebin(elf.zebin([elf.kernel("k", bytes(128), address)], symbols)).kernels
    assert kernel.size == 96
    assert kernel.functions == (CodeFunction("helper", 96, 16), CodeFunction("late", 112, 16))


def relocated(code: bytes, kind: int, *entries: tuple[int, ...]) -> bytes:
    form = "<QII" if kind == elf.RELOCATIONS else "<QIIq"
    data = b"".join(struct.pack(form, *entry) for entry in entries)
    return elf.zebin([elf.kernel("k", code, 0x1000), elf.Section(".rel.text.k", data, type=kind, info=1)])


@pytest.mark.parametrize("kind", [elf.RELOCATIONS, elf.RELA])
def test_a_fingerprint_leaves_out_relocated_bytes(kind: int) -> None:
    addend = () if kind == elf.RELOCATIONS else (0,)
    entries = [(8, 1, 0, *addend), (24, 2, 0, *addend), (60, 1, 0, *addend), (1 << 63, 3, 0, *addend)]

    def fingerprint(*changed: int) -> str:
        code = bytearray(64)
        for offset in changed:
            code[offset] = 7
        (kernel,) = read_zebin(relocated(bytes(code), kind, *entries)).kernels
        assert kernel.code == code
        return kernel.fingerprint

    places = [*range(8, 16), *range(24, 28), *range(60, 64)]
    assert {fingerprint(offset) for offset in places} == {fingerprint()}
    others = [offset for offset in range(64) if offset not in places]
    assert len({fingerprint(), *(fingerprint(offset) for offset in others)}) == 1 + len(others)


def test_more_relocations_than_bytes() -> None:
    data = relocated(bytes(64), elf.RELOCATIONS, *[(0, 1, 0)] * 100)
    relocations = elf.Section(".rel.text.k", type=elf.RELOCATIONS, info=1, claimed_offset=64, claimed_size=1600)
    with pytest.raises(CodeObjectError, match="more relocations than the file has bytes"):
        read_zebin(elf.zebin([elf.kernel("k", data), *[relocations] * 100]))


def test_unusual_but_valid_zebins() -> None:
    assert read_zebin(elf.zebin([])).kernels == ()
    assert read_zebin(elf.zebin([elf.Section(".text."), elf.Section(".text", bytes(64))])).kernels == ()
    (kernel,) = read_zebin(elf.zebin([elf.kernel("empty", b"")])).kernels
    assert (kernel.size, kernel.code) == (0, b"")
    assert read_zebin(elf.zebin([elf.Section(".bss", type=elf.NOBITS, claimed_size=1 << 60)])).kernels == ()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not an ELF file"),
        (b"PAR1" * 50, "not an ELF file"),
        (b"\x7fELF", "cut short"),
        (elf.zebin([], machine=elf.X86_64), "machine 62"),
        (elf.zebin([], bits=1), "not a 64-bit little-endian"),
        (elf.zebin([], order=2), "not a 64-bit little-endian"),
        (elf.zebin([], table=0), "no section table"),
        (elf.zebin([], table=1 << 63), "section table starts at"),
        (elf.zebin([], count=65000), "table of 65000 entries"),
        (elf.zebin([], count=0), "section names are missing"),
        (elf.zebin([], entry_size=40), "entries of 40 bytes"),
        (elf.zebin([elf.Section(".text.k", b"", claimed_size=1 << 62)]), "cut short: a section ends"),
        (elf.zebin([elf.Section(".text.k", b"", claimed_offset=1 << 62)]), "cut short: a section ends"),
        (elf.zebin([elf.Section(".symtab", bytes(24), type=elf.SYMTAB, link=900, entry_size=24)]), "symbol table"),
        (elf.zebin([elf.Section(".symtab", bytes(24), type=elf.SYMTAB, link=1, entry_size=3)]), "symbol table"),
    ],
)
def test_invalid_zebins_are_refused_in_one_sentence(data: bytes, why: str) -> None:
    with pytest.raises(CodeObjectError, match=why) as caught:
        read_zebin(data)
    assert isinstance(caught.value, IaprofError)
    assert "\n" not in str(caught.value)


def test_overlapping_sections_and_names_are_refused(within: Within) -> None:
    """Copying shared sections and names naively would expand the file thousands of times."""
    code = elf.zebin([elf.Section(f".text.{number}", claimed_offset=0, claimed_size=60_000) for number in range(2000)])
    with pytest.raises(CodeObjectError, match="overlap"):
        read_zebin(code)
    many = [elf.Symbol("", 0, 0) for _ in range(20_000)]
    data = bytearray(elf.zebin([elf.kernel("k"), elf.Section("x" * 10)], [elf.Symbol("a" * 50_000, 0, 0), *many]))
    names = data.index(b"\0" + b"a" * 50_000)
    table = names - 24 * (len(many) + 2)
    for index in range(2, len(many) + 2):
        data[table + 24 * index : table + 24 * index + 4] = (1).to_bytes(4, "little")
    with within(2), pytest.raises(CodeObjectError, match="names overlap"):
        read_zebin(bytes(data))


def test_truncated_zebins_are_refused() -> None:
    whole = debug_elf("bmg", "attention")
    for length in [*range(0, 1400, 7), *range(1400, len(whole), 97)]:
        with pytest.raises(CodeObjectError):
            read_zebin(whole[:length])


def test_flipped_bytes_raise_only_zebin_errors() -> None:
    whole = debug_elf("ptl", "matmul")
    generator = random.Random(4)
    refused, copies = 0, 2000
    for _ in range(copies):
        data = bytearray(whole)
        for _ in range(generator.randint(1, 8)):
            # The tables are at both ends; code and text between them is skipped.
            position = generator.choice([generator.randrange(1700), generator.randrange(len(data))])
            data[position] = generator.randrange(256)
        try:
            read_zebin(bytes(data))
        except CodeObjectError as error:
            assert str(error)
            refused += 1
    assert copies / 10 < refused < copies
