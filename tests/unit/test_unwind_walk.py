"""Stacks that are finished from copies, frame by frame against gdb's; and stacks that were made to do harm."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from iaprof.formats.wire.unwind_rules import (
    BLOCK_BYTES,
    END,
    HARD,
    TO_OTHER_STACK,
    Rule,
    RuleFlags,
    RuleKind,
    RuleScope,
    Walked,
)
from iaprof.symbols.files.vdso import open_vdso
from iaprof.symbols.unwind.code import Mapping
from iaprof.symbols.unwind.finishing import Copy, Finished, Finishing
from iaprof.symbols.unwind.walk import PAGE, Found
from stacks.debugger import Stop, build, offset_of, stops

LIMIT, INSTRUCTION = 400, RuleScope.INSTRUCTION
WALKED = (3, 6, 7, 12, 13, 14, 15, 16)  # registers that a probe tells


class Files:
    """Numbers for the files of mappings, and the files by number."""

    def __init__(self) -> None:
        self._paths: list[str] = []

    def number(self, path: str) -> int:
        if not path.startswith("/") and path != "[vdso]":
            return -1
        if path not in self._paths:
            self._paths.append(path)
        return self._paths.index(path)

    def open(self, number: int) -> int | None:
        path = self._paths[number]
        return open_vdso() if path == "[vdso]" else os.open(path, os.O_RDONLY)


def mappings(stop: Stop, files: Files) -> tuple[Mapping, ...]:
    found = []
    for span, rights, offset, _, _, *path in stop.maps:
        if "x" in rights:
            start, end = (int(each, 16) for each in span.split("-"))
            found.append(Mapping(start, end, int(offset, 16), files.number(path[0].strip() if path else "")))
    return tuple(found)


BUILDS = {
    "O2": ["-O2"],
    "native": ["-O3", "-march=native", "-fno-plt"],
    "realigned": ["-O2", "-mstackrealign", "-mavx2"],
}


def page_of(pages: dict[int, bytes], at: int) -> bytes:
    return pages.get(at, b"")


@pytest.mark.parametrize("options", BUILDS.values(), ids=BUILDS.keys())
def test_stacks_are_gdb_s(tmp_path: Path, options: list[str]) -> None:
    files, kinds, count, by_signal = Files(), set(), 0, 0
    with Finishing(files.open) as finishing:
        spaces: dict[tuple[Mapping, ...], int] = {}
        for stop in stops([build(tmp_path, "stacks.cpp", *options), 2], tmp_path, memory=True):
            # given a copy of the innermost 16 pages; the stack that a signal came to is read later
            mapped = mappings(stop, files)
            top = stop.registers[7] & -PAGE
            copied = {at: page for at, page in stop.pages.items() if top <= at < top + 16 * PAGE}
            copy = Copy({n: value for n, value in stop.registers.items() if n in WALKED}, Found.INTERRUPTED, copied)
            space = spaces.setdefault(mapped, len(spaces))
            # when
            done = finishing.finish(space, mapped, copy, LIMIT, partial(page_of, stop.pages))
            # then
            assert (done.ending, [hex(ip) for ip in done.ips]) == (Walked.WHOLE, [hex(pc) for pc in stop.pcs])
            assert Found.BY_GUESS not in done.found
            kinds |= {rule.kind for rule in done.rules.values()}
            by_signal += Found.INTERRUPTED in done.found[1:]
            count += 1
    assert count > 140
    assert by_signal > 50
    assert {RuleKind.BY_RSP, RuleKind.BY_RBP, RuleKind.SIGNAL, RuleKind.END} <= kinds


# ---- what stops a walk ----


def walked(
    words: dict[int, int],
    rip: int,
    rsp: int = 0x7FFF_0000_1000,
    rbp: int = 0,
    mapped: tuple[Mapping, ...] = (),
    open_image: Callable[[int], int | None] = lambda _: None,
    rbx: int = 0,
) -> Finished:
    """Walks a stack of these words."""
    pages = {address & -PAGE: bytearray(PAGE) for address in (rsp, *words)}
    for address, word in words.items():
        pages[address & -PAGE][address % PAGE : address % PAGE + 8] = word.to_bytes(8, "little")
    copy = Copy({16: rip, 7: rsp, 6: rbp, 3: rbx}, Found.INTERRUPTED, {at: bytes(page) for at, page in pages.items()})
    with Finishing(open_image) as finishing:
        return finishing.finish(1, mapped, copy, 20)


GENERATED = (Mapping(0x10000, 0x20000, 0, -1),)


def test_no_code_no_stack() -> None:
    assert walked({}, 0x1234).ending is Walked.NOWHERE
    assert walked({}, 0x1234).ips == []


def test_generated_code_is_left_by_its_frame_pointer() -> None:
    # given three frames of generated code, and the first of them called by nothing
    at = 0x7FFF_0000_1000
    words = {at + 64: at + 128, at + 72: 0x10100, at + 128: at + 256, at + 136: 0x10200, at + 256: 0, at + 264: 0}
    done = walked(words, 0x10010, at, at + 64, GENERATED)
    # then its callers are marked
    assert done.ips == [0x10010, 0x10100, 0x10200]
    assert done.found == [Found.INTERRUPTED, Found.BY_GUESS, Found.BY_GUESS]
    assert done.rules[0x10100, RuleScope.RETURN] == Rule(
        RuleKind.BY_RBP, 16, -16, done.rules[0x10100, RuleScope.RETURN].flags
    )


def test_a_frame_pointer_that_leads_in_a_circle_ends_the_walk() -> None:
    at = 0x7FFF_0000_1000
    done = walked({at + 64: at + 64, at + 72: 0x10100}, 0x10010, at, at + 64, GENERATED)
    assert done.ips == [0x10010, 0x10100]
    assert done.ending is Walked.STUCK
    assert done.rules[0x10100, RuleScope.RETURN] == HARD


def calls_in_libc(base: int) -> tuple[int, int, tuple[Mapping, ...], Callable[[int], int]]:
    """Two return addresses of libc at this address, what is mapped then beside GENERATED, and what opens it."""
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so.6" in line)
    content = Path(libc).read_bytes()
    left, right = [base + each.end() for each in re.finditer(rb"\xe8.{4}", content[0x40000:0x80000], re.DOTALL)][:2]
    mapped = (*GENERATED, Mapping(base, base + len(content), 0, 0))
    return left + 0x40000, right + 0x40000, mapped, lambda _: os.open(libc, os.O_RDONLY)


UNTOLD = """
.globl before, untold, within, behind
before:
.cfi_startproc
.cfi_undefined rip
    call behind
    .fill 200, 1, 0x90
.cfi_endproc
untold:
    mov %rsp, %rbx
    .fill 397, 1, 0x90
within:
    .fill 500, 1, 0x90
behind:
.cfi_startproc
    call before
    .fill 200, 1, 0x90
.cfi_endproc
"""


def untold(folder: Path, base: int, keeps: bool) -> tuple[dict[str, int], Mapping, Path]:
    """Addresses of the functions of UNTOLD, its mapping as image 1, and the file.

    Args:
        folder: for the file.
        base: where it is mapped.
        keeps: whether the code of which nothing is told copies rsp to rbx.
    """
    library, assembly = folder / "untold.so", folder / "untold.S"
    assembly.write_text(UNTOLD if keeps else UNTOLD.replace("mov %rsp, %rbx", "mov %rsp, %rcx"))
    subprocess.run(["gcc", "-shared", "-nostdlib", assembly, "-o", library], check=True)
    at = {name: base + offset_of(library, name) for name in ("before", "untold", "within", "behind")}
    return at, Mapping(base, base + library.stat().st_size, 0, 1), library


@pytest.mark.parametrize("keeps", [True, False])
def test_data_on_the_stack_is_passed_over_where_a_register_leads_behind_it(tmp_path: Path, keeps: bool) -> None:
    # given code of which nothing is told, with 30 KiB of data on its stack, of which only the ends were touched; it
    # keeps the stack pointer of before in rbx, or not
    at, before = 0x7FFF_0000_1000, 0x7FFF_0000_1000 + (30 << 10)
    right, _, libc, open_libc = calls_in_libc(0x7000_0000_0000)
    code, mapping, library = untold(tmp_path, 0x30000, keeps)
    # when an earlier call has left a return address in the data
    left = code["before"] + 5
    words = {at + 64: left, before + 96: right}
    words |= dict.fromkeys(range(before + 104, (before | PAGE - 1) - 7, 8), left)
    opened: dict[int, Callable[[int], int]] = {0: open_libc, 1: lambda _: os.open(library, os.O_RDONLY)}
    mapped = tuple(sorted((*libc, mapping)))
    done = walked(words, code["within"], at, 0, mapped, lambda image: opened[image](image), before)
    # then nobody looks at it where rbx is known to lead behind it; and there is a rule for the next time
    assert done.ips[:2] == [code["within"], right if keeps else left]
    assert done.found[:2] == [Found.INTERRUPTED, Found.BY_GUESS]
    expected = Rule(RuleKind.BY_RBX, 96 + 8, 0, RuleFlags.GUESS) if keeps else done.rules[code["within"], INSTRUCTION]
    assert done.rules[code["within"], INSTRUCTION] == expected
    assert (expected.kind is RuleKind.BY_RBX) is keeps


def test_data_on_the_stack_that_was_never_touched_ends_the_search() -> None:
    at, before = 0x7FFF_0000_1000, 0x7FFF_0000_1000 + (30 << 10)
    _, right, mapped, open_libc = calls_in_libc(0x7000_0000_0000)
    done = walked({before + 96: right}, 0x10010, at, 0, mapped, open_libc)
    assert done.ips == [0x10010]
    assert done.rules[0x10010, INSTRUCTION] == HARD


def test_a_register_that_leads_to_the_caller_may_do_so_in_the_code_around(tmp_path: Path) -> None:
    # given code of which nothing is told, between functions that call frame information tells of
    at = 0x7FFF_0000_1000
    code, mapping, library = untold(tmp_path, 0x7000_0000_0000, keeps=True)
    within = code["within"]

    def from_within(words: dict[int, int]) -> Finished:
        return walked(words, within, at, 0, (mapping,), lambda _: os.open(library, os.O_RDONLY), at + 256)

    # when it keeps in rbx where its data ends
    done = from_within({at + 256: code["before"] + 5})
    # then the same rule may hold for its blocks, and for no others
    rule = Rule(RuleKind.BY_RBX, 8, 0, RuleFlags.GUESS)
    assert done.rules.pop((within, INSTRUCTION)) == rule
    blocks = {block: each for (block, scope), each in done.rules.items() if scope is RuleScope.BLOCK}
    whole = range(code["untold"] + BLOCK_BYTES - 1 & -BLOCK_BYTES, code["behind"] - BLOCK_BYTES + 1, BLOCK_BYTES)
    assert blocks == dict.fromkeys(whole, rule)
    # but not where what it led to was no caller
    done = from_within({at + 256: code["behind"] + 5} | dict.fromkeys(range(at + 264, at + PAGE, 8), 0x1234))
    assert done.ending is Walked.STUCK
    assert done.rules[within, INSTRUCTION] == HARD
    assert not any(RuleFlags.GUESS in each.flags for each in done.rules.values())


def test_a_register_that_points_to_something_else_hides_no_caller() -> None:
    # given that nothing follows where rbx points to, as at the start of a thread of musl
    at = 0x7FFF_0000_1000
    caller, _, mapped, open_libc = calls_in_libc(0x7000_0000_0000)
    words = {at + 24: caller} | dict.fromkeys(range(at + 32, at + PAGE, 8), 0x10100)
    # when
    done = walked(words, 0x10010, at, 0, mapped, open_libc, at + 512)
    # then
    assert done.ips[:2] == [0x10010, caller]
    assert done.found[:2] == [Found.INTERRUPTED, Found.BY_GUESS]


@pytest.mark.parametrize("beyond", [0, 0x1234])
def test_callers_that_lead_nowhere_were_no_callers(beyond: int) -> None:
    # given a stack in which something looks like a return address, but what would be its caller's is none
    at = 0x7FFF_0000_1000
    stale, _, mapped, open_libc = calls_in_libc(0x7000_0000_0000)
    words = {at + 24: stale} | dict.fromkeys(range(at + 32, at + PAGE, 8), beyond)
    # when
    done = walked(words, 0x10010, at, 0, mapped, open_libc)
    # then it ends before that, and nobody takes it for whole
    assert done.ips == [0x10010]
    assert done.ending is Walked.STUCK


GO = """
.section .go.buildinfo, "a"
.quad 0
.text
.globl goexit, caller, in_c
goexit: nop
    call goexit
    nop
caller: call goexit
    nop
in_c:
.cfi_startproc
    ret
.cfi_endproc
"""


def test_callers_of_generated_code_that_may_be_generated_are_not_passed_over() -> None:
    # given generated code that keeps no frame pointers, and was called by some more; a library called that
    at = 0x7FFF_0000_1000
    caller, _, mapped, open_libc = calls_in_libc(0x7000_0000_0000)
    words = {at + 24: 0x10100, at + 64: caller}
    # then the library is not taken for what called the first
    done = walked(words, 0x10010, at, 0, mapped, open_libc)
    assert (done.ips, done.ending) == ([0x10010], Walked.STUCK)


class Go:
    """A library that looks like Go's, at BASE: call frame information tells only of a function in C."""

    BASE = 0x7000_0000_0000

    def __init__(self, folder: Path, source: str = GO) -> None:
        self.path, assembly = folder / "go.so", folder / "go.S"
        assembly.write_text(source)
        subprocess.run(["gcc", "-shared", "-nostdlib", assembly, "-o", self.path], check=True)
        mapped = Mapping(self.BASE, self.BASE + self.path.stat().st_size, 0, 0)
        self.mapped = (*GENERATED, mapped)
        self.goexit = self.BASE + offset_of(self.path, "goexit") + 1  # as Go puts it on a goroutine's stack
        self.in_c = self.BASE + offset_of(self.path, "in_c")
        self.called = self.BASE + offset_of(self.path, "caller") + 5  # behind the call

    def walked(self, words: dict[int, int], rsp: int, rbp: int, rip: int = 0x10010) -> Finished:
        """Walks a stack; without an address from generated code on."""
        return walked(words, rip, rsp, rbp, self.mapped, lambda _: os.open(self.path, os.O_RDONLY))


def test_a_stack_of_go_ends_where_its_goroutine_began(tmp_path: Path) -> None:
    at, go = 0x7FFF_0000_1000, Go(tmp_path)
    words = {at: at + 64, at + 8: go.called, at + 64: 0, at + 72: go.goexit}
    done = go.walked(words, at, at)
    assert (done.ips, done.ending) == ([0x10010, go.called, go.goexit], Walked.WHOLE)
    assert done.rules[go.goexit, RuleScope.RETURN] == END


def test_what_lies_on_another_stack_is_not_searched_on_this_one(tmp_path: Path) -> None:
    # given Go's code that has changed stacks and called C, and what looks like a return address on the stack of now
    at, go = 0x7FFF_0000_1000, Go(tmp_path)
    words = {at: go.called, at + 64: go.called}
    # when
    done = go.walked(words, at, 0xC000_0000_1000, go.in_c)
    # then nothing was guessed, and BPF can follow the frame pointer
    assert (done.ips, done.ending) == ([go.in_c, go.called], Walked.STUCK)
    assert done.rules[go.called, RuleScope.RETURN] == TO_OTHER_STACK
    # but not where Go's own code was called on another stack
    done = go.walked({at: 0xC000_0000_1000, at + 8: go.called, at + 64: go.called}, at, at)
    assert (done.ips, done.ending) == ([0x10010, go.called], Walked.STUCK)
    assert done.rules[go.called, RuleScope.RETURN] == HARD
    # and in another compiler's code it is a guess
    other = Go(tmp_path, GO.replace(".go.buildinfo", ".other"))
    assert other.walked(words, at, 0xC000_0000_1000, other.in_c).ips == [other.in_c, other.called, other.called]


def test_an_image_that_nobody_can_read_is_like_generated_code() -> None:
    at = 0x7FFF_0000_1000
    file = (Mapping(0x10000, 0x20000, 0, 5),)
    done = walked({at + 64: 0, at + 72: 0x10100}, 0x10010, at, at + 64, file)
    assert done.ips == [0x10010, 0x10100]


def test_a_stack_is_not_walked_beyond_the_limit() -> None:
    at = 0x7FFF_0000_1000
    words: dict[int, int] = {}
    for frame in range(40):
        words |= {at + 32 * frame: at + 32 * frame + 32, at + 32 * frame + 8: 0x10100}
    done = walked(words, 0x10010, at, at, GENERATED)
    assert (done.ending, len(done.ips)) == (Walked.DEEP, 20)
