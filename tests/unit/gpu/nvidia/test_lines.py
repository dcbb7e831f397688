"""The lines of cubins, against what nvdisasm -gi says of the same ones, and hostile tables."""

from __future__ import annotations

import pytest

from iaprof.gpu.code import CodeObjectError, CodePlace
from iaprof.gpu.nvidia.cubin import read_cubin
from iaprof.gpu.nvidia.lines import read_lines
from limits import Within
from unit.gpu.nvidia.cubins import AT_START, END, PLAIN, WITH_LINES, inlined, row, with_lines

SOURCE = "/src/kernels.cu"
SCALED = "_Z6scaledff"


def places(data: bytes) -> dict[int, list[tuple[str, str, int]]]:
    """By offset: the places, of the only kernel."""
    (lines,) = read_lines(data).values()
    return {offset: [(each.function, each.file, each.line) for each in found] for offset, found in lines}


def test_lines_and_inlined_calls_of_a_real_cubin() -> None:
    scale, reduce = read_cubin(WITH_LINES).kernels
    lines = read_lines(WITH_LINES)
    assert lines.keys() == {scale.address, reduce.address}
    call, inside = CodePlace("", SOURCE, 16), CodePlace(SCALED, SOURCE, 2)
    assert lines[scale.address] == (
        (0x000, (CodePlace("", SOURCE, 13),)),
        (0x010, (CodePlace("", SOURCE, 14),)),
        (0x050, (CodePlace("", SOURCE, 15),)),
        (0x080, (call,)),
        (0x0D0, (call, inside)),
        (0x0E0, (call,)),
        (0x0F0, (call, inside)),
        (0x100, (call,)),
        (0x110, (CodePlace("", SOURCE, 17),)),
        (0x200, ()),
    )
    of_reduce = dict(lines[reduce.address])
    assert of_reduce[0] == (CodePlace("", SOURCE, 21),)
    assert of_reduce[0x5E0] == (CodePlace("", SOURCE, 8), CodePlace(SCALED, SOURCE, 2))


def test_a_cubin_without_lines() -> None:
    assert read_lines(PLAIN) == {}


def test_inlined_calls_nest() -> None:
    program = AT_START + row(0, 9) + inlined(1, 1) + row(0, 1, file=2) + inlined(2, 4) + row(0, 4)
    program += inlined(0, 0) + row(16, 2) + b"\x02\x10" + END
    assert places(with_lines(program, b"\0of\0in\0")) == {
        0: [("", "a.cu", 10), ("of", "/b/c.h", 11), ("in", "/b/c.h", 15)],
        16: [("", "/b/c.h", 17)],
        32: [],
    }


def test_calls_of_later_rows_and_files_that_are_none() -> None:
    program = AT_START + inlined(1, 0) + row(0, 1) + inlined(77, 0) + row(16, 1) + row(16, 1, file=99) + END
    assert places(with_lines(program, b"f\0")) == {0: [("", "a.cu", 2)], 16: [("", "a.cu", 3)], 32: []}


def test_what_is_damaged_is_left_out() -> None:
    for program in (
        AT_START + row(0, 1),  # it does not end
        AT_START + b"\x02" + b"\xff" * 40 + END,  # an endless number
        AT_START + b"\0\x7f\x90",  # an opcode longer than the table
        b"\0\x09\x02" + bytes(3),
    ):
        assert read_lines(with_lines(program)) == {}
    assert read_lines(with_lines(AT_START + row(0, 1) + END, relocations=0)) == {}
    negative = AT_START + b"\x03\x40\x01\x02\x10" + END  # line 1 - 64
    assert places(with_lines(negative)) == {0: [("", "a.cu", 0)], 16: []}


def test_a_table_of_rows_only(within: Within) -> None:
    """Four megabytes of rows at most of one byte: more than are kept."""
    with within(30):
        assert read_lines(with_lines(AT_START + b"\x20" * (4 << 20) + END)) == {}


def test_deep_chains_of_calls(within: Within) -> None:
    program = AT_START + b"".join(inlined(number, 0) + b"\x20" for number in range(100_000)) + END
    with within(30):
        found = places(with_lines(program, b"f\0"))
    assert max(map(len, found.values())) == 32


def test_names_that_overlap(within: Within) -> None:
    """A hundred thousand calls whose names share a megabyte."""
    calls = b"".join(inlined(1, number) + b"\x20" for number in range(1, 100_000))
    with within(30), pytest.raises(CodeObjectError, match="its names overlap"):
        read_lines(with_lines(AT_START + b"\x20" + calls + END, b"x" * (1 << 20)))


def test_many_relocations(within: Within) -> None:
    with within(10):
        assert read_lines(with_lines(AT_START + row(0, 1) + END, relocations=300_000))
