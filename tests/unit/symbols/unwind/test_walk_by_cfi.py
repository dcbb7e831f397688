"""Frames found by call frame information in C: compared with pyelftools' rows and gdb's stacks, and made by hand."""

from __future__ import annotations

import io
import random
import struct
import subprocess
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from elftools.dwarf.callframe import FDE, CFIEntry, RegisterRule
from elftools.elf.elffile import ELFFile

from iaprof.formats.wire.unwind_rules import END, HARD, SIGNAL, Rule, RuleKind, RuleScope, Walked
from iaprof.symbols.unwind.cfi import CallFrames
from iaprof.symbols.unwind.finishing import PAGE, Finished, Finishing, HowFound, Mapping, StackCopy
from stacks.debugger import Stop, build, offset_of, stops
from thorough import thorough, usually
from unit.elfwriter import uleb
from unit.symbols.unwind.test_cfi import ARGUMENTS_SIZE, EVERY, FOLDER, LIBRARIES, image_of, open_copy
from unit.symbols.unwind.test_unwind_walk import Files, mappings

RBP, RSP, RETURN_ADDRESS, REGISTERS = 6, 7, 16, 17
KEPT = (3, RBP, 12, 13, 14, 15)  # registers that a function returns as it got them
BASE, TELLERS, STACK = 0x7000_0000_0000, 0x1000_0000, 0x7FFF_0000_0000
PAGES = 8
TELLER_BYTES = 1 << 16
BATCH = 100  # walks in one request


class Walks:
    """Walks stacks in one child, as it takes long to start one."""

    def __init__(self) -> None:
        self._images: list[bytes] = []
        self._spaces = 0
        self.finishing = Finishing(lambda number: open_copy(self._images[number]))

    def finish(
        self, images: Sequence[bytes], mapped: Sequence[Mapping], copies: Sequence[StackCopy], limit: int
    ) -> Iterator[Finished]:
        """Walks stacks through images, which have their index as number."""
        first = len(self._images)
        self._images += images
        self._spaces += 1
        numbered = [each._replace(image=first + each.image) if each.image >= 0 else each for each in mapped]
        for at in range(0, len(copies), BATCH):
            some = copies[at : at + BATCH]
            yield from self.finishing.finish_all(self._spaces, numbered, some, [limit] * len(some))


@pytest.fixture(scope="module")
def walks() -> Iterator[Walks]:
    made = Walks()
    with made.finishing:
        yield made


# ---- rows ----


def tellers() -> bytes:
    """An image with a function for each register: its caller's address is the value of that register."""
    cie = struct.pack("<IB", 0, 1) + b"zR\0" + bytes([1, 0x78, 16, 1, 0, 0x0C, RSP, 8])
    cie = struct.pack("<I", len(cie) + 3) + cie + bytes(3)
    frame = bytearray(cie)
    for number in KEPT:
        entry = struct.pack("<QQ", number * TELLER_BYTES, TELLER_BYTES) + bytes([0, 0x09, RETURN_ADDRESS, number])
        entry += bytes(-len(entry) % 4)
        frame += struct.pack("<II", len(entry) + 4, len(frame) + 4) + entry
    names = b"\0.eh_frame\0.shstrtab\0"
    at, at_names = 64 + 56, 64 + 56 + len(frame)
    at_sections = at_names + len(names)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 1 << 30, 1 << 30, 4096)
    sections = bytes(64) + struct.pack("<IIQQQQIIQQ", 1, 1, 2, at, at, len(frame), 0, 0, 8, 0)
    sections += struct.pack("<IIQQQQIIQQ", 11, 3, 0, 0, at_names, len(names), 0, 0, 1, 0)
    elf = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    elf += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, at_sections, 0, 64, 56, 1, 64, 3, 2)
    return bytes(elf + load + frame + names + sections)


def rows_of(entries: Sequence[CFIEntry]) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Addresses in functions, and their rows as pyelftools reads them."""
    for entry in entries:
        if isinstance(entry, FDE) and not any(part.opcode == ARGUMENTS_SIZE for part in entry.instructions):
            rows = [*entry.get_decoded().table, {"pc": entry["initial_location"] + entry["address_range"]}]
            for row, following in pairwise(rows):
                for address in {row["pc"], following["pc"] - 1} if row["pc"] < following["pc"] else ():
                    yield address, row


def word_at(address: int, number: int) -> int:
    """The word that the made-up stack has at an address: an address in the teller of a register."""
    return TELLERS + number * TELLER_BYTES + (address - STACK) // 8 + 1


def expected_value(row: dict[Any, Any], number: int, cfa: int, teller: int) -> int | None:
    """The caller's value of a register; None for rules that pyelftools does not compute."""
    rule = row.get(number)
    if rule is None or rule.type == RegisterRule.SAME_VALUE:
        return INITIAL[number]
    if rule.type == RegisterRule.OFFSET:
        return word_at(cfa + rule.arg, teller) if STACK <= cfa + rule.arg < STACK + PAGES * PAGE else None
    if rule.type == RegisterRule.VAL_OFFSET:
        return int(cfa + rule.arg)
    return INITIAL[rule.arg] if rule.type == RegisterRule.REGISTER else None


INITIAL = {number: STACK + 4 * PAGE + 64 * (number + 1) for number in range(16)} | {RSP: STACK + 2 * PAGE}


def compare(walks: Walks, content: bytes, rows: Sequence[tuple[int, dict[Any, Any]]], least: int) -> None:
    """Walks from each address, and compares CFA, return address and kept registers with those of the row."""
    elf = ELFFile(io.BytesIO(content))
    segment = next(each for each in elf.iter_segments("PT_LOAD") if each["p_flags"] & 1)
    address, offset = segment["p_vaddr"], segment["p_offset"]
    code = Mapping(BASE + (address & -PAGE), BASE + address + segment["p_filesz"], offset & -PAGE, 0)
    mapped = (Mapping(TELLERS, TELLERS + 16 * TELLER_BYTES, 0, 1), code, Mapping(STACK, STACK + PAGES * PAGE, 0, -1))
    stacks = {
        number: {
            STACK + page * PAGE: struct.pack(
                f"<{PAGE // 8}Q", *(word_at(STACK + page * PAGE + at, number) for at in range(0, PAGE, 8))
            )
            for page in range(PAGES)
        }
        for number in KEPT
    }
    copies, expected = [], []
    for address, row in rows:
        cfa_rule = row["cfa"]
        if cfa_rule.expr is not None or cfa_rule.reg not in INITIAL or row.get(RETURN_ADDRESS) is None:
            continue
        cfa = INITIAL[cfa_rule.reg] + cfa_rule.offset
        if not INITIAL[RSP] < cfa < STACK + PAGES * PAGE - 8:
            continue
        for number in KEPT:
            returns, kept = expected_value(row, RETURN_ADDRESS, cfa, number), expected_value(row, number, cfa, number)
            if row[RETURN_ADDRESS].type != RegisterRule.OFFSET or returns is None or kept is None:
                continue
            registers = INITIAL | {RETURN_ADDRESS: BASE + address}
            copies.append(StackCopy(registers, HowFound.INTERRUPTED, stacks[number]))
            expected.append(([BASE + address, returns, kept], cfa))
    got = [(done.ips.tolist(), int(done.cfas[0])) for done in walks.finish([content, tellers()], mapped, copies, 3)]
    assert got == expected
    assert len(got) > least


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_frames_equal_the_rows_of_pyelftools(walks: Walks, library: Path) -> None:
    with library.open("rb") as opened:
        entries = [entry for entry in ELFFile(opened).get_dwarf_info().EH_CFI_entries() if isinstance(entry, FDE)]
        some = random.Random(1).sample(entries, len(entries) // EVERY)
        compare(walks, library.read_bytes(), list(rows_of(some)), 200)


DEBUG_FRAME = """
.cfi_sections .debug_frame
.globl {name}
{name}:
.cfi_startproc
    push %rbx
.cfi_adjust_cfa_offset 8
.cfi_offset rbx, -16
    sub $64, %rsp
.cfi_adjust_cfa_offset 64
    nop
    add $64, %rsp
.cfi_adjust_cfa_offset -64
    pop %rbx
.cfi_adjust_cfa_offset -8
    ret
.cfi_endproc
.section .debug_frame, "", @progbits
.skip {padding}
.section .note.GNU-stack, "", @progbits
"""


@pytest.mark.parametrize(("version", "alone"), [(1, False), (3, False), (4, False), (4, True)])
def test_functions_only_in_debug_frame_have_their_rows(walks: Walks, tmp_path: Path, version: int, alone: bool) -> None:
    # given functions with .debug_frame, alone in the file or between others with .eh_frame, and padding between two
    # files' entries; GNU as writes this version into both sections
    def library(folder: str, *paddings: int) -> Path:
        sources: list[Path] = []
        (tmp_path / folder).mkdir()
        for name, padding in zip(("first", "last"), paddings, strict=True):
            assembly, after = tmp_path / folder / f"{name}.S", tmp_path / folder / f"after_{name}.c"
            assembly.write_text(DEBUG_FRAME.format(name=name, padding=padding))
            after.write_text(f"int f_{name}(int (*f)(int), int n) {{ return f(n) + n; }}")
            sources += [assembly] if alone else [assembly, after]
        path = tmp_path / folder / "library.so"
        options = ["-O2", "-shared", "-nostdlib", f"-Wa,--gdwarf-cie-version={version}"]
        subprocess.run(["gcc", *options, *map(str, sources), "-o", str(path)], check=True)
        return path

    # pyelftools does not know padding
    with library("plain", 0, 0).open("rb") as opened:
        information = ELFFile(opened).get_dwarf_info()
        beside = information.EH_CFI_entries()
        assert alone is not any(isinstance(entry, FDE) for entry in beside)
        sections = [*beside, *information.CFI_entries()]
        entries = [entry for entry in sections if isinstance(entry, CFIEntry)]
        assert {entry["version"] for entry in entries if not isinstance(entry, FDE)} == {version}
        rows = list(rows_of(entries))
    compare(walks, library("padded", 4, 12).read_bytes(), rows, 50)


# ---- expressions and rules ----


def walked(
    walks: Walks,
    instructions: bytes,
    address: int = 0x1001,
    is_exact: bool = True,
    words: dict[int, int] | None = None,
    augmentation: bytes = b"zR",
) -> Finished:
    """Walks from an address of an image with these CFA instructions."""
    content = bytes(image_of(instructions).data).replace(b"zR\0", augmentation + b"\0")
    page = bytearray(PAGE)
    for at, word in (words or {}).items():
        struct.pack_into("<Q", page, at, word)
    how = HowFound.INTERRUPTED if is_exact else HowFound.BY_RULE
    registers = {RBP: STACK + 0x100, RSP: STACK + 0x200, RETURN_ADDRESS: address}
    copy = StackCopy(registers, how, {STACK: bytes(page)})
    (done,) = walks.finish([content], [Mapping(0x1000, 1 << 24, 0x1000, 0)], [copy], 2)
    return done


MEMORY = {0x110: 0xABCD, 0x200 + 160: 77}
OF_64_BITS = (1 << 64) - 1


def with_value(expression: bytes) -> bytes:
    """CFA instructions for which the caller's address is the value of an expression, which gets the CFA."""
    return bytes([0x16, RETURN_ADDRESS]) + uleb(len(expression)) + expression


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("76 10 06", 0xABCD),  # breg6 16; deref
        ("77 a0 01 06", 77),  # breg7 160; deref: of a signal frame
        ("77 08 80 00 3f 1a 3b 2a 33 24 22", STACK + 0x200 + 8 + 8),  # of a PLT stub, 11 bytes into it
        ("77 78", STACK + 0x200 - 8),
        ("08 ff", 255), ("09 ff", OF_64_BITS), ("0b 00 80", (1 << 64) - 0x8000), ("0c 01 00 00 00", 1),
        ("0d ff ff ff ff", OF_64_BITS), ("0a ff ff", 0xFFFF),
        ("0e" + "f0" * 8, 0xF0F0F0F0F0F0F0F0), ("0f" + "f0" * 8, 0xF0F0F0F0F0F0F0F0),
        ("10 80 01", 128), ("11 7f", OF_64_BITS), ("11 80 7f", (1 << 64) - 128),
        ("34 12 22", 8), ("34 35 16 1c", 1), ("34 35 14 22", 9), ("34 35 36 15 02 1c", 2),
        ("34 1f", (1 << 64) - 4), ("30 20", OF_64_BITS), ("35 23 03", 8), ("35 33 1a", 1), ("34 33 21", 7),
        ("35 33 27", 6),
        ("31 28 01 00 96 34", 4), ("34 2f 01 00 13", 4), ("30 28 01 00 34 35", 5),
        ("09 ff 09 fe 2b", 1), ("09 ff 31 2d", 1), ("31 31 2c", 1), ("31 32 2e", 1), ("31 32 29", 0),
        ("31 08 ff 24", 0),
        ("09 ff 31 26", OF_64_BITS), ("09 ff 08 40 26", OF_64_BITS), ("38 32 25", 2), ("38 08 40 25", 0),
        ("76 10 94 01", 0xCD), ("76 10 94 02", 0xABCD), ("92 07 08", STACK + 0x208), ("96 31", 1),
        ("31" + " 12 1e" * 100, 1), ("09 ff" + " 12 1e" * 100, 1),
    ],
)  # fmt: skip
def test_the_values_of_expressions(walks: Walks, text: str, expected: int) -> None:
    # given that the caller's address is 0x1010 only if the value is as expected
    compared = (
        b"\x13" + bytes.fromhex(text) + b"\x0e" + struct.pack("<Q", expected) + bytes.fromhex("29 40 1e 0a 0010 22")
    )
    done = walked(walks, with_value(compared), 0x100B, words=MEMORY)
    # then
    assert done.ips.tolist() == [0x100B, 0x1010]


def test_an_expression_of_a_register_begins_with_the_cfa(walks: Walks) -> None:
    content = b"\x0e" + struct.pack("<Q", STACK + 0x208 + 8) + bytes.fromhex("29 40 1e 0a 0010 22")
    assert walked(walks, with_value(b"\x23\x08" + content)).ips.tolist() == [0x1001, 0x1010]


@pytest.mark.parametrize(
    "text",
    [
        "", "06", "22", "34 22", "70 00", "76 00 06 06", "0c 01", "10 ff", "2f fd ff", "2f ff 7f 31 9c", "ff",
        "34 15 05",
        "34 94 03", "2f 80 ff", "31 34 1d", "31" + " 12" * 300, "31 12" * 70, "31 28 fc ff",
    ],
)  # fmt: skip
def test_damaged_and_unknown_operations_have_no_value(walks: Walks, text: str) -> None:
    done = walked(walks, with_value(b"\x13" + bytes.fromhex(text)))
    assert (done.ips.tolist(), done.ending) == ([0x1001], Walked.MEMORY)


DEREF = "0f 03 767006"  # CFA: breg6 -16; deref
PLT = "0f 0b 77088000 3f1a 3b2a 3324 22"


@pytest.mark.parametrize(
    ("instructions", "rule"),
    [
        ("0e 10", Rule(RuleKind.BY_RSP, 16)),
        ("0e 10 86 02", Rule(RuleKind.BY_RSP, 16, -16)),
        ("0c 06 10 86 02", Rule(RuleKind.BY_RBP, 16, -16)),
        ("0c 06 10", Rule(RuleKind.BY_RBP, 16)),
        (DEREF + "10 06 02 7678", Rule(RuleKind.BY_DEREF, -16, -8)),
        (DEREF + "10 06 02 7600", Rule(RuleKind.BY_DEREF, -16)),
        ("07 10", END),
        # rows that a rule cannot express
        ("0c 03 10", HARD),
        ("0e 10 90 02", HARD),
        ("08 10", HARD),
        ("0e 10 87 03", HARD),
        ("0e 10 09 06 03", HARD),
        ("0e 10 86 8827", HARD),
        ("0e 10 86 00", HARD),
        ("0e 80 80 80 80 08", HARD),
        (DEREF, HARD),
        ("0f 03 73 00 06", HARD),
    ],
)  # fmt: skip
def test_the_rule_of_a_row(walks: Walks, instructions: str, rule: Rule) -> None:
    code = bytes.fromhex(instructions)
    assert walked(walks, code).rules[0x1001, RuleScope.INSTRUCTION] == rule
    assert walked(walks, code, is_exact=False).rules[0x1001, RuleScope.RETURN] == rule


@pytest.mark.parametrize(("cfa", "rule"), [("0f 04 77a00106", SIGNAL), ("0e a001", HARD), ("0f 02 7700", HARD)])
def test_the_rule_of_a_signal_frame(walks: Walks, cfa: str, rule: Rule) -> None:
    code = bytes.fromhex(cfa + "10 10 03 77a801")
    # the letter S tells that it is one; R, with the encoding, is left out
    done = walked(walks, code, augmentation=b"zS")
    assert done.rules[0x1001, RuleScope.INSTRUCTION] == rule


@pytest.mark.parametrize(("address", "cfa"), [(0x1020, 8), (0x102A, 8), (0x102B, 16), (0x102F, 16)])
def test_a_plt_stub_has_a_rule_for_instructions_only(walks: Walks, address: int, cfa: int) -> None:
    code = bytes.fromhex(PLT)
    assert walked(walks, code, address).rules[address, RuleScope.INSTRUCTION] == Rule(RuleKind.BY_RSP, cfa)
    assert walked(walks, code, address, is_exact=False).rules[address, RuleScope.RETURN] == HARD


def test_nearly_all_rows_of_the_c_library_have_a_rule(walks: Walks) -> None:
    content = LIBRARIES[1].read_bytes()
    frames, chance = CallFrames(content), random.Random(1)
    addresses = [
        address for address in (chance.randrange(0x26000, 0x170000) for _ in range(3000)) if frames.row(address)
    ]
    mapped = [Mapping(0, 1 << 24, 0, 0)]
    copies = [StackCopy({RSP: STACK, RETURN_ADDRESS: address}, HowFound.BY_RULE, {}) for address in addresses]
    kinds = [
        done.rules[address, RuleScope.RETURN].kind
        for address, done in zip(addresses, walks.finish([content], mapped, copies, 2), strict=True)
    ]
    assert len(kinds) > 1000
    assert kinds.count(RuleKind.HARD) < len(kinds) / 100


# ---- registers that a call may change ----

PROGRAM = """
#include <setjmp.h>
#include <unistd.h>
#include <sys/wait.h>
static jmp_buf out;
__attribute__((noinline)) static void jump(int n) { longjmp(out, n); }
int main(void) {
    if (!setjmp(out))
        jump(1);
    if (!vfork())
        _exit(0);
    wait(0);
}
"""
CALLER_SAVED = (0, 1, 2, 4, 5, 8, 9, 10, 11)


def places(library: Path) -> list[int]:
    """Offsets of instructions whose CFA or return address is in a register that calls change: one for each function."""
    found = []
    with library.open("rb") as opened:
        elf = ELFFile(opened)
        for entry in elf.get_dwarf_info().EH_CFI_entries():
            if not isinstance(entry, FDE) or not any(is_unusual(part) for part in entry.instructions):
                continue
            for row in entry.get_decoded().table:
                returns = row.get(RETURN_ADDRESS)
                in_register = returns is not None and returns.type == RegisterRule.REGISTER
                if (row["cfa"].expr is None and row["cfa"].reg in CALLER_SAVED) or in_register:
                    found += list(elf.address_offsets(row["pc"]))
    return found


def is_unusual(instruction: Any) -> bool:
    """Whether it sets the CFA to a register that calls change, or tells that another register has a value."""
    return instruction.opcode == 0x09 or (instruction.opcode in (0x0C, 0x0D) and instruction.args[0] in CALLER_SAVED)


@pytest.mark.parametrize("which", usually(["libc"], ["libc", "libcrypto"]))
def test_stacks_at_instructions_that_keep_the_cfa_in_another_register_equal_those_of_gdb(
    tmp_path: Path, which: str
) -> None:
    command: list[str | Path]
    if which == "libc":
        library = FOLDER / "libc.so.6"
        (tmp_path / "jumps.c").write_text(PROGRAM)
        command = [tmp_path / "jumps"]
        subprocess.run(["gcc", "-O2", tmp_path / "jumps.c", "-o", command[0]], check=True)
    else:
        library = FOLDER / "libcrypto.so.3"
        (tmp_path / "zeros").write_bytes(bytes(4096))
        command = ["/usr/bin/openssl", "enc", "-chacha20", "-K", "00" * 32, "-iv", "00" * 16]
        command += ["-in", tmp_path / "zeros", "-out", "/dev/null"]
    at = places(library)
    assert at
    compared = 0
    for stop, done in at_places(command, tmp_path, library, at):
        assert (done.ending, in_hex(done)) == (Walked.WHOLE, [hex(pc) for pc in stop.pcs])
        compared += 1
    assert compared


def at_places(
    command: Sequence[str | Path], folder: Path, library: Path, offsets: Sequence[int]
) -> Iterator[tuple[Stop, Finished]]:
    """Each stop at these instructions of a library, and its stack as walked from a copy with all registers."""
    files = Files()
    with Finishing(files.open) as finishing:
        for number, stop in enumerate(stops(command, folder, memory=True, places={library: offsets})):
            copy = StackCopy(stop.registers, HowFound.INTERRUPTED, dict(list(stop.pages.items())[:64]))
            yield stop, finishing.finish(number, mappings(stop, files), copy, 100)


def in_hex(done: Finished) -> list[str]:
    return [hex(ip) for ip in done.ips.tolist()]


IN_REGISTER = """
.globl keeps_{name}, pops_{name}, calls_{name}, kept_{name}, popped_{name}, called_{name}
.globl keeps_{name}_stop, pops_{name}_stop, calls_{name}_stop
.text
keeps_{name}:
.cfi_startproc
    lea 8(%rsp), %{name}
.cfi_def_cfa {name}, 0
    and $-64, %rsp
    sub $256, %rsp
keeps_{name}_stop:
    lea -8(%{name}), %rsp
.cfi_def_cfa rsp, 8
    ret
.cfi_endproc
pops_{name}:
.cfi_startproc
    pop %{name}
.cfi_adjust_cfa_offset -8
.cfi_register rip, {name}
pops_{name}_stop:
    push %{name}
.cfi_adjust_cfa_offset 8
.cfi_offset rip, -8
    ret
.cfi_endproc
calls_{name}:
.cfi_startproc
    lea 8(%rsp), %{name}
.cfi_def_cfa {name}, 0
    call calls_{name}_stop
called_{name}:
    lea -8(%{name}), %rsp
.cfi_def_cfa rsp, 8
    ret
.cfi_endproc
calls_{name}_stop:
.cfi_startproc
    ret
.cfi_endproc
"""
IN_EACH_REGISTER = """
.globl in_each_register
.text
in_each_register:
.cfi_startproc
    sub $8, %rsp
.cfi_adjust_cfa_offset 8
{calls}
    add $8, %rsp
.cfi_adjust_cfa_offset -8
    ret
.cfi_endproc
.section .note.GNU-stack, "", @progbits
"""
CALLS = """
    call keeps_{name}
kept_{name}:
    call pops_{name}
popped_{name}:
    call calls_{name}
"""
NAMES = ("rax", "rdx", "rcx", "rsi", "rdi", "r8", "r9", "r10", "r11")  # of CALLER_SAVED


def test_a_register_that_calls_change_keeps_the_cfa_or_return_address_of_the_innermost_frame(tmp_path: Path) -> None:
    # given a library whose functions keep their CFA or their return address in such a register
    assembly, library, program = tmp_path / "each.S", tmp_path / "libeach.so", tmp_path / "program"
    calls = "".join(CALLS.format(name=name) for name in NAMES)
    functions = "".join(IN_REGISTER.format(name=name) for name in NAMES)
    assembly.write_text(functions + IN_EACH_REGISTER.format(calls=calls))
    options = ["-nostdlib", "-Wl,-Bsymbolic"]
    subprocess.run(["gcc", "-shared", *options, str(assembly), "-o", str(library)], check=True)
    (tmp_path / "main.c").write_text("int main(void) { void in_each_register(void); in_each_register(); }")
    subprocess.run(["gcc", str(tmp_path / "main.c"), str(library), "-o", str(program)], check=True)
    kinds = {"keeps": "kept", "pops": "popped", "calls": "called"}
    at = {f"{kind}_{name}": offset_of(library, f"{kind}_{name}_stop") for name in NAMES for kind in kinds}
    # when
    seen = []
    for stop, done in at_places([program], tmp_path, library, list(at.values())):
        (path, offset), (caller_path, caller) = stop.places[:2]
        (function,) = (name for name, place in at.items() if place == offset)
        kind, name = function.split("_")
        seen.append((kind, name))
        assert (path, caller_path) == (library, library)
        assert caller == offset_of(library, f"{kinds[kind]}_{name}")
        if kind == "calls":
            # then a register that the called function may have changed leads to no caller
            assert (done.ending, in_hex(done)) == (Walked.MEMORY, [hex(pc) for pc in stop.pcs[:2]])
        else:
            # and the one of the innermost frame to gdb's, which is the one that the program called from
            assert (done.ending, in_hex(done)) == (Walked.WHOLE, [hex(pc) for pc in stop.pcs])
            assert done.rules[stop.pcs[0], RuleScope.INSTRUCTION] == HARD
    assert seen == [(kind, name) for name in NAMES for kind in kinds]


# ---- sections ----

WITHOUT_EH_FRAME = ["-fno-asynchronous-unwind-tables", "-fno-unwind-tables"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-gdwarf-2", *WITHOUT_EH_FRAME], marks=thorough),
        ["-gdwarf-5", *WITHOUT_EH_FRAME],
        pytest.param(["-g0"], marks=thorough),
        ["-g0", "-Wl,--no-eh-frame-hdr"],
    ],
    ids=["debug-2", "debug-5", "eh", "eh-without-table"],
)
def test_stacks_through_one_section_equal_those_of_gdb(tmp_path: Path, options: list[str]) -> None:
    # given a program whose functions have call frame information in one section only; probe_me's is in .eh_frame
    program = build(tmp_path, "plain.c", "-O2", "-fomit-frame-pointer", *options)
    with program.open("rb") as opened:
        elf, function = ELFFile(opened), offset_of(program, "stop")
        (address,) = (segment["p_vaddr"] + function - segment["p_offset"] for segment in executable(elf))
        information = elf.get_dwarf_info()
        sections = [
            information.has_EH_CFI() and has_entry(information.EH_CFI_entries(), address),
            information.has_CFI() and has_entry(information.CFI_entries(), address),
        ]
    assert sections == ["-g0" in options, "-g0" not in options]
    # when, then
    files, count = Files(), 0
    with Finishing(files.open) as finishing:
        for stop in stops([program], tmp_path, memory=True):
            copied = dict(list(stop.pages.items())[:64])
            done = finishing.finish(
                1, mappings(stop, files), StackCopy(stop.registers, HowFound.INTERRUPTED, copied), 400
            )
            assert (done.ending, in_hex(done)) == (Walked.WHOLE, [hex(pc) for pc in stop.pcs])
            assert HowFound.BY_GUESS not in done.how_found
            count += 1
    assert count > 20


def executable(elf: ELFFile) -> Iterator[Any]:
    return (segment for segment in elf.iter_segments("PT_LOAD") if segment["p_flags"] & 1)


def has_entry(entries: Sequence[object], address: int) -> bool:
    functions = (entry for entry in entries if isinstance(entry, FDE))
    return any(0 <= address - entry["initial_location"] < entry["address_range"] for entry in functions)
