"""Stacks finished from copies: compared with gdb frame by frame, and made by hand to mislead or stop the walk."""

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
    BY_FRAME_POINTER,
    END,
    HARD,
    Rule,
    RuleFlags,
    RuleKind,
    RuleScope,
    Walked,
)
from iaprof.symbols.names.boot import open_vdso
from iaprof.symbols.unwind.finishing import PAGE, Finished, Finishing, HowFound, Mapping, StackCopy
from stacks.debugger import Stop, build, offset_of, stops
from thorough import usually

LIMIT, INSTRUCTION = 400, RuleScope.INSTRUCTION
WALKED = (3, 6, 7, 12, 13, 14, 15, 16)  # the registers that a probe records, by DWARF number


class Files:
    """Numbers the files of mappings, and opens them by number."""

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
    executable = []
    for span, rights, offset, _, _, *path in stop.maps:
        if "x" in rights:
            start, end = (int(bound, 16) for bound in span.split("-"))
            executable.append(Mapping(start, end, int(offset, 16), files.number(path[0].strip() if path else "")))
    return tuple(executable)


BUILDS = {
    "O2": ["-O2"],
    "native": ["-O3", "-march=native", "-fno-plt"],
    "realigned": ["-O2", "-mstackrealign", "-mavx2"],
}


def page_of(pages: dict[int, bytes], at: int) -> bytes:
    return pages.get(at, b"")


@pytest.mark.parametrize("options", usually(list(BUILDS.values())[:1], BUILDS.values()), ids=BUILDS.keys())
def test_finished_stacks_equal_those_of_gdb(tmp_path: Path, options: list[str]) -> None:
    files, kinds, count, by_signal = Files(), set(), 0, 0
    with Finishing(files.open) as finishing:
        spaces: dict[tuple[Mapping, ...], int] = {}
        for stop in stops([build(tmp_path, "stacks.cpp", *options), 2], tmp_path, memory=True):
            # given a copy of the innermost 16 pages; the walk asks for the stack that a signal interrupted
            mapped = mappings(stop, files)
            top = stop.registers[7] & -PAGE
            copied = {at: page for at, page in stop.pages.items() if top <= at < top + 16 * PAGE}
            copy = StackCopy(
                {n: value for n, value in stop.registers.items() if n in WALKED}, HowFound.INTERRUPTED, copied
            )
            space = spaces.setdefault(mapped, len(spaces))
            # when
            done = finishing.finish(space, mapped, copy, LIMIT, partial(page_of, stop.pages))
            # then
            assert (done.ending, [hex(ip) for ip in done.ips.tolist()]) == (Walked.WHOLE, [hex(pc) for pc in stop.pcs])
            assert HowFound.BY_GUESS not in done.how_found
            kinds |= {rule.kind for rule in done.rules.values()}
            by_signal += HowFound.INTERRUPTED in done.how_found[1:]
            count += 1
    assert count > 140
    assert by_signal > 50
    assert {RuleKind.BY_RSP, RuleKind.BY_RBP, RuleKind.SIGNAL, RuleKind.END} <= kinds


# ---- stacks made by hand ----


def walked(
    words: dict[int, int],
    rip: int,
    rsp: int = 0x7FFF_0000_1000,
    rbp: int = 0,
    mapped: tuple[Mapping, ...] = (),
    open_image: Callable[[int], int | None] = lambda _: None,
    rbx: int = 0,
) -> Finished:
    """Walks a stack with these words, by address."""
    pages = {address & -PAGE: bytearray(PAGE) for address in (rsp, *words)}
    for address, word in words.items():
        pages[address & -PAGE][address % PAGE : address % PAGE + 8] = word.to_bytes(8, "little")
    copy = StackCopy(
        {16: rip, 7: rsp, 6: rbp, 3: rbx}, HowFound.INTERRUPTED, {at: bytes(page) for at, page in pages.items()}
    )
    with Finishing(open_image) as finishing:
        return finishing.finish(1, mapped, copy, 20)


GENERATED = (Mapping(0x10000, 0x20000, 0, -1),)


def test_an_address_outside_of_code_gives_an_empty_stack() -> None:
    assert walked({}, 0x1234).ending is Walked.NOWHERE
    assert walked({}, 0x1234).ips.tolist() == []


def test_the_frame_pointer_leads_to_callers_of_generated_code() -> None:
    # given three frames of generated code, the outermost without a caller
    at = 0x7FFF_0000_1000
    words = {at + 64: at + 128, at + 72: 0x10100, at + 128: at + 256, at + 136: 0x10200, at + 256: 0, at + 264: 0}
    done = walked(words, 0x10010, at, at + 64, GENERATED)
    # then its callers are marked
    assert done.ips.tolist() == [0x10010, 0x10100, 0x10200]
    assert done.how_found.tolist() == [HowFound.INTERRUPTED, HowFound.BY_GUESS, HowFound.BY_GUESS]
    assert done.rules[0x10100, RuleScope.RETURN] == Rule(
        RuleKind.BY_RBP, 16, -16, done.rules[0x10100, RuleScope.RETURN].flags
    )


def test_a_frame_pointer_that_leads_in_a_circle_ends_the_walk() -> None:
    at = 0x7FFF_0000_1000
    done = walked({at + 64: at + 64, at + 72: 0x10100}, 0x10010, at, at + 64, GENERATED)
    assert done.ips.tolist() == [0x10010, 0x10100]
    assert done.ending is Walked.STUCK
    assert done.rules[0x10100, RuleScope.RETURN] == HARD


def calls_in_libc(base: int) -> tuple[int, int, tuple[Mapping, ...], Callable[[int], int]]:
    """Return addresses of indirect calls in libc mapped at `base`, mappings of it and GENERATED, and its opener."""
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so.6" in line)
    content = Path(libc).read_bytes()
    calls = re.finditer(rb"\xff[\xd0-\xd3]", content[0x40000:0x80000])
    first, second = [base + call.end() for call in calls][:2]
    mapped = (*GENERATED, Mapping(base, base + len(content), 0, 0))
    return first + 0x40000, second + 0x40000, mapped, lambda _: os.open(libc, os.O_RDONLY)


GAP = """
.globl before, gap, within, after
before:
.cfi_startproc
.cfi_undefined rip
    call *%rax
    .fill 200, 1, 0x90
.cfi_endproc
gap:
    mov %rsp, %rbx
    .fill 397, 1, 0x90
within:
    .fill 500, 1, 0x90
after:
.cfi_startproc
    call *%rax
    .fill 200, 1, 0x90
.cfi_endproc
"""
"""Functions with call frame information, and code without it between them."""


def library_with_gap(folder: Path, base: int, keeps: bool) -> tuple[dict[str, int], Mapping, Path]:
    """The addresses of the labels of GAP, its mapping as image 1, and the file.

    Args:
        folder: for the file.
        base: where the library is mapped.
        keeps: whether the code without call frame information copies rsp to rbx.
    """
    library, assembly = folder / "gap.so", folder / "gap.S"
    assembly.write_text(GAP if keeps else GAP.replace("mov %rsp, %rbx", "mov %rsp, %rcx"))
    subprocess.run(["gcc", "-shared", "-nostdlib", assembly, "-o", library], check=True)
    at = {name: base + offset_of(library, name) for name in ("before", "gap", "within", "after")}
    return at, Mapping(base, base + library.stat().st_size, 0, 1), library


@pytest.mark.parametrize("keeps", [True, False])
def test_the_search_skips_data_if_rbx_keeps_the_stack_pointer(tmp_path: Path, keeps: bool) -> None:
    # given code without call frame information, with 30 KiB of data on its stack, of which only the ends were touched;
    # it keeps the old stack pointer in rbx, or not
    at, before = 0x7FFF_0000_1000, 0x7FFF_0000_1000 + (30 << 10)
    caller, _, libc, open_libc = calls_in_libc(0x7000_0000_0000)
    code, mapping, library = library_with_gap(tmp_path, 0x30000, keeps)
    # when an earlier call has left a return address in the data
    stale = code["before"] + 2
    words = {at + 64: stale, before + 96: caller}
    words |= dict.fromkeys(range(before + 104, (before | PAGE - 1) - 7, 8), stale)
    openers: dict[int, Callable[[int], int]] = {0: open_libc, 1: lambda _: os.open(library, os.O_RDONLY)}
    mapped = tuple(sorted((*libc, mapping)))
    done = walked(words, code["within"], at, 0, mapped, lambda image: openers[image](image), before)
    # then the search skips the data if rbx points behind it, and a rule is learnt
    assert done.ips.tolist()[:2] == [code["within"], caller if keeps else stale]
    assert done.how_found[:2].tolist() == [HowFound.INTERRUPTED, HowFound.BY_GUESS]
    expected = Rule(RuleKind.BY_RBX, 96 + 8, 0, RuleFlags.GUESS) if keeps else done.rules[code["within"], INSTRUCTION]
    assert done.rules[code["within"], INSTRUCTION] == expected
    assert (expected.kind is RuleKind.BY_RBX) is keeps


def test_the_search_ends_at_a_page_that_was_never_touched() -> None:
    at, before = 0x7FFF_0000_1000, 0x7FFF_0000_1000 + (30 << 10)
    _, right, mapped, open_libc = calls_in_libc(0x7000_0000_0000)
    done = walked({before + 96: right}, 0x10010, at, 0, mapped, open_libc)
    assert done.ips.tolist() == [0x10010]
    assert done.rules[0x10010, INSTRUCTION] == HARD


def test_the_search_ends_at_the_end_of_the_address_space() -> None:
    at = (1 << 64) - 10 * PAGE + 64  # the search would reach into the last page
    done = walked(dict.fromkeys(range(at, 1 << 64, PAGE), 0), 0x10010, at, 0, GENERATED)
    assert (done.ips.tolist(), done.ending) == ([0x10010], Walked.STUCK)


def test_a_rule_by_rbx_is_learnt_for_the_surrounding_code(tmp_path: Path) -> None:
    # given code without call frame information between functions with it
    at = 0x7FFF_0000_1000
    code, mapping, library = library_with_gap(tmp_path, 0x7000_0000_0000, keeps=True)
    within = code["within"]

    def from_within(words: dict[int, int]) -> Finished:
        return walked(words, within, at, 0, (mapping,), lambda _: os.open(library, os.O_RDONLY), at + 256)

    # when rbx points to the end of its data
    done = from_within({at + 256: code["before"] + 2})
    # then the rule is learnt for its blocks, and for no others
    rule = Rule(RuleKind.BY_RBX, 8, 0, RuleFlags.GUESS)
    assert done.rules.pop((within, INSTRUCTION)) == rule
    blocks = {block: learnt for (block, scope), learnt in done.rules.items() if scope is RuleScope.BLOCK}
    whole = range(code["gap"] + BLOCK_BYTES - 1 & -BLOCK_BYTES, code["after"] - BLOCK_BYTES + 1, BLOCK_BYTES)
    assert blocks == dict.fromkeys(whole, rule)
    # but not if it led to a wrong caller
    done = from_within({at + 256: code["after"] + 2} | dict.fromkeys(range(at + 264, at + PAGE, 8), 0x1234))
    assert done.ending is Walked.STUCK
    assert done.rules[within, INSTRUCTION] == HARD
    assert not any(RuleFlags.GUESS in learnt.flags for learnt in done.rules.values())


def test_an_unrelated_rbx_hides_no_caller() -> None:
    # given that no caller follows where rbx points to, as at the start of a thread of musl
    at = 0x7FFF_0000_1000
    caller, _, mapped, open_libc = calls_in_libc(0x7000_0000_0000)
    words = {at + 24: caller} | dict.fromkeys(range(at + 32, at + PAGE, 8), 0x10100)
    # when
    done = walked(words, 0x10010, at, 0, mapped, open_libc, at + 512)
    # then
    assert done.ips.tolist()[:2] == [0x10010, caller]
    assert done.how_found[:2].tolist() == [HowFound.INTERRUPTED, HowFound.BY_GUESS]


@pytest.mark.parametrize("beyond", [0, 0x1234])
def test_guessed_callers_that_lead_nowhere_are_dropped(beyond: int) -> None:
    # given a stack with a word that looks like a return address, but leads to no code
    at = 0x7FFF_0000_1000
    stale, _, mapped, open_libc = calls_in_libc(0x7000_0000_0000)
    words = {at + 24: stale} | dict.fromkeys(range(at + 32, at + PAGE, 8), beyond)
    # when
    done = walked(words, 0x10010, at, 0, mapped, open_libc)
    # then the stack ends before that word, and is not whole
    assert done.ips.tolist() == [0x10010]
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


def test_the_search_does_not_skip_likely_callers_in_generated_code() -> None:
    # given generated code without frame pointers, which other generated code called, which a library called
    at = 0x7FFF_0000_1000
    caller, _, mapped, open_libc = calls_in_libc(0x7000_0000_0000)
    words = {at + 24: 0x10100, at + 64: caller}
    # then the library is not taken for the direct caller
    done = walked(words, 0x10010, at, 0, mapped, open_libc)
    assert (done.ips.tolist(), done.ending) == ([0x10010], Walked.STUCK)


class Library:
    """A library at BASE, made of assembly."""

    BASE = 0x7000_0000_0000

    def __init__(self, folder: Path, source: str, *options: str) -> None:
        self.path, assembly = folder / "made.so", folder / "made.S"
        assembly.write_text(source)
        options = ("-shared", "-nostdlib", "-Wl,-Bsymbolic", *options)
        subprocess.run(["gcc", *options, assembly, "-o", self.path], check=True)
        self.mapped = (*GENERATED, Mapping(self.BASE, self.BASE + self.path.stat().st_size, 0, 0))

    def at(self, function: str) -> int:
        return self.BASE + offset_of(self.path, function)

    def walked(self, words: dict[int, int], rsp: int, rbp: int, rip: int = 0x10010) -> Finished:
        """Walks a stack with these words, by default from generated code on."""
        return walked(words, rip, rsp, rbp, self.mapped, lambda _: os.open(self.path, os.O_RDONLY))


class Go(Library):
    """A library that looks like Go's: only a C function has call frame information."""

    def __init__(self, folder: Path, source: str = GO) -> None:
        super().__init__(folder, source)
        self.goexit = self.at("goexit") + 1  # what Go pushes on a goroutine's stack
        self.in_c = self.at("in_c")
        self.called = self.at("caller") + 5  # after the call


def test_a_go_stack_is_whole_at_the_start_of_its_goroutine(tmp_path: Path) -> None:
    at, go = 0x7FFF_0000_1000, Go(tmp_path)
    words = {at: at + 64, at + 8: go.called, at + 64: 0, at + 72: go.goexit}
    done = go.walked(words, at, at)
    assert (done.ips.tolist(), done.ending) == ([0x10010, go.called, go.goexit], Walked.WHOLE)
    assert done.rules[go.goexit, RuleScope.RETURN] == END


def test_callers_of_go_code_on_another_stack_are_not_searched(tmp_path: Path) -> None:
    # given Go code that has switched stacks and called C, and a word on this stack that looks like a return address
    at, go = 0x7FFF_0000_1000, Go(tmp_path)
    words = {at: go.called, at + 64: go.called}
    # when
    done = go.walked(words, at, 0xC000_0000_1000, go.in_c)
    # then no caller is guessed, and BPF may follow the frame pointer to the other stack
    assert (done.ips.tolist(), done.ending) == ([go.in_c, go.called], Walked.STUCK)
    assert done.rules[go.called, RuleScope.RETURN] == BY_FRAME_POINTER._replace(
        flags=RuleFlags.GUESS | RuleFlags.OTHER_STACK
    )
    # but not if Go code was not found by a rule
    done = go.walked({at: 0xC000_0000_1000, at + 8: go.called, at + 64: go.called}, at, at)
    assert (done.ips.tolist(), done.ending) == ([0x10010, go.called], Walked.STUCK)
    assert done.rules[go.called, RuleScope.RETURN] == HARD
    # and for another compiler's code the caller is guessed
    other = Go(tmp_path, GO.replace(".go.buildinfo", ".other"))
    assert other.walked(words, at, 0xC000_0000_1000, other.in_c).ips.tolist() == [
        other.in_c,
        other.called,
        other.called,
    ]


NO_CFI = """
.text
.irp name, start, main, clears, counts, reads, called
.globl \\name
.type \\name, @function
.endr
start: xor %ebp, %ebp
    call main
    hlt
main: call clears
    call counts
    call reads
    nop
clears: xor %ebp, %ebp
    call called
    ret
counts: xor %r13d, %r13d
    call called
    ret
reads: xor %ebp, %r13d
    call called
    ret
called:
.cfi_startproc
    ret
.cfi_endproc
"""


# Free Pascal writes numbers of another size: the entry of a function that the linker left out covers everything.
COVERING = """
.section .debug_frame, "", @progbits
0: .long 2f - 1f
1: .long 0xffffffff
    .byte 3, 0, 1, 0x78, 16, 0x0c, 7, 8, 0x90, 1
.balign 8
2: .long 4f - 3f
3: .long 0b - 0b
    .quad 0, 1 << 38
.balign 8
4:
"""


@pytest.mark.parametrize("source", [NO_CFI, NO_CFI + COVERING], ids=["alone", "covered"])
@pytest.mark.parametrize("options", [(), ("-Wl,-e,start",)], ids=["library", "program"])
@pytest.mark.parametrize(("function", "xor", "call"), [("clears", 2, 5), ("counts", 3, 10), ("reads", 3, 15)])
def test_a_function_without_call_frame_information_does_not_begin_a_stack(
    tmp_path: Path, source: str, options: tuple[str, ...], function: str, xor: int, call: int
) -> None:
    # given functions that use rbp as any other register, right behind the one that starts main
    at, library = 0x7FFF_0000_1000, Library(tmp_path, source, *options)
    here, main, start, called = map(library.at, (function, "main", "start", "called"))
    words = {at: here + xor + 5, at + 8: main + call, at + 16: start + 7}
    # when
    done = library.walked(words, at, 0, called)
    # then the walk goes on to where main was started, and callers of code without call frame information are guesses
    assert (done.ips.tolist(), done.ending) == ([called, *words.values()], Walked.WHOLE)
    assert done.how_found.tolist()[1:] == [HowFound.BY_RULE, HowFound.BY_GUESS, HowFound.BY_GUESS]
    assert done.rules[start + 7, RuleScope.RETURN] == END
    assert done.rules[here + xor + 5, RuleScope.RETURN] != END


def test_an_unreadable_image_is_treated_like_generated_code() -> None:
    at = 0x7FFF_0000_1000
    file = (Mapping(0x10000, 0x20000, 0, 5),)
    done = walked({at + 64: 0, at + 72: 0x10100}, 0x10010, at, at + 64, file)
    assert done.ips.tolist() == [0x10010, 0x10100]


def test_a_stack_is_not_walked_beyond_the_limit() -> None:
    at = 0x7FFF_0000_1000
    words: dict[int, int] = {}
    for frame in range(40):
        words |= {at + 32 * frame: at + 32 * frame + 32, at + 32 * frame + 8: 0x10100}
    done = walked(words, 0x10010, at, at, GENERATED)
    assert (done.ending, len(done.ips.tolist())) == (Walked.DEEP, 20)
