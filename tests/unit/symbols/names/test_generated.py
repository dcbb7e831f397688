"""Names for generated code: perf maps and jitdumps, also hostile ones, read in a sandbox."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.sandbox.parent import Limits
from iaprof.symbols.files import generated_reader, symbol_lists
from iaprof.symbols.files.symbol_lists import read_perf_map
from iaprof.symbols.names.names import LONGEST_NAME, LONGEST_READ, Frame, Symbolized, is_shortened, shortened
from iaprof.symbols.symbolizers.generated import GeneratedCode
from limits import Within
from unit.jitdumps import HEADER, close, debug_info, header, load, move, unwinding_info

LAST = (1 << 64) - 1


def words(*numbers: int) -> NDArray[np.uint64]:
    return np.array(numbers, np.uint64)


def mapped(text: bytes, *addresses: int) -> dict[int, str]:
    """The names that a perf map has for the addresses."""
    names, _ = read_perf_map(text, words(*addresses))
    return {addresses[index]: name for index, name in names.items()}


@pytest.fixture
def generated() -> Iterator[GeneratedCode]:
    with GeneratedCode() as made:
        yield made


def name(
    generated: GeneratedCode,
    folder: Path,
    perf_map: bytes | None,
    jitdumps: list[bytes],
    *queries: int | tuple[int, int],
) -> tuple[Symbolized, dict[int, Frame]]:
    """Names addresses, or addresses at times; returns the answer, and the frame of each address."""
    pairs = [query if isinstance(query, tuple) else (query, 1000) for query in queries]
    files = []
    for index, content in enumerate([perf_map or b"", *jitdumps]):
        (folder / str(index)).write_bytes(content)
        files.append(os.open(folder / str(index), os.O_RDONLY))
    try:
        addresses, times = (words(*column) for column in zip(*pairs, strict=True))
        symbolized = generated.name(None if perf_map is None else files[0], files[1:], addresses, times)
    finally:
        for file in files:
            os.close(file)
    rows = symbolized.names.find(addresses)
    frames = {a: symbolized.names.frames(row) for (a, _), row in zip(pairs, rows.tolist(), strict=True) if row >= 0}
    assert all(len(chain) == 1 for chain in frames.values())
    return symbolized, {address: chain[0] for address, chain in frames.items()}


# Perf maps


def test_a_line_names_its_range() -> None:
    text = b"1000 20 py::train:/src/model.py\n0x2000 0x10 with 0x\n3000\t8\ttabs\nABCdef 1 cases"
    assert mapped(text, 0xFFF, 0x1000, 0x101F, 0x1020, 0x200F, 0x3007, 0xABCDEF) == {
        0x1000: "py::train:/src/model.py",
        0x101F: "py::train:/src/model.py",
        0x200F: "with 0x",
        0x3007: "tabs",
        0xABCDEF: "cases",
    }


def test_names_are_not_changed() -> None:
    text = "10 1 a b  c \n20 1 a;b\"c'<b>&amp;\x00\x1b[31m\n30 1 ätsch ☃\n".encode()
    assert mapped(text, 0x10, 0x20, 0x30) == {
        0x10: "a b  c ",
        0x20: "a;b\"c'<b>&amp;\x00\x1b[31m",
        0x30: "ätsch ☃",
    }


def test_bytes_that_are_not_utf8_are_escaped() -> None:
    assert mapped(b"10 1 caf\xe9\xff\n", 0x10) == {0x10: "caf\\xe9\\xff"}


@pytest.mark.parametrize("chunk", [16, 50, symbol_lists.CHUNK])
def test_later_lines_win(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    # given overlapping ranges, and chunks of several sizes
    monkeypatch.setattr(symbol_lists, "CHUNK", chunk)
    rng = np.random.default_rng(chunk)
    ranges = [(int(start), int(size), f"f{i}") for i, (start, size) in enumerate(rng.integers(1, 200, (300, 2)))]
    text = "".join(f"{start:x} {size:x} {name}\n" for start, size, name in ranges).encode()
    # when
    names = mapped(text, *range(420))
    # then
    expected = {address: name for start, size, name in ranges for address in range(start, start + size)}
    assert names == {address: name for address, name in expected.items() if address < 420}


HOSTILE_LINES = [
    b"",
    b" ",
    b"1000",
    b"1000 ",
    b"1000 20",
    b"1000 20 ",  # no name
    b"1000 0 nothing",
    b"1000  20 two spaces",
    b" 1000 20 indented",
    b"-1000 20 negative",
    b"0x 20 no digits",
    b"1000 0x name",
    b"10000000000001000 20 seventeen digits",
    b"1000 10000000000000020 seventeen digits",
    b"1000,20,name",
    b"\x00\x00\x00",
    b"1000\x00 20 name",
    b"\xff\xfe1\x000\x000\x00",
    b"name 20 1000",
]


@pytest.mark.parametrize("line", HOSTILE_LINES)
def test_damaged_lines_are_counted_and_skipped(line: bytes) -> None:
    # given a damaged line between good ones
    text = b"1000 20 good\n" + line + b"\n2000 20 other\n"
    # when
    names, skipped = read_perf_map(text, words(0x1000, 0x2000))
    # then
    assert names == {0: "good", 1: "other"}
    assert skipped == (1 if line else 0)


def test_ranges_at_the_end_of_the_address_space() -> None:
    text = b"ffffffffffffff00 ffffffffffffffff wraps\nfffffffffffffff0 f last\n0 1 first\n"
    names = mapped(text, 0, 0xFF, LAST - 255, LAST - 1, LAST)
    assert names == {0: "first", LAST - 255: "wraps", LAST - 1: "last"}


def test_a_long_name_is_cut() -> None:
    names = mapped(b"10 1 " + "☃".encode() * 1_000_000 + b"\n20 1 b", 0x10, 0x20)
    assert names[0x20] == "b"
    assert names[0x10].startswith("☃" * 5_000)
    assert is_shortened(names[0x10])
    assert LONGEST_NAME - 3 < len(names[0x10].encode()) <= LONGEST_NAME


def test_a_line_longer_than_a_chunk_is_skipped() -> None:
    # given
    long = b"1000 20 " + b"x" * (2 * symbol_lists.CHUNK)
    # when
    for text in (long, b"2000 20 before\n" + long + b"\n3000 20 behind\n"):
        names, skipped = read_perf_map(text, words(0x1000, 0x2000, 0x3000))
        # then
        assert names == ({} if text is long else {1: "before", 2: "behind"})
        assert skipped == 1


def test_no_addresses_or_an_empty_perf_map_give_no_names() -> None:
    assert read_perf_map(b"10 1 a\n", words()) == ({}, 0)
    assert read_perf_map(b"", words(1)) == ({}, 0)


def test_a_million_lines_take_less_than_a_second(within: Within) -> None:
    # given
    text = b"".join(b"%x 30 py::function_%d:/some/file.py\n" % (0x7F0000000000 + i * 64, i) for i in range(1_000_000))
    addresses = np.arange(0, 1_000_000, 50).astype(np.uint64) * np.uint64(64) + np.uint64(0x7F0000000011)
    # when
    begin = time.process_time()
    names, skipped = read_perf_map(text, addresses)
    took = time.process_time() - begin
    # then
    assert names == {i: f"py::function_{i * 50}:/some/file.py" for i in range(20_000)}
    assert skipped == 0
    within.took(took, 1)


# Jitdumps


def test_code_is_there_from_its_load_until_other_code_replaces_it(generated: GeneratedCode, tmp_path: Path) -> None:
    # given a second function that later covers the end of the first
    dump = header() + load(100, 0x1000, b"\x90" * 64, "first") + load(200, 0x1030, b"\x90" * 64, "second") + close(300)
    addresses = [0x1000, 0x103F, 0x106F]
    for time_ns, expected in (
        (99, {}),
        (100, {0x1000: "first", 0x103F: "first"}),
        (200, {0x1000: "first", 0x103F: "second", 0x106F: "second"}),
    ):
        # when
        symbolized, frames = name(generated, tmp_path, None, [dump], *((address, time_ns) for address in addresses))
        # then
        assert {address: frame.function for address, frame in frames.items()} == expected
        assert symbolized.problem == ""
        assert symbolized.source == ("jitdump" if expected else "")


def test_debug_information_gives_files_and_lines(generated: GeneratedCode, tmp_path: Path) -> None:
    # given entries out of order, and one that repeats the file of the entry before
    entries = [(0x1020, 12, b"/src/b.js"), (0x1030, 13, b"\xff"), (0x1004, 11, b"/src/a.js")]
    dump = header() + debug_info(90, 0x1000, entries) + load(100, 0x1000, b"\x90" * 64, "f")
    dump += load(100, 0x2000, b"\x90" * 64, "g") + unwinding_info(110)
    # when
    _, frames = name(generated, tmp_path, None, [dump], 0x1000, 0x1004, 0x1021, 0x103F, 0x2000)
    # then
    assert frames == {
        0x1000: Frame("f"),
        0x1004: Frame("f", "/src/a.js", 11),
        0x1021: Frame("f", "/src/b.js", 12),
        0x103F: Frame("f", "/src/b.js", 13),
        0x2000: Frame("g"),
    }


def test_moved_code_keeps_its_name_and_lines(generated: GeneratedCode, tmp_path: Path) -> None:
    # given
    dump = header() + debug_info(90, 0x1000, [(0x1008, 7, b"a.js")]) + load(100, 0x1000, b"\x90" * 64, "f", number=5)
    dump += move(200, 0x1000, 0x9000, 64, number=5) + move(200, 0x1000, 0xA000, 64, number=6)
    # when
    _, before = name(generated, tmp_path, None, [dump], (0x9010, 199))
    _, after = name(generated, tmp_path, None, [dump], (0x9010, 200), (0xA000, 300))
    # then
    assert before == {}
    assert after == {0x9010: Frame("f", "a.js", 7)}


def test_without_usable_times_the_last_load_counts(generated: GeneratedCode, tmp_path: Path) -> None:
    # given times of the processor's time-stamp counter, which are far from CLOCK_MONOTONIC's
    dump = header(flags=1) + load(1 << 60, 0x1000, b"\x90", "old") + load(1 << 59, 0x1000, b"\x90", "new")
    # when
    _, frames = name(generated, tmp_path, None, [dump], (0x1000, 5))
    # then
    assert frames == {0x1000: Frame("new")}


def test_a_jitdump_goes_before_the_perf_map(generated: GeneratedCode, tmp_path: Path) -> None:
    # given
    perf_map = b"1000 10 map\n2000 10 map\n3000 10 map\n"
    first = header() + load(100, 0x1000, b"\x90" * 16, "dump")
    second = header() + load(100, 0x1000, b"\x90" * 16, "other") + load(100, 0x2000, b"\x90" * 16, "other")
    # when
    symbolized, frames = name(generated, tmp_path, perf_map, [first, second], 0x1000, 0x2000, 0x3000, 0x4000)
    # then
    assert {address: frame.function for address, frame in frames.items()} == {
        0x1000: "dump",
        0x2000: "other",
        0x3000: "map",
    }
    assert symbolized.source == "jitdump and perf map"
    assert symbolized.problem == ""
    assert symbolized.names.sizes.tolist() == [1, 1, 1]


WHOLE = header() + load(100, 0x1000, b"\x90" * 64, "first") + load(100, 0x2000, b"\x90" * 64, "second")


def test_a_truncated_jitdump_is_read_up_to_its_last_whole_record(generated: GeneratedCode, tmp_path: Path) -> None:
    second = len(header() + load(100, 0x1000, b"\x90" * 64, "first"))
    for length in range(0, len(WHOLE), 3):
        # when
        symbolized, frames = name(generated, tmp_path, None, [WHOLE[:length]], 0x1000, 0x2000)
        # then all whole records are read
        assert [frame.function for frame in frames.values()] == (["first"] if length >= second else [])
        assert symbolized.problem == ("its jitdump: it is too short for a jitdump" if length < HEADER.size else "")


@pytest.mark.parametrize(
    ("dump", "problem"),
    [
        (b"\x00" * 64, "it is not a jitdump"),
        (header()[3::-1] + header()[4:], "it was written by a machine of the other byte order"),
        (header(version=2), "it is a jitdump of version 2, of which only 1 can be read"),
        (header(size=8), "its header is damaged"),
        (header(size=1 << 31), "its header is damaged"),
    ],
)
def test_files_that_are_not_usable_jitdumps_are_refused(
    generated: GeneratedCode, tmp_path: Path, dump: bytes, problem: str
) -> None:
    symbolized, frames = name(generated, tmp_path, b"1000 1 map\n", [dump], 0x1000)
    assert symbolized.problem == f"its jitdump: {problem}"
    assert frames == {0x1000: Frame("map")}


@pytest.mark.parametrize("size", [0, 1, 15])
def test_a_record_with_an_invalid_size_ends_the_reading(generated: GeneratedCode, tmp_path: Path, size: int) -> None:
    dump = WHOLE + b"\x00\x00\x00\x00" + size.to_bytes(4, "little") + bytes(100) + load(1, 0x3000, b"\x90", "behind")
    symbolized, frames = name(generated, tmp_path, None, [dump], 0x1000, 0x2000, 0x3000)
    assert [frame.function for frame in frames.values()] == ["first", "second"]
    assert symbolized.problem == f"its jitdump: it is damaged at byte {len(WHOLE)}"


def test_absurd_numbers_in_a_jitdump_do_no_harm(generated: GeneratedCode, tmp_path: Path) -> None:
    # given
    dump = header()
    dump += load(100, 0x1000, b"", "endless", code_size=LAST) + load(100, LAST, b"", "last", code_size=LAST)
    dump += load(100, 0x500, b"", "empty") + load(100, 0x3000, b"\x90", "no end of its name", terminated=False)
    dump += debug_info(90, 0x4000, [(LAST, 0xFFFFFFFF, b"x.js")], count=LAST) + load(100, 0x4000, b"\x90" * 8, "lines")
    dump += debug_info(90, 0x5000, [(0, 0xFFFFFFFF, b"y.js")], count=LAST) + load(100, 0x5000, b"\x90" * 8, "more")
    dump += load(LAST, 0x6000, b"\x90", "at the end of time") + b"\x02\x00\x00\x00\x10\x00\x00\x00" + bytes(8)
    # when
    symbolized, frames = name(generated, tmp_path, None, [dump], 0x500, 0x1000, 0x4000, 0x5000, 0x6000, LAST - 1, LAST)
    # then
    assert frames == {
        0x1000: Frame("endless"),
        0x4000: Frame("lines"),
        0x5000: Frame("more", "y.js", 0xFFFFFFFF),
        0x6000: Frame("endless"),
        LAST - 1: Frame("endless"),
    }
    assert symbolized.problem == ""


def test_the_number_of_lines_read_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    # given two functions of three lines each, and a limit of four lines
    monkeypatch.setattr(generated_reader, "MOST_LINES", 4)
    dump = header()
    for address in (0x1000, 0x2000):
        lines = [(address + 16 * i, 1 + i, b"a.js") for i in range(3)]
        dump += debug_info(90, address, lines) + load(100, address, b"\x90" * 64, "f")
    # when
    addresses = words(0x1000, 0x1020, 0x2000, 0x2020)
    jitdump = generated_reader.read_jitdump(dump, addresses, words(1000, 1000, 1000, 1000))
    # then
    assert [frame.line for _, frame in sorted(jitdump.frames.items())] == [1, 3, 1, 1]
    assert jitdump.problem == "it has more than 4 lines, of which the first were read"


def test_hostile_names_in_a_jitdump(generated: GeneratedCode, tmp_path: Path) -> None:
    # given
    dump = header() + debug_info(1, 0x10, [(0x10, 1, b"/\xff\xfe\n;.js")]) + load(1, 0x10, b"\x90", "a;b\nc<d>\"'")
    dump += load(1, 0x20, b"\x90", b"\xc3(") + load(1, 0x30, b"\x90", "ü" * 1_000_000) + load(1, 0x40, b"\x90", "")
    # when
    symbolized, frames = name(generated, tmp_path, None, [dump], 0x10, 0x20, 0x30, 0x40)
    # then
    assert frames == {
        0x10: Frame("a;b\nc<d>\"'", "/\\xff\\xfe\n;.js", 1),
        0x20: Frame("\\xc3("),
        0x30: Frame(shortened("ü" * (LONGEST_READ // 2))),
    }
    assert symbolized.problem == ""


# Bounds


def test_a_file_of_200_mb_costs_bounded_time_and_memory(tmp_path: Path, within: Within) -> None:
    # given lines that each cover all addresses, and then an endless one
    addresses = np.arange(0x1000, 0x1000 + 20_000, dtype=np.uint64)
    path = tmp_path / "perf.map"
    with path.open("wb") as file:
        for _ in range(40):
            file.write(b"0 ffffffffffff f\n" * (120_000_000 // 40 // 17))
        file.write(b"1000 10 ")
        file.truncate(200_000_000)
    with GeneratedCode() as generated, path.open("rb") as file:
        # when
        with within(20):
            symbolized = generated.name(file.fileno(), [], addresses, addresses)
        memory = peak_memory(generated)
    # then
    assert len(symbolized.names) == 20_000
    assert symbolized.problem == "its perf map: 1 of its lines is damaged"
    assert memory < 600 << 20


def test_a_jitdump_of_small_records_costs_bounded_time_and_memory(tmp_path: Path, within: Within) -> None:
    # given records that each cover all addresses
    (tmp_path / "dump").write_bytes(header() + load(1, 0x1000, b"", "f", code_size=1 << 20) * 500_000)
    addresses = np.arange(0x1000, 0x1000 + 20_000, dtype=np.uint64)
    with GeneratedCode() as generated, (tmp_path / "dump").open("rb") as file:
        # when
        with within(10):
            symbolized = generated.name(None, [file.fileno()], addresses, addresses)
        memory = peak_memory(generated)
    # then
    assert len(symbolized.names) == 20_000
    assert symbolized.problem == ""
    assert memory < 400 << 20


def test_the_number_of_records_read_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_reader, "MOST_RECORDS", 2)
    for dump, more in ((WHOLE, b""), (WHOLE, load(100, 0x3000, b"\x90", "third")), (WHOLE, close(100))):
        jitdump = generated_reader.read_jitdump(dump + more, words(0x1000, 0x2000, 0x3000), words(100, 100, 100))
        assert [frame.function for _, frame in sorted(jitdump.frames.items())] == ["first", "second"]
        assert jitdump.problem == ("it has more than 2 records, of which the first were read" if more else "")


def peak_memory(generated: GeneratedCode) -> int:
    """The peak memory of the child, bytes."""
    text = Path(f"/proc/{generated._sandbox.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM:"))


def test_names_beyond_the_limit_of_an_answer_are_dropped(generated: GeneratedCode, tmp_path: Path) -> None:
    # given 2,000 names of the greatest length, of characters that take the most bytes
    text = "".join(f"{0x1000 + i:x} 1 {i:04}{'😀' * LONGEST_NAME}\n" for i in range(2000)).encode()
    # when
    symbolized, frames = name(generated, tmp_path, text, [], *range(0x1000, 0x1000 + 2000))
    # then
    assert 800 < len(frames) < 1200
    assert all(is_shortened(frame.function) for frame in frames.values())
    assert "longer than 4194304 characters together" in symbolized.problem


def test_a_child_that_takes_too_long_costs_only_names(tmp_path: Path) -> None:
    with GeneratedCode(Limits(seconds=0.0, files=1)) as generated:
        symbolized, frames = name(generated, tmp_path, b"10 1 a\n", [], 0x10)
    assert frames == {}
    assert symbolized.problem.startswith("its perf map: ")


HONEST: dict[str, Any] = {
    "index": [0], "function": [0], "file": [0], "line": [0], "strings": ["a"], "problem": "",
}  # fmt: skip


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"index": [0]},
        HONEST | {"index": [2]},
        HONEST | {"index": [-1]},
        HONEST | {"index": [0, 0], "function": [0, 0], "file": [0, 0], "line": [0, 0]},
        HONEST | {"function": [1]},
        HONEST | {"file": [True]},
        HONEST | {"line": []},
        HONEST | {"line": [1 << 32]},
        HONEST | {"strings": ["a" * (LONGEST_NAME + 1)]},
        HONEST | {"strings": ["\ud800"]},
        HONEST | {"strings": "a"},
        HONEST | {"problem": None},
    ],
)
def test_invalid_answers_of_the_child_name_nothing(
    generated: GeneratedCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    monkeypatch.setattr(generated._sandbox, "call", lambda *_args, **_more: answer)
    symbolized, frames = name(generated, tmp_path, b"10 1 a\n", [], 0x10, 0x20)
    assert frames == {}
    assert symbolized.problem == "its perf map: the reader process answered nonsense"
