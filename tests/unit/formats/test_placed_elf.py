"""Debug ELFs made for drivers without probes: they contain what the driver's own debug ELFs do, or less."""

import struct

import pytest
from hypothesis import given, strategies as st

from iaprof.gpu.code import CodeFunction, canonical
from iaprof.gpu.intel.zebin import CALLED_FUNCTIONS, placed_ranges, read_sections, read_zebin
from iaprof.record.kernels.dumped import MOST_KERNELS, PlacedKernel, compose
from iaprof.report.gpu.frames import read_debug_info
from limits import Within
from unit import elfwriter as elf
from unit.zebins import KERNELS, MODULES, debug_elf, plain_zebin

HIGH = 0xFFFF_8000_0000_1000


def launched(device: str, module: str) -> list[PlacedKernel]:
    """All kernels of a module, from the driver's debug ELF."""
    data = debug_elf(device, module)
    texts = [section for section in read_sections(data) if section.name.startswith(".text.")]
    names = [section.name.removeprefix(".text.") for section in texts]
    return [
        PlacedKernel(name, text.address, data[text.offset : text.offset + text.size])
        for name, text in zip(names, texts, strict=True)
    ]


def contents(data: bytes) -> dict[str, tuple[int, bytes]]:
    """Address and bytes of each section, by name."""
    return {s.name: (s.address, data[s.offset : s.offset + s.size]) for s in read_sections(data) if s.size}


def found(data: bytes) -> list[tuple[str, int, bytes]]:
    """Name, address and code of the kernels."""
    return [(kernel.name, kernel.address, kernel.code) for kernel in read_zebin(data).kernels]


def expected(kernels: list[PlacedKernel]) -> list[tuple[str, int, bytes]]:
    return [(kernel.name, canonical(kernel.address), kernel.code) for kernel in kernels]


@pytest.mark.parametrize(("device", "module"), MODULES)
def test_it_is_what_the_driver_would_have_said(device: str, module: str) -> None:
    driver = debug_elf(device, module)
    made = compose(plain_zebin(device, module), launched(device, module))

    assert read_zebin(made) == read_zebin(driver)
    assert contents(made) == contents(driver)
    assert [start for start, _ in placed_ranges(made)] == [start for start, _ in placed_ranges(driver)]
    ours, theirs = (read_debug_info(each, read_zebin(each)) for each in (made, driver))
    assert ours.problems == theirs.problems == ()
    for kernel in read_zebin(made).kernels:
        segments = ours.segments(kernel)
        assert len(segments) > 10
        assert segments == theirs.segments(kernel)


def test_the_code_is_that_which_ran() -> None:
    """The driver writes addresses into the code and pads it; both are still the same kernel."""
    (kernel,) = launched("bmg", "attention")
    (plain,) = read_zebin(plain_zebin("bmg", "attention")).kernels
    code = bytearray(kernel.code)
    for offset, size in plain.relocations:
        code[offset : offset + size] = b"\xaa" * size

    made = compose(plain_zebin("bmg", "attention"), [PlacedKernel(kernel.name, kernel.address, bytes(code) + b"pad")])

    (ran,) = read_zebin(made).kernels
    assert ran.code == code
    assert ran.code != plain.code
    assert ran.fingerprint == plain.fingerprint
    assert read_zebin(made).has_debug


@pytest.mark.parametrize("length", [0, 100])
def test_where_code_could_not_be_had_the_zebins_stays(length: int) -> None:
    (kernel,) = launched("bmg", "attention")
    made = compose(plain_zebin("bmg", "attention"), [PlacedKernel(kernel.name, kernel.address, kernel.code[:length])])
    assert found(made) == expected([kernel])


@pytest.mark.parametrize("address", [HIGH, 0x8000_0000_1000, 0x40])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_kernels_that_were_not_launched_are_not_there(number: int, address: int) -> None:
    """Nor are their lines, not even at the small addresses that they have in the zebin."""
    theirs = read_zebin(debug_elf("lnl", "matmul")).kernels[number]
    launch = PlacedKernel(theirs.name, address, theirs.code)

    made = compose(plain_zebin("lnl", "matmul"), [launch])

    assert found(made) == expected([launch])
    assert placed_ranges(made) == [(canonical(address), len(theirs.code))]
    (ours,) = read_zebin(made).kernels
    assert ours.fingerprint == theirs.fingerprint
    read = read_debug_info(made, read_zebin(made))
    assert read.problems == ()
    driver = debug_elf("lnl", "matmul")
    assert read.segments(ours) == read_debug_info(driver, read_zebin(driver)).segments(theirs)


def relocated(*entries: tuple[int, int, int, int], info: int = 2, count: int = 1) -> bytes:
    """A zebin of kernel `k` with a DWARF section of 24 bytes; entries are offset, kind, symbol and addend."""
    data = b"".join(struct.pack("<QIIq", *entry) for entry in entries)
    sections = [elf.kernel("k", bytes(64)), elf.Section(".debug_info", bytes(24))]
    sections += [elf.Section(".rela.debug_info", data, type=elf.RELA, info=info)] * count
    symbols = [
        elf.Symbol("k", 0, 0, 32),
        elf.Symbol("f", 0, 32, 16),
        elf.Symbol(".text.k", 1, 0, type=elf.NOTYPE),
        elf.Symbol(".debug_info", 1, 0, type=elf.NOTYPE),
        elf.Symbol("absolute", 0xFFF1 - 1, 7, type=elf.NOTYPE),
    ]
    return elf.zebin(sections, symbols, type=elf.REL)


@pytest.mark.parametrize(
    ("entry", "written"),
    [
        ((0, 1, 1, 4), struct.pack("<QQQ", HIGH + 4, 0, 0)),
        ((16, 1, 3, -1), struct.pack("<QQQ", 0, 0, HIGH - 1)),
        ((3, 2, 2, 0), struct.pack("<3xI17x", (HIGH + 32) & 0xFFFF_FFFF)),
        ((20, 3, 2, 0), struct.pack("<20xI", (HIGH + 32) >> 32)),
        ((0, 1, 4, 12), struct.pack("<QQQ", 12, 0, 0)),
        ((0, 1, 5, 0), struct.pack("<QQQ", 7, 0, 0)),
        ((0, 4, 1, 0), bytes(24)),
        ((17, 1, 1, 0), bytes(24)),
        ((1 << 63, 2, 1, 0), bytes(24)),
        ((0, 1, 6, 9), bytes(24)),
    ],
    ids=["8", "by section", "low", "high", "offset in DWARF", "absolute", "other kind", "over", "far", "no symbol"],
)
def test_relocations(entry: tuple[int, int, int, int], written: bytes) -> None:
    made = compose(relocated(entry), [PlacedKernel("k", HIGH, bytes(64))])
    assert contents(made)[".debug_info"] == (0, written)
    (kernel,) = read_zebin(made).kernels
    assert (kernel.address, kernel.size) == (canonical(HIGH), 32)
    assert kernel.functions == (CodeFunction("f", 32, 16),)


def test_functions_that_kernels_call_have_no_address() -> None:
    zebin = elf.zebin([elf.kernel("k", b"1" * 64), elf.kernel(CALLED_FUNCTIONS, b"2" * 64)], type=elf.REL)
    kernels = [PlacedKernel("k", HIGH, b"1" * 64)]
    assert found(compose(zebin, kernels)) == expected(kernels)


TWO = elf.zebin([elf.kernel("k", b"1" * 64), elf.kernel("l", b"2" * 64)], type=elf.REL)
TWICE = elf.zebin([elf.kernel("k", b"1" * 64), elf.kernel("k", b"1" * 64)], type=elf.REL)
OVER = elf.zebin([elf.Section(".text.k", claimed_offset=0, claimed_size=200)], type=elf.REL)


K = PlacedKernel("k", HIGH, b"1" * 64)
NOT_THEIRS = {
    "not known": (None, [K, PlacedKernel("l", 0x2000, b"2" * 64)]),
    "empty": (b"", [K]),
    "cut short": (TWO[:-1], [K]),
    "without one": (TWO, [K, PlacedKernel("m", 0x2000, b"3" * 64)]),
    "other code": (TWO, [PlacedKernel("k", HIGH, b"2" * 64)]),
    "no code": (elf.zebin([elf.kernel("k", b"")]), [K]),
    "two of a name": (TWO, [K, PlacedKernel("k", 0x2000, b"1" * 64)]),
    "two of a name there": (TWICE, [K]),
    "two of a name each": (TWICE, [K, PlacedKernel("k", 0x2000, b"1" * 64)]),
    "code over the tables": (OVER, [PlacedKernel("k", HIGH, OVER[:200])]),
    "relocations of nothing": (relocated((0, 1, 1, 0), info=9000), [PlacedKernel("k", HIGH, bytes(64))]),
    "many relocations": (relocated((0, 1, 1, 0), count=65), [PlacedKernel("k", HIGH, bytes(64))]),
}


@pytest.mark.parametrize(("binary", "kernels"), NOT_THEIRS.values(), ids=NOT_THEIRS)
def test_without_the_zebin_the_kernels_are_there(binary: bytes | None, kernels: list[PlacedKernel]) -> None:
    made = compose(binary, kernels)

    assert made == compose(None, kernels), "nothing of another module's"
    assert found(made) == expected(kernels)
    assert placed_ranges(made) == [(canonical(kernel.address), len(kernel.code)) for kernel in kernels]


@pytest.mark.parametrize("binary", [None, TWO])
def test_no_kernels(binary: bytes | None) -> None:
    made = compose(binary, [])
    assert found(made) == []
    assert placed_ranges(made) == []


@pytest.mark.parametrize("binary", [None, TWO])
def test_odd_places_are_kept(binary: bytes | None) -> None:
    """Overlapping kernels, at address 0 and at the highest addresses: the report has to deal with them."""
    kernels = [PlacedKernel("k", (1 << 64) - 32, b"1" * 64), PlacedKernel("l", (1 << 64) - 16, b"2" * 64)]
    assert found(compose(binary, kernels)) == expected(kernels)
    assert found(compose(binary, [PlacedKernel("k", 0, b"1" * 64)])) == [("k", 0, b"1" * 64)]


def test_odd_names() -> None:
    kernels = [PlacedKernel("_ZTSZ4mainEUlvE_ ü\n", 0x1000, b""), PlacedKernel("", 0x2000, b"1")]
    kernels += [PlacedKernel("\udcff", 0x3000, b"2"), PlacedKernel("a\0b", 0x4000, b"3")]
    assert found(compose(None, kernels)) == [
        ("_ZTSZ4mainEUlvE_ ü\n", 0x1000, b""),
        ("\\udcff", 0x3000, b"2"),
        ("a", 0x4000, b"3"),
    ]


def test_more_kernels_than_an_elf_file_has_room_for() -> None:
    made = compose(None, [PlacedKernel("k", 0x1000, b"")] * (MOST_KERNELS + 1000))
    assert placed_ranges(made) == [(0x1000, 0)] * MOST_KERNELS


def test_symbols_for_other_tools() -> None:
    made = compose(None, [PlacedKernel("k", HIGH, b"1" * 64), PlacedKernel("longer", 0x2000, b"2" * 16)])
    strings, symbols = (contents(made)[name][1] for name in (".strtab", ".symtab"))
    assert [
        (strings[name : strings.index(b"\0", name)], section, value, size)
        for name, _, _, section, value, size in struct.iter_unpack("<IBBHQQ", symbols)
    ] == [(b"", 0, 0, 0), (b"k", 3, HIGH, 64), (b"longer", 4, 0x2000, 16)]


def test_relocations_that_share_their_bytes(within: Within) -> None:
    """A million relocations take no time; sections that share the same bytes again and again are refused."""
    plain = relocated(*[(0, 1, 1, 0)] * 1_000_000)
    with within(5):
        made = compose(plain, [PlacedKernel("k", HIGH, bytes(64))])
        assert contents(made)[".debug_info"] == (0, struct.pack("<QQQ", HIGH, 0, 0))
    (table,) = [section for section in read_sections(plain) if section.type == elf.RELA]
    name, size = ".rela.debug_info", table.size - 4096
    again = elf.Section(name, type=elf.RELA, info=2, claimed_offset=table.offset, claimed_size=size)
    sections = [elf.kernel("k", bytes(64)), elf.Section(".debug_info", bytes(24)), *[again] * 30]
    bomb = elf.zebin([*sections, elf.Section("what they share", bytes(table.size))])
    assert read_zebin(bomb).has_debug
    assert not read_zebin(compose(bomb, [PlacedKernel("k", HIGH, bytes(64))])).has_debug


@given(st.data())
def test_damaged_zebins(data: st.DataObject) -> None:
    """Whatever the zebin is, the launched kernels are there with their names and addresses."""
    device, module = data.draw(st.sampled_from([("bmg", "attention"), ("ptl", "matmul")]))
    binary, kernels = bytearray(plain_zebin(device, module)), launched(device, module)
    tables = [section for section in read_sections(bytes(binary)) if section.name in (".symtab", ".rela.debug_info")]
    spans = [(0, 64), (int.from_bytes(binary[40:48], "little"), len(binary)), (0, len(binary))]
    spans += [(table.offset, table.offset + table.size) for table in tables]
    for _ in range(data.draw(st.integers(0, 5))):
        first, end = data.draw(st.sampled_from(spans))
        binary[data.draw(st.integers(first, end - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.one_of(st.just(len(binary)), st.integers(0, len(binary))))

    made = compose(bytes(binary[:length]), kernels)

    ran = {kernel.name: kernel for kernel in read_zebin(made).kernels}
    assert sorted(ran) == sorted(KERNELS[module])
    assert len(placed_ranges(made)) == len(kernels)
    for kernel in kernels:
        assert ran[kernel.name].address == canonical(kernel.address)
        both = min(len(kernel.code), len(ran[kernel.name].code))  # the zebin says where a kernel ends
        assert both > 0
        assert ran[kernel.name].code[:both] == kernel.code[:both]
