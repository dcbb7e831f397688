"""Code without call frame information, of which only some functions keep frame pointers: no wrong caller is taken."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from pathlib import Path

import pytest

from iaprof.formats.wire.unwind_rules import Walked
from iaprof.symbols.unwind.finishing import PAGE, Finished, Finishing, HowFound, Mapping, StackCopy
from stacks.debugger import Stop, offset_of, stops
from unit.symbols.unwind.test_unwind_walk import Files, mappings

# Deep calls, which leave words like return addresses below the stack of later ones.
LEAVES_WORDS = """
#define OPAQUE __attribute__((noipa))
static volatile int sink;
OPAQUE static void leaves_words(int depth) {
    volatile char room[ROOM];
    room[0] = depth;
    if (depth)
        leaves_words(depth - 1);
    sink += room[0];
}
"""
# Each function calls the next one; `top` and `mid` keep frame pointers, others have other data in rbp, or none.
SOURCE = (
    f"#define ROOM 64\n{LEAVES_WORDS}"
    + """
#include <stdint.h>
#define WITH OPAQUE __attribute__((optimize("no-omit-frame-pointer")))
#define WITHOUT OPAQUE __attribute__((optimize("omit-frame-pointer")))
void stop_here(void);
WITHOUT static void leaf(void) { volatile uintptr_t room[12]; sink = (int)(uintptr_t)&room; stop_here(); sink++; }
WITHOUT static void inner(int n) { volatile uintptr_t room[9]; sink = (int)(uintptr_t)&room + n; leaf(); sink++; }
WITH static void mid(int n) { volatile char room[n + 8]; room[n] = n; inner(n); sink += room[n]; }
WITH static void top(int n) { mid(n); sink++; }
OPAQUE static void by_pointer(void (*function)(int), int n) { function(n); sink++; }
WITHOUT static void tail(int n) { volatile char room[40]; room[n] = n; by_pointer(top, n); sink += room[n]; }
int main(void) {
    for (int n = 0; n < 8; n++) {
        leaves_words(30);
        tail(n);
    }
}
"""
)
STOP = """
.globl stop_here
.type stop_here, @function
stop_here:
    nop
    ret
.size stop_here, . - stop_here
.section .note.GNU-stack,"",@progbits
"""
CHAIN = ["leaf", "inner", "mid", "top", "by_pointer", "tail", "main"]
# As MKL's: code that keeps the old stack pointer in its frame, which is larger than what is searched for a caller.
KERNELS = """
.macro KERNEL name, slot, does=nop
.globl \\name
.type \\name, @function
\\name:
    sub $0x40, %rsp
    mov %rbx, (%rsp)
    mov %rbp, 8(%rsp)
    mov %r12, 16(%rsp)
    mov %rsp, %rbp
    sub $0xb000, %rsp
    and $-4096, %rsp
    mov %rbp, \\slot(%rsp)
    mov $7, %ebp
    mov $7, %ebx
    mov $7, %r12d
.globl within_\\name
within_\\name:
    \\does
    mov \\slot(%rsp), %rsp
.globl leaves_\\name
leaves_\\name:
.endm
KERNEL loads, 0x78
    mov (%rsp), %rbx
    mov 8(%rsp), %rbp
    mov 16(%rsp), %r12
    add $0x40, %rsp
    ret
KERNEL pops, 0x178
    pop %rbx
    pop %rbp
    pop %r12
    add $0x28, %rsp
    ret
.hidden entered
KERNEL nests, 0x178, "call entered"
    pop %rbx
    pop %rbp
    pop %r12
    add $0x28, %rsp
    ret
KERNEL entered, 0x180 /* at its first instruction, its slot is that of `nests` */
    pop %rbx
    pop %rbp
    pop %r12
    add $0x28, %rsp
    ret
.section .note.GNU-stack,"",@progbits
"""
CALLS_KERNELS = (
    f"#define ROOM 4000\n{LEAVES_WORDS}"
    + """
void loads(void);
void pops(void);
void nests(void);
static void (*kernels[])(void) = {pops, loads, nests};
OPAQUE static void caller(void (*kernel)(void), int n) {
    volatile char room[n + 8];
    room[n] = n;
    kernel();
    sink += room[n];
}
OPAQUE static void outer(int n) { caller(kernels[n % 3], n); sink++; }
int main(void) {
    for (int n = 0; n < 6; n++) {
        leaves_words(30);
        outer(n);
    }
}
"""
)
BUILDS = {"O2": ["-O2"], "Os": ["-Os"], "not aligned": ["-O2", "-fno-align-functions"], "stripped": ["-O2", "-s"]}


@pytest.fixture(params=BUILDS)
def stopped(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, list[Stop]]:
    """The program with all its names, and the stops in one without call frame information."""
    source, assembly, library = tmp_path / "guesses.c", tmp_path / "stop.S", tmp_path / "libstop.so"
    source.write_text(SOURCE)
    assembly.write_text(STOP)
    subprocess.run(["gcc", "-shared", "-nostdlib", assembly, "-o", library], check=True)
    program, named = tmp_path / "program", tmp_path / "named"
    flags: list[str | Path] = [
        "-g0",
        "-fno-asynchronous-unwind-tables",
        "-fno-unwind-tables",
        "-fno-optimize-sibling-calls",
        "-no-pie",
    ]
    links: list[str | Path] = [source, library, f"-Wl,-rpath,{tmp_path}"]
    own = BUILDS[request.param]
    subprocess.run(["gcc", *flags, *own, *links, "-o", program], check=True)
    subprocess.run(["gcc", *flags, *(word for word in own if word != "-s"), *links, "-o", named], check=True)
    places = {library: [offset_of(library, "stop_here")]}
    return named, list(stops([program], tmp_path, memory=True, places=places))


def functions_of(program: Path) -> list[tuple[int, str]]:
    """Addresses and names of functions, sorted."""
    text = subprocess.run(["nm", "--defined-only", program], capture_output=True, text=True, check=True).stdout
    return sorted((int(at, 16), name) for at, name in re.findall(r"(?m)^(\w+) [tT] (\S+)$", text))


def finished(finishing: Finishing, stop: Stop, files: Files) -> Finished:
    """Finishes the stack of a stop, of which 16 pages are copied."""
    top = stop.registers[7] & -PAGE
    copied = {at: page for at, page in stop.pages.items() if top <= at < top + 16 * PAGE}
    registers = {number: value for number, value in stop.registers.items() if number <= 16}
    return finishing.finish(1, mappings(stop, files), StackCopy(registers, HowFound.INTERRUPTED, copied), 100)


def names_at(functions: list[tuple[int, str]], ips: list[int]) -> list[str]:
    """Names of the functions that have these addresses."""
    return [[name for at, name in functions if at <= ip][-1] for ip in ips]


def test_a_caller_is_never_another_functions(stopped: tuple[Path, list[Stop]]) -> None:
    named, all_stops = stopped
    functions, files = functions_of(named), Files()
    assert len(all_stops) == 8
    with Finishing(files.open) as finishing:
        for stop in all_stops:
            done = finished(finishing, stop, files)
            # then the callers are those that the program has
            assert names_at(functions, done.ips.tolist()[1 : 1 + len(CHAIN)]) == CHAIN
            assert done.ending is Walked.WHOLE
            # and known to be guessed
            assert (done.how_found[1 : 1 + len(CHAIN)] == HowFound.BY_GUESS).all()


def test_a_function_without_cfi_that_keeps_the_old_stack_pointer(tmp_path: Path) -> None:
    # given a kernel without call frame information whose callers need rbp, which it uses for something else
    source, assembly, library = tmp_path / "calls.c", tmp_path / "kernels.S", tmp_path / "libkernels.so"
    source.write_text(CALLS_KERNELS)
    assembly.write_text(KERNELS)
    subprocess.run(["gcc", "-shared", "-nostdlib", assembly, "-o", library], check=True)
    program = tmp_path / "program"
    flags = ["-O2", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-no-pie"]
    subprocess.run(["gcc", *flags, source, library, f"-Wl,-rpath,{tmp_path}", "-o", program], check=True)
    names = ("within_loads", "within_pops", "leaves_loads", "leaves_pops", "entered")
    places = {offset_of(library, name): name for name in names}
    all_stops = list(stops([program], tmp_path, memory=True, places={library: list(places)}))
    functions, files = functions_of(program), Files()
    assert len(all_stops) == 10
    enters, returns = offset_of(library, "entered"), offset_of(library, "within_nests") + 5
    with Finishing(files.open) as finishing:
        for stop in all_stops:
            # when
            done = finished(finishing, stop, files)
            # then its caller is found by what its end would restore, and is a guess
            place = next(name for at, name in places.items() if (stop.registers[16] - at) % PAGE == 0)
            ips, own = done.ips.tolist(), 2 if place == "entered" else 1
            callers = names_at(functions, ips[own : own + 3])
            assert (place, callers, done.ending) == (place, ["caller", "outer", "main"], Walked.WHOLE)
            how_found = [HowFound.INTERRUPTED, *[HowFound.BY_GUESS] * own, HowFound.BY_RULE]
            assert done.how_found[: own + 2].tolist() == how_found
            # and a kernel that has just been called has no frame yet: the words above are those of its caller
            assert own == 1 or ips[1] - ips[0] == returns - enters


def test_the_ends_of_large_functions_are_not_searched_in_all_frames(tmp_path: Path) -> None:
    # given a library whose functions nothing tells apart, and a stack of many frames in it
    assembly, library, base, at, frames = tmp_path / "large.S", tmp_path / "large.so", 0x30000, 0x7FFF_0000_1000, 200
    assembly.write_text(".globl returns\ncall *%rax\nreturns: .fill 0x100000, 1, 0x90\n")
    subprocess.run(["gcc", "-shared", "-nostdlib", assembly, "-o", library], check=True)
    returns = base + offset_of(library, "returns")
    mapped = (Mapping(base, base + library.stat().st_size, 0, 0),)
    words = struct.pack(f"<{PAGE // 8}Q", *[0, 0, 0, returns] * (PAGE // 32))
    pages = {at + PAGE * index: words for index in range(32 * frames // PAGE + 1)}
    # when
    with Finishing(lambda _: os.open(library, os.O_RDONLY)) as finishing:
        done = finishing.finish(1, mapped, StackCopy({16: returns, 7: at}, HowFound.INTERRUPTED, pages), frames)
    # then that search leaves room for the one of the stack
    assert (done.ips.tolist(), done.ending) == ([returns] * frames, Walked.DEEP)
