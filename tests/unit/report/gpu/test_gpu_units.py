"""Units of debug information without addresses: Intel's compiler leaves the names of kernels' section symbols empty.

The modules are real (tests/data/zebin/build.sh says how they came about): the driver could not place four of the five
units of lnl's, and three of pvc's. vectors.lines.txt is what readelf says of the zebin that the driver was given, in
which every unit starts at 0.
"""

import re

import pytest

from iaprof.gpu.code import CodeKernel
from iaprof.gpu.intel.zebin import read_sections, read_zebin
from iaprof.record.kernels.dumped import PlacedKernel, compose
from iaprof.report.gpu.frames import UnitCode, place_units, read_debug_info
from iaprof.report.gpu.functions import FunctionTree, Scope
from iaprof.report.gpu.lines import LineRange
from unit.zebins import FOLDER, SOURCES, debug_elf, plain_zebin

UNPLACED = {"lnl": {"shift", "copy", "scan", "first"}, "pvc": {"copy", "first", "second"}}
NAMES = ["shift", "copy", "scan", "first", "second"]
FILE = f"{SOURCES}/vectors.cl"


def source_lines() -> dict[str, range]:
    """Where each function stands in the source: up to the brace that ends it."""
    found, name, start = {}, "", 0
    for number, line in enumerate((FOLDER / "src" / "vectors.cl").read_text().splitlines(), 1):
        if header := re.match(r"(?:__kernel void|static float) (\w+)\(", line):
            name, start = header[1], number
        elif line == "}":
            found[name] = range(start, number + 1)
    return found


def line_tables(device: str) -> dict[str, list[tuple[int, int | None]]]:
    """Offsets and lines of each kernel, from readelf; whose a table is, the line that it starts with tells."""
    tables: list[list[tuple[int, int | None]]] = [[]]
    for text in (FOLDER / device / "vectors.lines.txt").read_text().splitlines():
        if row := re.fullmatch(r"vectors\.cl +(\d+|-) +(?:0x)?([0-9a-f]+)(?: +x)? *", text):
            tables[-1].append((int(row[2], 16), None if row[1] == "-" else int(row[1])))
            if row[1] == "-":
                tables.append([])
    assert tables.pop() == []
    functions = source_lines()
    return {next(name for name in NAMES if table[0][1] in functions[name]): table for table in tables}


def check(data: bytes, device: str, launched: list[str]) -> None:
    """Each kernel's code has the file and line that readelf gives, and the functions around it hold those lines."""
    read = read_debug_info(data, read_zebin(data))
    assert read.problems == ()
    kernels, tables, functions = read_zebin(data).kernels, line_tables(device), source_lines()
    assert [kernel.name for kernel in kernels] == launched
    for kernel in kernels:
        table = tables[kernel.name]
        segments = read.segments(kernel)
        for offset in range(0, table[-1][0], 8):
            (frames,) = [segment.frames for segment in segments if segment.offset <= offset][-1:]
            line = [line for at, line in table if at <= offset][-1]
            assert (frames[-1].file, frames[-1].line) == (FILE, line), (kernel.name, hex(offset))
            assert frames[0].function == kernel.name
            if line and line not in functions[kernel.name]:
                assert [frame.function for frame in frames] == [kernel.name, "weigh"]
                assert frames[0].line in functions[kernel.name]
        assert segments[-1].offset <= table[-1][0]


@pytest.mark.parametrize("device", UNPLACED)
def test_the_driver_left_units_at_zero(device: str) -> None:
    """Else the other tests show nothing: what .debug_info says of them has no address."""
    assert set(line_tables(device)) == set(NAMES)
    data = debug_elf(device, "vectors")
    section = next(section for section in read_sections(data) if section.name == ".debug_info")
    info = data[section.offset : section.offset + section.size]
    addresses = {kernel.name: kernel.address for kernel in read_zebin(data).kernels}
    sizes = {name: table[-1][0] for name, table in line_tables(device).items()}
    for name in NAMES:
        start = next(each.address for each in read_sections(data) if each.name == f".text.{name}")
        placed = start.to_bytes(8, "little") + (start + sizes[name]).to_bytes(8, "little")
        assert (placed in info) == (name not in UNPLACED[device]), name
        assert addresses[name]


@pytest.mark.parametrize("device", UNPLACED)
def test_every_kernel_has_its_own_lines_in_the_drivers_debug_elf(device: str) -> None:
    check(debug_elf(device, "vectors"), device, NAMES)


@pytest.mark.parametrize("device", UNPLACED)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_and_in_what_is_made_of_launched_kernels(device: str, count: int) -> None:
    """Units of kernels that were not launched are nobody's, although some have the size of one that was."""
    data = debug_elf(device, "vectors")
    texts = {section.name: section for section in read_sections(data)}
    kernels = [
        PlacedKernel(name, texts[f".text.{name}"].address, kernel.code)
        for name, kernel in zip(NAMES, read_zebin(data).kernels, strict=True)
    ]
    for first in range(len(NAMES) - count + 1):
        some = kernels[first : first + count]
        check(compose(plain_zebin(device, "vectors"), some), device, [kernel.name for kernel in some])


class Functions(FunctionTree):
    """Stands in for what was read of functions: their number is their name's place in this list."""

    def __init__(self, *names: set[str]) -> None:
        super().__init__()
        self._of_each = names

    def names(self, function: int | None) -> set[str]:
        return self._of_each[function or 0]


def kernel(name: str, address: int, size: int, code: int = 256) -> CodeKernel:
    return CodeKernel(name, address, size, bytes(code), ())


def unit(function: int, end: int, start: int = 0, lines: int | None = None) -> UnitCode:
    """A unit of one function, whose lines start where it does unless another address is given."""
    outer = Scope(None, function, [(start, end)])
    inner = Scope(outer, None, [(start + 16, start + 32)])
    at = start if lines is None else lines
    return UnitCode([[outer, inner]], [LineRange(at, at + 16, "a.cl", 3)])


def places(each: UnitCode) -> list[int]:
    return [each.functions[0][0].ranges[0][0], each.functions[0][1].ranges[0][0] - 16, each.lines[0].start]


K, L, M = kernel("k", 0x1000, 64), kernel("_Z1lv", 0x2000, 128), kernel("m", 0x3000, 64)


def test_a_mangled_name_counts_as_well() -> None:
    units = [unit(0, 64), unit(1, 64)]
    assert place_units(units, [K, L], (), Functions({"l", "_Z1lv"}, {"k"})) == []
    assert [places(each) for each in units] == [[0x2000] * 3, [0x1000] * 3]


@pytest.mark.parametrize(("start", "lines"), [(0x1000, 0), (0, 0x1000)])
def test_a_unit_that_is_placed_in_part_needs_no_name(start: int, lines: int) -> None:
    one = unit(0, start + 64, start, lines)
    assert place_units([one], [K, L, M], (), Functions({"m"})) == []
    assert places(one) == [0x1000] * 3


def test_without_a_name_the_only_one_of_its_size_counts() -> None:
    units = [unit(0, 128), unit(1, 64), unit(2, 64)]
    assert place_units(units, [K, L, M], (), Functions({"?"}, {"m"}, {"!"})) == []
    assert [places(each) for each in units] == [[0x2000] * 3, [0x3000] * 3, [0x1000] * 3]


def test_the_last_unit_is_the_last_kernels_if_it_fits() -> None:
    units = [unit(0, 64), unit(1, 40)]
    assert place_units(units, [K, L], (), Functions({"k"}, {"?"})) == []
    assert places(units[1]) == [0x2000] * 3

    large = unit(0, 200)
    assert place_units([large], [kernel("k", 0x1000, 64, code=64)], (), Functions({"k"})) == []
    assert places(large) == [0] * 3


def test_what_could_be_several_kernels_stays_where_it_is_and_is_told() -> None:
    units = [unit(0, 64), unit(1, 64)]
    assert place_units(units, [K, M], (), Functions({"first"}, {"second"})) == [
        "it is not known which kernel the source lines of first belong to",
        "it is not known which kernel the source lines of second belong to",
    ]
    assert [places(each) for each in units] == [[0] * 3] * 2


def test_two_of_one_name_are_told_apart_by_nothing() -> None:
    units = [unit(0, 64), unit(0, 64)]
    place_units(units, [K, L], (), Functions({"k"}))
    assert [places(each) for each in units] == [[0] * 3] * 2


def test_nothing_is_told_where_no_kernel_lacks_lines() -> None:
    units = [unit(0, 0x1040, 0x1000), unit(1, 64)]
    assert place_units(units, [K], (), Functions({"k"}, {"helper"})) == []
    assert places(units[1]) == [0] * 3


def test_a_kernel_that_was_not_launched_is_no_other_one() -> None:
    one = unit(0, 64)
    assert place_units([one], [K], {"m"}, Functions({"m"})) == []
    assert places(one) == [0] * 3
