"""Recognising calls before return addresses, compared with a disassembler's view of whole libraries."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from iaprof.symbols.files.elf import read_elf
from iaprof.symbols.unwind.file_code import begins_goroutine, can_be_returned_to, ends_a_call, without_call

_INSTRUCTION = re.compile(r"^ *([0-9a-f]+):\t((?:[0-9a-f]{2} )+) *\t(.*)$", re.MULTILINE)


def around(before: str, after: str = "cc" * 8) -> tuple[bytes, bytes]:
    """The bytes before an address and from it on, from hexadecimal."""
    return (bytes(8) + bytes.fromhex(before))[-8:], bytes.fromhex(after)[:8]


def test_every_call_of_the_c_library_is_recognised() -> None:
    maps = Path("/proc/self/maps").read_text()
    library = next(line.split()[-1] for line in maps.splitlines() if re.search(r"/libc[.-]", line))
    listing = subprocess.run(["objdump", "-d", "-w", library], capture_output=True, text=True, check=True).stdout
    ends, calls = [], []
    for address, raw, text in _INSTRUCTION.findall(listing):
        ends.append(int(address, 16) + len(raw.split()))
        calls.append(re.search(r"(^|\s)l?callq? ", text) is not None)
    addresses, is_call = np.array(ends, np.uint64), np.array(calls)
    with open(library, "rb") as file:
        offsets, known = read_elf(file.fileno()).offsets(addresses - np.uint64(1))
    assert known.all()
    assert is_call.sum() > 5000
    content = Path(library).read_bytes()
    recognised = np.array([ends_a_call(content[end - 8 : end]) for end in (offsets + np.uint64(1)).tolist()])
    assert recognised[is_call].all()
    # The end of another instruction looks like a call only rarely.
    assert recognised[~is_call].mean() < 0.01


@pytest.mark.parametrize(
    "before",
    [
        "e8 11 22 33 44",  # call rel32
        "ff d0", "41 ff d7",  # call *%rax, *%r15
        "ff 10", "41 ff 17",  # call *(%rax), *(%r15)
        "ff 14 24", "ff 14 c8",  # call *(%rsp), *(%rax,%rcx,8)
        "ff 50 08", "ff 55 f8", "41 ff 57 08",  # call *8(%rax), *-8(%rbp), *8(%r15)
        "ff 54 24 08",  # call *8(%rsp)
        "ff 15 11 22 33 44",  # call *rel32(%rip)
        "ff 90 11 22 33 44",  # call *disp32(%rax)
        "ff 94 24 11 22 33 44",  # call *disp32(%rsp)
        "ff 14 25 11 22 33 44", "ff 14 c5 11 22 33 44",  # call *disp32, *disp32(,%rax,8)
    ],
)  # fmt: skip
def test_every_form_of_call_is_recognised(before: str, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.write_bytes(bytes.fromhex(before))
    command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", str(code)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"\tcall ", listing), listing  # the disassembler agrees
    assert ends_a_call(around(before)[0])
    assert ends_a_call(bytes.fromhex(before))
    assert can_be_returned_to(*around(before))


@pytest.mark.parametrize(
    "before",
    [
        "00" * 7, "90" * 7, "cc" * 7,
        "c3", "0f 05",  # ret, syscall
        "e9 11 22 33 44", "eb 11",  # jmp
        "ff e0", "ff 25 11 22 33 44",  # jmp *%rax, *rel32(%rip)
        "ff 14", "ff 54 24",  # incomplete calls
        "ff 15 11 22 33",
        "ff 14 25",
        "e8 11 22 33", "e8 11 22 33 44 55",
        "48 89 e5",
    ],
)  # fmt: skip
def test_other_instructions_are_not_calls(before: str) -> None:
    assert not can_be_returned_to(*around(before))


def test_signal_returns_and_goroutine_starts_need_no_call() -> None:
    restorer = around("0f 1f 80 00 00 00 00", "48 c7 c0 0f 00 00 00 0f 05")  # mov $0xf,%rax; syscall
    goexit = around("cc cc cc cc cc cc 90", "e8 11 22 33 44 90 cc cc")  # nop; call runtime.goexit1; nop
    assert can_be_returned_to(*restorer)
    assert not begins_goroutine(*restorer)
    assert can_be_returned_to(*goexit)
    assert begins_goroutine(*goexit)
    assert not can_be_returned_to(*around("90" * 7, "48 c7 c0 0e 00 00 00 0f 05"))  # another system call
    assert not begins_goroutine(*around("cc" * 7, "e8 11 22 33 44 90 cc cc"))


def test_missing_bytes_are_not_a_call() -> None:
    assert not can_be_returned_to(b"", b"")
    assert not ends_a_call(b"\xff")


def test_without_call_finds_the_addresses_after_which_no_call_ends(tmp_path: Path) -> None:
    # given the ends of a library's instructions, and which of them are calls
    source, library = tmp_path / "a.c", tmp_path / "a.so"
    source.write_text("int g(int); int (*h)(int); int f(int n) { return g(n) + h(n) * g(n + 1); }\n")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    listing = subprocess.run(["objdump", "-d", "-w", library], capture_output=True, text=True, check=True).stdout
    ends = {
        int(address, 16) + len(raw.split()): re.search(r"(^|\s)callq? ", text) is not None
        for address, raw, text in _INSTRUCTION.findall(listing[listing.index("<f>:") :])
    }
    assert 3 <= sum(ends.values()) < len(ends)
    # when looked up by the addresses of the bytes before
    with library.open("rb") as file:
        flags = without_call(read_elf(file.fileno()), np.array(list(ends), np.uint64) - np.uint64(1))
    # then
    assert flags is not None
    assert flags.tolist() == [not is_call for is_call in ends.values()]
