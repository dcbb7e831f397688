"""Symbol tables, conversion of offsets and addresses, and SymCaches, each made by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from iaprof.basics.elf import ElfError, in_memory
from iaprof.symbols.files.elf import Elf, Functions, SymbolTable, functions_of
from iaprof.symbols.files.symcache import HEADER_BYTES, VERSION, SymCache, SymCacheError, range_count

LOCAL, GLOBAL, WEAK = 0, 1, 2
FUNCTION = 2


def table(*symbols: tuple[str, int, int, int], section_end: int = 1 << 20) -> SymbolTable:
    """A table of (name, address, size, binding) functions."""
    names, entries = b"\0", b""
    for name, address, size, binding in symbols:
        entries += struct.pack("<IBBHQQ", len(names), binding << 4 | FUNCTION, 0, 1, address, size)
        names += name.encode() + b"\0"
    form = [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
    return SymbolTable(np.frombuffer(entries, form), np.full(len(symbols), section_end, np.uint64), names)


def name_at(functions: Functions, address: int) -> str:
    (name,) = functions.names_of(functions.find(np.array([address], np.uint64)), 100)
    return name.decode()


@pytest.mark.parametrize(
    ("symbols", "names"),
    [
        ([("a", 100, 10, GLOBAL), ("b", 120, 5, GLOBAL)], {99: "", 100: "a", 109: "a", 110: "", 124: "b", 125: ""}),
        ([("a", 100, 0, GLOBAL), ("b", 120, 0, GLOBAL)], {100: "a", 119: "a", 120: "b", 999: "b", 1000: ""}),
        ([("weak", 100, 9, WEAK), ("local", 100, 9, LOCAL), ("global", 100, 9, GLOBAL)], {104: "global"}),
        ([("local", 100, 9, LOCAL), ("weak", 100, 9, WEAK)], {104: "weak"}),
        ([("small", 100, 2, GLOBAL), ("large", 100, 9, LOCAL)], {100: "large", 104: "large"}),
        ([("outer", 100, 50, GLOBAL), ("inner", 120, 5, LOCAL)], {119: "outer", 122: "inner", 130: ""}),
        ([("endless", 100, (1 << 64) - 1, GLOBAL), ("b", 120, 5, LOCAL)], {122: "b", 105: ""}),
        ([("last", (1 << 64) - 8, 8, GLOBAL)], {(1 << 64) - 1: "", 5: ""}),
    ],
)
def test_the_function_of_an_address(symbols: list[tuple[str, int, int, int]], names: dict[int, str]) -> None:
    functions = functions_of([table(*symbols, section_end=1000)])
    assert {address: name_at(functions, address) for address in names} == names


def test_the_first_of_two_symbol_tables_counts() -> None:
    functions = functions_of([table(("good", 100, 9, GLOBAL)), SymbolTable(), table(("poor", 100, 9, GLOBAL))])
    assert name_at(functions, 104) == "good"
    assert functions.tables.tolist() == [0]
    assert functions_of([]).find(np.array([1], np.uint64)).tolist() == [-1]


def test_long_symbol_names_are_cut() -> None:
    functions = functions_of([table(("x" * 500, 100, 9, GLOBAL))])
    assert name_at(functions, 100) == "x" * 100


def segments(*loads: tuple[int, int, int]) -> Elf:
    """An ELF file with (offset, address, size in the file) segments."""
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01", 3, 62, 1, 0, 64, 0, 0, 64, 56, len(loads), 64, 0, 0)
    entries = b"".join(struct.pack("<IIQQQQQQ", 1, 5, at, address, 0, size, size, 0) for at, address, size in loads)
    content = head + entries
    return Elf(in_memory(content))


def test_offsets_are_converted_to_addresses_and_back() -> None:
    elf = segments((0, 0x400000, 0x1000), (0x1000, 0x402000, 0x800))
    offsets = np.array([0, 0xFFF, 0x1000, 0x17FF, 0x1800, (1 << 64) - 1], np.uint64)
    addresses, known = elf.addresses(offsets)
    assert addresses[known].tolist() == [0x400000, 0x400FFF, 0x402000, 0x4027FF]
    assert known.tolist() == [True] * 4 + [False] * 2
    back, in_file = elf.offsets(addresses[known])
    assert back.tolist() == offsets[:4].tolist()
    assert in_file.all()
    assert elf.first_address == 0x400000


def test_segments_may_overlap_or_wrap_around() -> None:
    elf = segments((0, 0x1000, 0x1000), (0, 0x9000, 1 << 63), ((1 << 64) - 1, (1 << 64) - 1, (1 << 64) - 1))
    addresses, known = elf.addresses(np.array([0x10, 0x1000], np.uint64))
    assert addresses.tolist() == [0x1010, 0xA000]
    assert known.all()


def symcache(
    locations: list[tuple[int, int, int, int]], ranges: list[int], functions: int = 1, *, version: int = VERSION
) -> bytes:
    """A SymCache with (file, line, function, caller) locations, the last of which belong to the ranges.

    Each function is called f.
    """
    head = struct.pack("<4sI32xIIIIII16x", b"SYMC", version, 3, 1, functions, len(locations), len(ranges), 100)
    body = struct.pack("<6I", 3, 6, 9, *[0xFFFFFFFF] * 3)
    body += struct.pack("<4I", 0, 0, 0, 0) * functions
    body += b"".join(struct.pack("<4I", *location) for location in locations)
    body += struct.pack(f"<{len(ranges)}I", *ranges) + bytes(-4 * len(ranges) % 8)
    return head + body + b"\x01f\0" + b"\x02/a" + b"\x01b\0" + b"\x03c.c" + b"\xff\xff\xff\xff\xff"


NONE = 0xFFFFFFFF


def test_an_inline_chain_begins_with_the_outermost_function() -> None:
    cache = SymCache(symcache([(0, 5, 0, NONE), (0, 9, 0, 0), (NONE, NONE, NONE, NONE)], [0x10, 0x20]))
    chains = cache.find(np.array([0xF, 0x10, 0x1F, 0x20, 1 << 32, (1 << 64) - 1], np.uint64))
    assert chains.counts.tolist() == [0, 2, 2, 0, 0, 0]
    assert chains.lines.tolist() == [5, 9, 5, 9]
    assert cache.function_names(np.array([0]), 100) == [b"f"]
    assert cache.file_names(np.array([0, -1]), 100) == [b"/a/b/c.c", b""]


def test_a_circular_inline_chain_ends() -> None:
    cache = SymCache(symcache([(0, 1, 0, 1), (0, 2, 0, 0)], [0x10]))
    assert cache.find(np.array([0x10], np.uint64)).counts.tolist() == [256]


def test_a_function_without_a_file_is_left_to_the_symbol_table() -> None:
    cache = SymCache(symcache([(NONE, 0, 0, NONE)], [0x10]))
    assert cache.find(np.array([0x10], np.uint64)).counts.tolist() == [0]


@pytest.mark.parametrize("size", [0, 50, HEADER_BYTES, HEADER_BYTES + 30])
def test_a_truncated_symcache_is_refused(size: int) -> None:
    with pytest.raises(SymCacheError):
        SymCache(symcache([(0, 5, 0, NONE)], [0x10])[:size])


def test_symcaches_of_other_versions_and_damaged_ones_are_refused() -> None:
    good = symcache([(0, 5, 0, NONE)], [0x10])
    assert range_count(good) == 1
    for bad in (symcache([(0, 5, 0, NONE)], [0x10], version=VERSION + 1), b"XXXX" + good[4:]):
        with pytest.raises(SymCacheError, match="version"):
            SymCache(bad)
    with pytest.raises(SymCacheError, match="damaged"):
        SymCache(symcache([(0, 5, 0, NONE)], [0x10, 0x20]))


def test_a_string_with_an_invalid_length_is_empty() -> None:
    cache = SymCache(symcache([(0, 5, 0, NONE)], [0x10]))
    assert cache._string(len(cache._strings) - 5, 100) == b""
    assert cache._string(1 << 40, 100) == b""


def test_invalid_entry_sizes_in_the_header_are_refused() -> None:
    good = bytearray(struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01", 3, 62, 1, 0, 64, 64, 0, 64, 56, 0, 64, 2, 1))
    for at, value in ((54, 55), (58, 63)):  # sizes of entries
        bad = bytes(good[:at]) + struct.pack("<H", value) + bytes(good[at + 2 :])
        bad = bad[:56] + b"\1\0" + bad[58:]
        with pytest.raises(ElfError, match=r"cannot be read|outside"):
            Elf(in_memory(bad))
