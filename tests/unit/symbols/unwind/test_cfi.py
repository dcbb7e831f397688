"""Call frame information: compared with what pyelftools reads from this machine's libraries, and damaged."""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from elftools.dwarf.callframe import FDE, RegisterRule
from elftools.elf.elffile import ELFFile

from iaprof.formats.wire.unwind_rules import Walked
from iaprof.sandbox.parent import Limits
from iaprof.symbols.unwind.cfi import CallFrames, CfiError, RegisterRuleKind, Row
from iaprof.symbols.unwind.finishing import PAGE, Finished, Finishing, HowFound, Mapping, StackCopy

FOLDER = Path("/lib/x86_64-linux-gnu")
LIBRARIES = [Path("/lib64/ld-linux-x86-64.so.2"), FOLDER / "libc.so.6", FOLDER / "libstdc++.so.6"]
ARGUMENTS_SIZE = 0x2E  # DW_CFA_GNU_args_size
EVERY = 23  # one of so many functions is compared, as pyelftools is slow
KINDS = {
    RegisterRule.UNDEFINED: RegisterRuleKind.UNDEFINED,
    RegisterRule.SAME_VALUE: RegisterRuleKind.SAME,
    RegisterRule.OFFSET: RegisterRuleKind.OFFSET,
    RegisterRule.VAL_OFFSET: RegisterRuleKind.VALUE_OFFSET,
    RegisterRule.REGISTER: RegisterRuleKind.REGISTER,
    RegisterRule.EXPRESSION: RegisterRuleKind.EXPRESSION,
    RegisterRule.VAL_EXPRESSION: RegisterRuleKind.VALUE_EXPRESSION,
}


def converted(row: dict[Any, Any]) -> tuple[object, dict[int, tuple[RegisterRuleKind, object]]]:
    """CFA and register rules of a pyelftools row, in the form of Row."""
    cfa = row["cfa"]
    registers = {}
    for number, rule in row.items():
        if isinstance(number, int):
            value = bytes(rule.arg) if isinstance(rule.arg, list) else rule.arg
            registers[number] = (KINDS[rule.type], 0 if value is None else value)
    return bytes(cfa.expr) if cfa.expr is not None else (cfa.reg, cfa.offset), registers


def rules_of(row: Row) -> tuple[object, dict[int, tuple[RegisterRuleKind, object]]]:
    """CFA and register rules of a row, without registers that stay the same."""
    return row.cfa, {number: rule for number, rule in row.registers.items() if rule[0] is not RegisterRuleKind.SAME}


def some_functions(file: Path) -> Iterator[list[dict[Any, Any]]]:
    """The rows of some functions, followed by a row without rules at the address after the last instruction."""
    with file.open("rb") as opened:
        entries = [entry for entry in ELFFile(opened).get_dwarf_info().EH_CFI_entries() if isinstance(entry, FDE)]
        for entry in random.Random(1).sample(entries, len(entries) // EVERY):
            if any(instruction.opcode == ARGUMENTS_SIZE for instruction in entry.instructions):
                continue  # pyelftools does not decode it
            rows = entry.get_decoded().table
            yield [*rows, {"pc": entry["initial_location"] + entry["address_range"]}]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_rows_equal_those_of_pyelftools(library: Path) -> None:
    frames = CallFrames(library.read_bytes())
    compared = 0
    for rows in some_functions(library):
        for row, following in pairwise(rows):
            cfa, registers = converted(row)
            expected = {number: rule for number, rule in registers.items() if rule[0] is not RegisterRuleKind.SAME}
            for address in {row["pc"], following["pc"] - 1} if row["pc"] < following["pc"] else ():
                own = frames.row(address)
                assert own is not None
                assert rules_of(own) == (cfa, expected), hex(address)
                compared += 1
    assert compared > 20


def test_addresses_outside_functions_have_no_row() -> None:
    frames = CallFrames(LIBRARIES[2].read_bytes())
    assert [frames.row(address) for address in (0, 1 << 40, (1 << 64) - 1)] == [None, None, None]


def test_the_entry_point_of_the_dynamic_linker_is_outermost() -> None:
    frames = CallFrames(LIBRARIES[0].read_bytes())
    row = frames.row(frames.header.entry)
    assert row is not None
    assert row.is_outermost


def test_version_4_is_read_in_eh_frame_too(tmp_path: Path) -> None:
    # given what GNU as writes with this option
    (tmp_path / "f.c").write_text("int f(int (*g)(int), int n) { return g(n) + n; }")
    library, options = tmp_path / "f.so", ["-O2", "-shared", "-nostdlib", "-Wa,--gdwarf-cie-version=4"]
    subprocess.run(["gcc", *options, str(tmp_path / "f.c"), "-o", str(library)], check=True)
    content = library.read_bytes()
    assert content.count(b"\4zR\0\x08\0") == 1  # version, additions, sizes of addresses and of segment selectors
    with library.open("rb") as opened:
        information = ELFFile(opened).get_dwarf_info()
        (function,) = (entry for entry in information.EH_CFI_entries() if isinstance(entry, FDE))
        address = function["initial_location"]
        cfa, _ = converted(function.get_decoded().table[0])
    # then
    row = CallFrames(content).row(address)
    assert row is not None
    assert row.cfa == cfa
    # but not with addresses of 4 bytes
    narrow = content.replace(b"\4zR\0\x08\0", b"\4zR\0\x04\0")
    with pytest.raises(CfiError):
        CallFrames(narrow).row(address)
    with Finishing(lambda _: open_copy(narrow)) as finishing:
        assert finished_by(finishing, 0, address).ending is Walked.DAMAGED


def table_of(data: bytes | bytearray) -> tuple[int, int]:
    """The offsets of the program header that leads to the table of functions, and of the table."""
    (headers,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for at in range(headers, headers + size * count, size):
        kind, _, offset = struct.unpack_from("<IIQ", data, at)
        if kind == 0x6474E550:
            return at, offset
    raise AssertionError


def test_an_image_without_a_table_is_read_through() -> None:
    # given that the segment with the table has another type
    data = bytearray(LIBRARIES[2].read_bytes())
    struct.pack_into("<I", data, table_of(data)[0], 0)
    with_table, without = CallFrames(LIBRARIES[2].read_bytes()), CallFrames(bytes(data))
    # then
    functions = list(some_functions(LIBRARIES[2]))
    assert len(functions) > 5
    for rows in functions:
        row, expected = without.row(rows[0]["pc"]), with_table.row(rows[0]["pc"])
        assert row is not None
        assert expected is not None
        assert rules_of(row) == rules_of(expected)


def test_an_image_without_a_table_is_read_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # given that its first entry is damaged
    data, reads = bytearray(LIBRARIES[2].read_bytes()), 0
    header, table = table_of(data)
    struct.pack_into("<I", data, header, 0)
    entries = table + 4 + struct.unpack_from("<i", data, table + 4)[0]
    data[entries + 8] = 77  # the version
    frames = CallFrames(bytes(data))
    read_entries = frames._entries

    def counted() -> object:
        nonlocal reads
        reads += 1
        return read_entries()

    monkeypatch.setattr(frames, "_entries", counted)
    # when, then
    assert [frames.row(address) for address in (1 << 16, 1 << 17, 1 << 18)] == [None] * 3
    assert reads == 1
    assert not frames.has_functions


def test_a_table_of_unknown_encoding_is_refused() -> None:
    data = bytearray(LIBRARIES[2].read_bytes())
    data[table_of(data)[1] + 2] = 0x0E  # of the number of functions
    with pytest.raises(CfiError):
        CallFrames(bytes(data))


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"#!/bin/sh\n", b"\x7fELF\x02\x01" + bytes(12) + b"\x03\0" + bytes(60)]
)
def test_data_that_are_no_x86_64_image_are_refused(content: bytes) -> None:
    with pytest.raises(CfiError):
        CallFrames(content)


def test_headers_at_an_absurd_offset_are_refused() -> None:
    content = bytearray(LIBRARIES[0].read_bytes())
    content[32:40] = bytes.fromhex("ffffffffffffffff")  # e_phoff
    with pytest.raises(CfiError):
        CallFrames(bytes(content))


def test_damage_gives_a_row_or_an_error() -> None:
    original = LIBRARIES[0].read_bytes()
    refused, outcomes = 0, Counter[type[object]]()
    for seed in range(20):
        chance = random.Random(seed)
        addresses = [chance.randrange(len(original)) for _ in range(200)]
        data = bytearray(original)
        for _ in range(chance.choice((1, 100, 10_000))):
            data[chance.randrange(64, len(data))] = chance.randrange(256)
        data = data[: chance.randrange(len(data) // 2, len(data) + 1)]
        try:
            frames = CallFrames(bytes(data))
        except CfiError:
            refused += 1
            continue
        for address in addresses:
            try:
                outcomes[type(frames.row(address))] += 1
            except CfiError:
                outcomes[CfiError] += 1
    assert 0 < refused < 20
    assert outcomes.keys() == {Row, type(None), CfiError}, outcomes


def image_of(instructions: bytes) -> CallFrames:
    """An image with one function of 16 MiB at 0x1000, with these CFA instructions."""
    cie = struct.pack("<IB", 0, 1) + b"zR\0" + bytes([1, 0x78, 16, 1, 0x00]) + bytes([0x0C, 7, 8, 0x90, 1])
    cie += bytes(-len(cie) % 4)
    at = 64 + 2 * 56 + 20
    fde_at = at + 4 + len(cie)
    fde = struct.pack("<IQQ", fde_at + 4 - at, 0x1000, 1 << 24) + b"\0" + instructions
    body = struct.pack("<I", len(cie)) + cie + struct.pack("<I", len(fde)) + fde + bytes(4)
    header = (
        bytes([1, 0x03, 0x03, 0x3B])
        + struct.pack("<II", at, 1)
        + struct.pack("<ii", 0x1000 - (at - 20), fde_at - at + 20)
    )
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 1 << 30, 1 << 30, 4096)
    table = struct.pack("<IIQQQQQQ", 0x6474E550, 4, at - 20, at - 20, 0, 20, 20, 4)
    elf = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0
    )
    return CallFrames(elf + load + table + header + body)


def test_a_handmade_image_is_read() -> None:
    row = image_of(bytes([0x41, 0x0E, 16])).row(0x1001)
    assert row is not None
    assert (row.cfa, row.registers) == ((7, 16), {16: (RegisterRuleKind.OFFSET, -8)})


@pytest.mark.parametrize(
    "instructions",
    [
        b"\x0a" * (1 << 17),  # endless remember_state
        b"\x0a" * 65,  # more states than compilers remember
        b"\x0b",  # restore_state without remember_state
        b"\x41" * (1 << 17),  # more instructions than any function has
        b"\x05\xff\xff\xff\xff\x0f\x01",  # a register that does not exist
        b"\x0f\xff\xff\xff\xff\x0f",  # an expression that is longer than the file
        b"\x0f\x81\x20" + bytes(4097),  # a longer expression than can be evaluated
        b"\x0e" + b"\xff" * 20,  # a number without an end
        b"\x3f",  # an unknown instruction
        b"\x0f\x01\x30\x0e\x10",  # an offset for an expression
    ],
)  # fmt: skip
def test_hostile_instructions_are_an_error(instructions: bytes) -> None:
    with pytest.raises(CfiError):
        image_of(instructions).row(0x1000 + (1 << 24) - 1)


STACK = 0x7FFF_0000_0000


def finished_by(finishing: Finishing, number: int, address: int) -> Finished:
    """Finishes a stack that begins in the image with this number, at an address of it."""
    mapped = (Mapping(0, 1 << 25, 0, number),)
    registers = {16: address, 7: STACK, 6: 0, 3: 0}
    return finishing.finish(number + 1, mapped, StackCopy(registers, HowFound.INTERRUPTED, {STACK: bytes(PAGE)}), 20)


def open_copy(content: bytes) -> int:
    file = os.memfd_create("image")
    os.write(file, content)
    return file


@pytest.mark.parametrize("lost", [b"\x07\x07", b"\x07\x10\x08\x10", b"\x16\x10\x01\x30\x07\x07"])
def test_a_row_that_loses_the_stack_pointer_or_return_address_ends_the_walk(lost: bytes) -> None:
    # given rules that say that the caller's stack pointer, or its address, is nowhere
    content = bytes(image_of(lost).data)
    with Finishing(lambda _: open_copy(content)) as finishing:
        done = finished_by(finishing, 0, 0x1000)
    # then the stack ends in a known way
    assert (list(done.ips), done.ending) == ([0x1000], Walked.MEMORY)


def test_rows_of_one_process_take_up_no_memory() -> None:
    # given an image whose rows are large and many
    blocks = b"".join(b"\x10" + bytes([n]) + b"\x80\x10" + bytes(2048) for n in range(60))
    large, plain = (bytes(image_of(code).data) for code in (blocks, b"\x07\x10"))
    limits = Limits(memory_bytes=80 << 20, mapped_bytes=1 << 42, seconds=20.0, files=100, answer_bytes=1 << 20)
    with Finishing(lambda number: open_copy(plain if number else large), limits) as finishing:
        finishing.start()
        first = finishing._sandbox.pid
        for address in range(0x1000, 0x1000 + (1 << 11)):
            finished_by(finishing, 0, address)
        # then the child has room for it, and for another process
        assert finished_by(finishing, 1, 0x1000).ending is Walked.WHOLE
        assert finishing._sandbox.pid == first


def test_a_child_without_memory_is_replaced() -> None:
    # given images without a table of functions, whose entries the child has to remember
    content = bytearray(LIBRARIES[2].read_bytes())
    struct.pack_into("<I", content, table_of(content)[0], 0)
    file = open_copy(bytes(content))
    limits = Limits(memory_bytes=64 << 20, mapped_bytes=1 << 42, seconds=20.0, files=1000, answer_bytes=1 << 20)
    with Finishing(lambda _: os.dup(file), limits) as finishing:
        finishing.start()
        first = finishing._sandbox.pid
        for number in range(500):
            assert finished_by(finishing, number, 0x1000).ips.tolist() == [0x1000]
            if finishing._sandbox.pid != first:
                break
        else:
            pytest.fail("the child's memory was never full")
    os.close(file)


def test_a_child_that_may_open_no_further_file_is_replaced() -> None:
    # given a child with room for one image, as its user's limit of open files may be lower than it needs
    plain = bytes(image_of(b"\x07\x10").data)
    limits = Limits(memory_bytes=512 << 20, mapped_bytes=1 << 42, seconds=20.0, files=1, answer_bytes=1 << 20)
    with Finishing(lambda _: open_copy(plain), limits) as finishing:
        # then the next image is not taken for one without call frame information
        assert [finished_by(finishing, number, 0x1000).ending for number in range(4)] == [Walked.WHOLE] * 4
