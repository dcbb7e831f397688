"""Lines and inlined functions of GPU code: what readelf says of real kernels, and DWARF made by hand."""

from collections.abc import Callable, Sequence

import pytest

from iaprof.gpu.intel.zebin import read_zebin
from iaprof.report.gpu.frames import DwarfFrame, read_debug_info
from iaprof.symbols.names.demangle import demangled
from limits import Within
from unit import elfwriter as elf
from unit.elfwriter import Addr, Die
from unit.zebins import KERNELS, MODULES, SOURCES, debug_elf, disassembly, line_rows

START = 0xFFFF_8000_0000_1000


def frames_by_offset(data: bytes, kernel: int = 0) -> Callable[[int], tuple[DwarfFrame, ...]]:
    """A function that gives the frames at an offset of a kernel."""
    read = read_debug_info(data, read_zebin(data))
    segments = read.segments(read_zebin(data).kernels[kernel])
    assert segments[0].offset == 0
    assert [segment.offset for segment in segments] == sorted({segment.offset for segment in segments})
    return lambda offset: [segment.frames for segment in segments if segment.offset <= offset][-1]


def names(frames: Sequence[DwarfFrame]) -> list[str]:
    return [frame.function for frame in frames]


@pytest.mark.parametrize(("device", "module"), MODULES)
def test_every_instruction_has_the_file_and_line_that_readelf_gives(device: str, module: str) -> None:
    data = debug_elf(device, module)
    rows = line_rows(device, module)
    kernels = read_zebin(data).kernels
    assert [kernel.name for kernel in kernels] == KERNELS[module]
    for number, kernel in enumerate(kernels):
        frames = frames_by_offset(data, number)
        checked = 0
        for offset, _ in disassembly(device, module, kernel.name):
            innermost = frames(offset)[-1]
            assert (innermost.file, innermost.line) == rows.at(kernel.address + offset), hex(offset)
            checked += innermost.line > 0
        assert checked > 50


@pytest.mark.parametrize("device", ["bmg", "lnl", "pvc", "ptl"])
def test_inlined_functions_of_the_cpp_kernel(device: str) -> None:
    data = debug_elf(device, "attention")
    (kernel,) = read_zebin(data).kernels
    frames = frames_by_offset(data)
    stacks = {frames(offset) for offset, _ in disassembly(device, "attention", kernel.name)}
    main, reduce = f"{SOURCES}/attention.clcpp", f"{SOURCES}/lib/reduce.h"
    workgroup = "float reduce::workgroup<float, reduce::{}>(float, float AS3*)"
    dot = "nn::Row<float, 64>::dot(float const AS1*) const"
    assert (DwarfFrame("attention_scores", main, 25), DwarfFrame(dot, main, 12)) in stacks
    assert (
        DwarfFrame("attention_scores", main, 25),
        DwarfFrame("float nn::scale<float>(float, float)", main, 5),
    ) in stacks
    for operation, call, line in (("Max", 29, 4), ("Sum", 36, 7)):
        assert (
            DwarfFrame("attention_scores", main, call),
            DwarfFrame(workgroup.format(operation), reduce, 16),
            DwarfFrame(f"reduce::{operation}::apply(float, float)", reduce, line),
        ) in stacks
    # Whatever stands in reduce.h, or in a function above the kernel, is inside an inlined call.
    for stack in stacks:
        assert stack[0].function == "attention_scores"
        if stack[-1].file == reduce or 0 < stack[-1].line < 18:
            assert len(stack) > 1, stack


@pytest.mark.parametrize("device", ["bmg", "lnl", "pvc", "ptl"])
def test_inlined_functions_of_the_c_kernels(device: str) -> None:
    data = debug_elf(device, "matmul")
    seen = []
    for number, name in enumerate(KERNELS["matmul"]):
        frames = frames_by_offset(data, number)
        stacks = {tuple(names(frames(offset))) for offset, _ in disassembly(device, "matmul", name)}
        assert all(stack[0] == name for stack in stacks)
        seen.append({stack[1:] for stack in stacks})
    assert seen == [{()}, {(), ("dot_row",)}, {(), ("load_tile",), ("multiply_tile",)}]


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_ZNU3AS4K2nn3RowIfLi64EE3dotEPU3AS1Kf", "nn::Row<float, 64>::dot(float const AS1*) const"),
        ("_ZNU3AS46reduce3Max5applyEff", "reduce::Max::apply(float, float)"),
        ("_ZZ4mainENU3AS4KUlvE_clEv", "main::{lambda()#1}::operator()() const"),
        ("_ZZNU3AS4K1A1fEvENU3AS4KUlvE_clEv", "A::f() const::{lambda()#1}::operator()() const"),
        ("_ZNU3AS43FooaSERU3AS4KS_", "Foo::operator=(Foo const AS4&)"),
        ("_ZNU9CLgenericK3Row3dotEPU8CLglobalKf", "Row::dot(float const CLglobal*) const"),
        ("_Z3addPU3AS1fPU3AS3VKf", "add(float AS1*, float const volatile AS3*)"),
        ("_Z4NU3Av", "NU3A()"),
        ("_ZN2nn5scaleIfEET_S1_S1_", "float nn::scale<float>(float, float)"),
        ("_ZTSZ4mainEUlvE_", "main::{lambda()#1}"),
        ("_ZZ4mainENKUlN4sycl4itemEiE_clES0_i", "main::{lambda(sycl::item, int)#1}::operator() const"),
        ("_ZZ4mainENUlN4sycl7nd_itemILi2EEEE_clES1_", "main::{lambda(sycl::nd_item<2>)#1}::operator()"),
        ("_ZZ4mainENU3AS4KUlN4sycl4itemEE_clES0_", "main::{lambda(sycl::item)#1}::operator() const"),
        ("_ZZ4mainENKUlRN4sycl4itemEE_clES1_", "main::{lambda(sycl::item&)#1}::operator()(sycl::item&) const"),
        ("multiply_basic", "multiply_basic"),
        ("_Znonsense", "_Znonsense"),
        ("_ZNU3AS4", "_ZNU3AS4"),
        ("_ZNU" + "9" * 6000, "_ZNU" + "9" * 6000),
        ("_Z1f" + "i" * 20_000, "_Z1f" + "i" * 20_000),
        ("", ""),
    ],
)
def test_demangled(symbol: str, name: str) -> None:
    assert demangled(symbol) == name


def module(
    *children: Die,
    rows: list[tuple[int, int, int | None]] | None = None,
    files: list[str] | None = None,
    symbols: list[elf.Symbol] | None = None,
    ranges: bytes = b"",
) -> bytes:
    """A kernel `k` of 128 bytes at START with one unit that has these children."""
    unit = Die(
        elf.COMPILE_UNIT,
        {elf.NAME: "a.cl", elf.COMP_DIR: "/src", elf.STMT_LIST: 0, elf.LOW_PC: Addr(START), elf.HIGH_PC: 128},
        list(children),
    )
    return elf.zebin([elf.kernel("k", bytes(128), START), *elf.dwarf(unit, rows, files, ranges)], symbols)


def function(name: str, start: int | None = None, size: int = 0, *children: Die, **attributes: int) -> Die:
    place = {} if start is None else {elf.LOW_PC: Addr(START + start), elf.HIGH_PC: size}
    declared = {elf.DECL_FILE: 1, elf.DECL_LINE: attributes.get("line", 1)}
    return Die(elf.SUBPROGRAM, {elf.NAME: name, **declared, **place}, list(children))


def inlined(origin: Die, line: int, start: int | None = None, size: int = 0, *children: Die) -> Die:
    place = {} if start is None else {elf.LOW_PC: Addr(START + start), elf.HIGH_PC: size}
    return Die(elf.INLINED, {elf.ORIGIN: origin, elf.CALL_FILE: 1, elf.CALL_LINE: line, **place}, list(children))


def test_rows_last_until_the_next_and_their_sequence_ends() -> None:
    rows = [(START, 1, 3), (START + 16, 1, 4), (START + 16, 2, 5), (START + 32, 2, 0), (START + 48, 2, None)]
    frames = frames_by_offset(module(function("k", 0, 64), rows=rows, files=["a.cl", "b.h"]))
    assert frames(0) == frames(8) == (DwarfFrame("k", "/src/a.cl", 3),)
    assert frames(16) == (DwarfFrame("k", "/src/b.h", 5),)
    assert frames(32) == (DwarfFrame("k", "/src/b.h", 0),)
    assert frames(48) == frames(100) == (DwarfFrame("k", "", 0),)


def test_wrong_file_numbers_name_no_file() -> None:
    frames = frames_by_offset(module(rows=[(START, 7, 3), (START + 16, 0, 4), (START + 32, 1, None)]))
    assert (frames(0), frames(16)) == ((DwarfFrame("k", "", 3),), (DwarfFrame("k", "", 4),))


def test_line_numbers_below_zero_are_none() -> None:
    frames = frames_by_offset(module(rows=[(START, 1, -5), (START + 32, 1, None)]))
    assert frames(0) == (DwarfFrame("k", "/src/a.cl", 0),)


def test_calls_inside_calls_are_outermost_first() -> None:
    inner, outer = function("inner", line=50), function("outer", line=60)
    block = Die(elf.BLOCK, {elf.LOW_PC: Addr(START + 16), elf.HIGH_PC: 64}, [inlined(inner, 61, 32, 16)])
    kernel = function("k", 0, 128, inlined(outer, 7, 16, 64, block), line=69)
    lines = [(0, 70), (16, 60), (32, 51), (48, 62), (80, 71), (128, None)]
    frames = frames_by_offset(module(inner, outer, kernel, rows=[(START + offset, 1, line) for offset, line in lines]))
    assert names(frames(0)) == ["k"]
    assert names(frames(16)) == ["k", "outer"]
    assert [(frame.function, frame.line) for frame in frames(32)] == [("k", 7), ("outer", 61), ("inner", 51)]
    assert names(frames(48)) == ["k", "outer"]
    assert names(frames(80)) == ["k"]


def test_a_call_without_addresses_is_found_by_its_lines() -> None:
    """Of two calls of one function the nearer one; and never one whose lines these are not."""
    helper = function("helper", line=3)
    near = Die(elf.BLOCK, {elf.LOW_PC: Addr(START + 64), elf.HIGH_PC: 32}, [inlined(helper, 22)])
    far = Die(elf.BLOCK, {elf.LOW_PC: Addr(START), elf.HIGH_PC: 16}, [inlined(helper, 21)])
    rows = [(START, 1, 21), (START + 64, 1, 4), (START + 80, 1, 22), (START + 128, 1, None)]
    frames = frames_by_offset(module(helper, function("k", 0, 128, far, near, line=20), rows=rows))
    assert [(frame.function, frame.line) for frame in frames(64)] == [("k", 22), ("helper", 4)]
    assert names(frames(0)) == names(frames(80)) == ["k"]


def test_lines_behind_a_lambda_are_not_the_lambdas() -> None:
    """A lambda is declared inside the function around it: the lines that follow may be either's."""
    closure = function("operator()", line=21)
    outer = function("k", 0, 128, Die(elf.CLASS, {}, [closure]), inlined(closure, 25), line=20)
    frames = frames_by_offset(module(outer, rows=[(START, 1, 30), (START + 128, 1, None)]))
    assert names(frames(0)) == ["k"]


def test_names_come_through_origins_and_specifications() -> None:
    declared = Die(elf.SUBPROGRAM, {elf.NAME: "f", elf.LINKAGE: "_ZN1n1C1fEv"})
    defined = Die(elf.SUBPROGRAM, {elf.SPECIFICATION: declared})
    plain = Die(elf.SUBPROGRAM, {elf.NAME: "g"})
    space = Die(elf.NAMESPACE, {elf.NAME: "n"}, [Die(elf.CLASS, {elf.NAME: "C"}, [declared, plain])])
    kernel = function("k", 0, 128, inlined(defined, 1, 0, 16), inlined(plain, 2, 16, 16), inlined(space, 3, 32, 16))
    frames = frames_by_offset(module(space, defined, kernel))
    assert names(frames(0)) == ["k", "n::C::f()"]
    assert names(frames(16)) == ["k", "n::C::g"]
    assert names(frames(32)) == ["k", "[unnamed function]"]


def test_a_subroutine_stands_under_its_kernel() -> None:
    data = module(function("k", 0, 64), function("sub", 64, 32), rows=[(START, 1, 9), (START + 128, 1, None)])
    assert names(frames_by_offset(data)(64)) == ["k", "sub"]
    data = module(symbols=[elf.Symbol("k", 0, START, 64), elf.Symbol("_Z3subv", 0, START + 64, 32)])
    frames = frames_by_offset(data)
    assert [names(frames(offset)) for offset in (0, 64, 96)] == [["k"], ["k", "sub()"], ["k"]]


def test_functions_that_kernels_share_and_call_are_frames_without_one() -> None:
    """The compiler puts them into a section of their own, the first of them at its beginning."""
    symbols = [elf.Symbol("_Z3onev", 0, START, 64), elf.Symbol("_Z3twov", 0, START + 64, 64)]
    sections = [elf.kernel("Intel_Symbol_Table_Void_Program", bytes(128), START)]
    for parts in (
        [],
        elf.dwarf(Die(elf.COMPILE_UNIT, {}, [function("one()", 0, 64), function("two()", 64, 64)])),
    ):
        frames = frames_by_offset(elf.zebin([*sections, *parts], symbols))
        assert names(frames(0)) == ["[called functions]", "one()"]
        assert names(frames(64)) == ["[called functions]", "two()"]


def test_references_that_loop() -> None:
    one, two = Die(elf.SUBPROGRAM), Die(elf.SUBPROGRAM)
    one.attributes, two.attributes = {elf.ORIGIN: two}, {elf.SPECIFICATION: one}
    itself = Die(elf.SUBPROGRAM)
    itself.attributes = {elf.ORIGIN: itself, elf.SIBLING: itself}
    kernel = function("k", 0, 128, inlined(one, 1, 0, 16), inlined(itself, 2, 16, 16))
    frames = frames_by_offset(module(one, two, itself, kernel, rows=[(START, 1, 3), (START + 128, 1, None)]))
    assert names(frames(0)) == names(frames(16)) == ["k", "[unnamed function]"]


def test_calls_nested_without_end_are_cut() -> None:
    helper = function("h")
    deep = inlined(helper, 0, 0, 128)
    for line in range(300):
        deep = inlined(helper, line, 0, 128, deep)
    frames = frames_by_offset(module(helper, function("k", 0, 128, deep)))
    assert 50 < len(frames(0)) < 200


def test_siblings_that_point_back_are_not_followed(within: Within) -> None:
    kernel = function("k", 0, 128)
    child = Die(elf.BLOCK, {elf.SIBLING: kernel}, [Die(elf.BLOCK)])
    kernel.children = [child, inlined(function("other"), 1, 0, 16)]
    with within(1):
        assert names(frames_by_offset(module(kernel))(0)) == ["k", "[unnamed function]"]


@pytest.mark.parametrize(
    "damage",
    [
        (".debug_abbrev", b"\x01\x11\x01\x03"),  # ends in the middle
        (".debug_abbrev", b"\x01\x11\x01" + b"\x03\x08" * 5000),  # without an end
        (".debug_abbrev", b"\x01\x11\x01\x03\x16\x00\x00\x00"),  # a form that is in the entry (DW_FORM_indirect) ...
        (".debug_info", b"\xff" * 200),
        (
            ".debug_info",
            b"\x14\x00\x00\x00\x04\x00\x00\x00\x00\x00\x08" + b"\x01" + b"\x16" * 200,
        ),  # ... again and again
        (".debug_info", b"\x07\x00\x00\x00\x04\x00\x00\x00\x00\x00\x08" * 50),  # units without entries
        (".debug_line", b"\xff" * 20),
        (".debug_line", b"\x10\x00\x00\x00\x04\x00\xff\xff\xff\x00" + b"\x01" * 10),
    ],
)
def test_damaged_parts_cost_their_frames_and_are_told(damage: tuple[str, bytes], within: Within) -> None:
    unit = Die(elf.COMPILE_UNIT, {elf.NAME: "a.cl", elf.STMT_LIST: 0}, [function("k", 0, 128)])
    sections = elf.dwarf(unit, [(START, 1, 3), (START + 128, 1, None)])
    for section in sections:
        if section.name == damage[0]:
            section.data = damage[1]
    data = elf.zebin([elf.kernel("k", bytes(128), START), *sections])
    with within(5):
        read = read_debug_info(data, read_zebin(data))
        (segment, *_) = read.segments(read_zebin(data).kernels[0])
        assert segment.frames[0].function == "k"
        assert read.problems
