"""Lines of instructions, compared with those that interpreters report for their whole standard library."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies
from numpy.typing import NDArray

from iaprof.symbols.python.code_objects import BEFORE_THE_FIRST, NO_LINE, lines_of
from pythons.interpreters import HERE, NAMES, output_of, started_as
from thorough import thorough

HEAD = struct.Struct("<iii")
LIBRARY = "import sysconfig; print(sysconfig.get_path('stdlib'))"


def codes_of(written: bytes) -> Iterator[tuple[int, bytes, NDArray[np.int32]]]:
    """First line, location table and lines of each code object that all_lines.py wrote."""
    at = 0
    while at < len(written):
        first, table_bytes, count = HEAD.unpack_from(written, at)
        table = at + HEAD.size
        at = table + table_bytes + 4 * count
        yield first, written[table : table + table_bytes], np.frombuffer(written, "<i4", count, table + table_bytes)


@pytest.mark.parametrize(("name", "options"), [*((name, "") for name in NAMES), ("own", "-Xno_debug_ranges")])
@thorough
def test_lines_equal_those_of_the_interpreter(name: str, options: str, tmp_path: Path) -> None:
    python = [*started_as(name), *options.split()]
    library = Path(output_of(python, "-c", LIBRARY).strip())
    files = sorted(path for path in library.rglob("*.py") if path.is_file() and "-packages" not in str(path))
    output_of(python, HERE / "all_lines.py", tmp_path / "lines", *files)
    codes = instructions = 0
    for first, table, lines in codes_of((tmp_path / "lines").read_bytes()):
        assert lines_of(table, first, range(0, 2 * len(lines), 2)).tolist() == lines.tolist()
        codes, instructions = codes + 1, instructions + len(lines)
    print(f"{len(files)} files, {codes} code objects, {instructions} instructions")
    assert codes > 10_000


def function() -> tuple[int, ...]:
    first = len("one")
    with open("/dev/null") as file:
        second = file.fileno()
    return tuple(
        first
        for number in range(second)
        if number
        > 3
    )  # fmt: skip


TABLE, FIRST = function.__code__.co_linetable, function.__code__.co_firstlineno
LINES = [line or NO_LINE for line, _, _, _ in function.__code__.co_positions()]


def lines_of_units(table: bytes, first: int = FIRST) -> list[int]:
    return [int(line) for line in lines_of(table, first, range(0, 2 * len(LINES), 2))]


def test_offsets_come_in_any_order_and_an_odd_one_is_in_the_instruction() -> None:
    assert len(set(LINES)) > 4
    offsets = [2 * number + random.Random(1).randrange(2) for number in range(len(LINES))]
    random.Random(2).shuffle(offsets)
    assert lines_of(TABLE, FIRST, offsets).tolist() == [LINES[offset // 2] for offset in offsets]
    assert lines_of(TABLE, FIRST, []).tolist() == []


def test_before_the_first_instruction_is_the_first_line_and_outside_is_none() -> None:
    outside = [-(1 << 62), -4, -1, 2 * len(LINES), 1 << 62]
    assert lines_of(TABLE, FIRST, outside).tolist() == [NO_LINE] * len(outside)
    assert lines_of(TABLE, FIRST, [BEFORE_THE_FIRST]).tolist() == [FIRST]


def test_a_cut_table_covers_the_instructions_before_the_cut() -> None:
    reached = []
    for size in range(len(TABLE) + 1):
        lines = lines_of_units(TABLE[:size])
        known = next((number for number, line in enumerate(lines) if line != LINES[number]), len(LINES))
        assert not any(lines[known:])
        reached.append(known)
    assert reached == sorted(reached)
    assert reached[-1] == len(LINES)
    assert len(set(reached)) > 10


def entry(code: int, units: int, *rest: int) -> bytes:
    return bytes([0x80 | code << 3 | units - 1, *rest])


NO_COLUMNS, LONG, NO_LOCATION = 13, 14, 15


HOSTILE = {
    "empty": (b"", 5, [0, 0, 0]),
    "no entry": (b"\x05\x05", 5, [0, 0, 0]),
    "a byte before the first entry": (b"\x05" + entry(0, 1, 0), 5, [0, 0, 0]),
    "backwards": (entry(NO_COLUMNS, 1, 2) + entry(NO_COLUMNS, 1, 5), 5, [6, 4, 0]),
    "no location": (entry(NO_LOCATION, 1) + entry(11, 1, 0, 0), 5, [0, 6, 0]),
    "an endless number": (entry(0, 1, 0) + entry(NO_COLUMNS, 1, *[0x7F] * 1000), 5, [5, 0, 0]),
    "the longest number": (entry(0, 1, 0) + entry(NO_COLUMNS, 1, *[0x40] * 5, 0) + entry(0, 1, 0), 5, [5, 5, 5]),
    "a longer number": (entry(0, 1, 0) + entry(NO_COLUMNS, 1, *[0x40] * 6, 0) + entry(0, 1, 0), 5, [5, 0, 0]),
    "a missing number": (entry(0, 1, 0) + entry(LONG, 1) + entry(0, 1, 0), 5, [5, 0, 0]),
    "beyond the largest line": (entry(NO_COLUMNS, 1, *[0x7E] * 5, 0x3F) + entry(0, 1, 0), 5, [0, 0, 0]),
    "below the first line": (entry(NO_COLUMNS, 1, 0x0D) + entry(12, 1, 0, 0), 5, [0, 1, 0]),
    "the largest line": (entry(0, 1, 0), (1 << 31) - 1, [(1 << 31) - 1, 0, 0]),
    "a negative first line": (entry(0, 1, 0), -7, [0, 0, 0]),
    "an absurd first line": (entry(0, 1, 0), 1 << 62, [0, 0, 0]),
}


@pytest.mark.parametrize(("table", "first", "lines"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_tables(table: bytes, first: int, lines: list[int]) -> None:
    assert lines_of(table, first, [0, 2, 4]).tolist() == lines


@given(table=strategies.binary(max_size=200), first=strategies.integers(-(1 << 31), (1 << 31) - 1))
def test_any_table_gives_lines(table: bytes, first: int) -> None:
    lines = lines_of(table, first, [-2, *range(0, 64, 2)])
    assert lines.min() >= NO_LINE
    assert lines.max() < 1 << 31


@pytest.mark.parametrize(
    "unit", [b"\x80", b"\x7f", entry(NO_COLUMNS, 8, *[0x7E] * 5, 0x3F), entry(LONG, 1, *[0x40] * 9)]
)
def test_time_grows_with_the_table_only(unit: bytes) -> None:
    table = unit * ((1 << 22) // len(unit))
    began = time.process_time()
    lines_of(table, 1, np.arange(1 << 16) * 999)
    assert time.process_time() - began < 10
