"""Code without a caller: found by call frame information and code, compared with gdb and readelf."""

from __future__ import annotations

import random
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from iaprof.symbols.files.elf import read_elf
from iaprof.symbols.unwind import file_code
from iaprof.symbols.unwind.file_code import outermost
from stacks.debugger import build, stops


@dataclass(frozen=True)
class Place:
    """A return address, as an offset in a file."""

    offset: int
    file: Path

    @property
    def is_outermost(self) -> bool | None:
        with self.file.open("rb") as file:
            elf = read_elf(file.fileno())
            addresses, _ = elf.addresses(np.array([self.offset - 1], np.uint64))
            flags = outermost(self.file.read_bytes(), addresses)
            return None if flags is None else bool(flags[0])


@pytest.mark.parametrize("flags", [(), ("-static-pie",), ("-fno-omit-frame-pointer",)])
def test_the_callers_of_main_and_of_thread_functions_are_outermost(tmp_path: Path, flags: tuple[str, ...]) -> None:
    # given the callers that gdb finds of a function in main and in a thread
    program = build(tmp_path, "beginnings.c", "-O1", *flags)
    main_s, thread_s = stops([program], tmp_path, memory=True)
    stacks = {
        name: [Place(offset, path) for path, offset in stop.places]
        for name, stop in {"MAIN": main_s, "THREAD": thread_s}.items()
    }
    # when looked up in the stripped program
    for file in {place.file for places in stacks.values() for place in places} & {program}:
        subprocess.run(["strip", file], check=True)
    are_outermost = {stop: [place.is_outermost for place in places] for stop, places in stacks.items()}
    # then the callers of main and of the thread's function are outermost, and the very first functions
    _, main, caller, *_, first = are_outermost["MAIN"]
    assert (main, caller, first) == (False, True, True)
    _, function, caller, *_, first = are_outermost["THREAD"]
    assert (function, caller, first) == (False, True, True)


def test_only_few_functions_of_the_c_library_are_outermost() -> None:
    # given all functions, and those whose return address is undefined by readelf
    library = re.search(r"/\S+/libc\.so\.6", Path("/proc/self/maps").read_text())[0]  # type: ignore[index]
    # readelf fails if it cannot follow the link to a debug file, but prints the frames.
    text = subprocess.run(
        ["readelf", "--debug-dump=frames", library], capture_output=True, text=True, check=False
    ).stdout
    entries = re.findall(r"FDE cie=\S+ pc=([0-9a-f]+)\.\.([0-9a-f]+)\n((?:  .*\n)*)", text)
    marked = {int(start, 16) for start, _, cfi in entries if "DW_CFA_undefined: r16" in cfi}
    starts = np.array(sorted(int(start, 16) for start, _, _ in entries), np.uint64)
    # when
    flags = outermost(Path(library).read_bytes(), starts)
    # then
    assert flags is not None
    are_outermost = set(starts[flags].tolist())
    assert marked and marked < are_outermost
    assert len(are_outermost - marked) == 2


def test_without_call_frame_information_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int f(int n) { return n; }\n")
    flags = ("-shared", "-fno-asynchronous-unwind-tables", "-nostdlib")
    subprocess.run(["cc", *flags, "-o", tmp_path / "a.so", tmp_path / "a.c"], check=True)
    assert outermost((tmp_path / "a.so").read_bytes(), np.zeros(1, np.uint64)) is None


def test_more_addresses_than_the_limit_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_code, "MOST_ADDRESSES", 1)
    content = Path("/proc/self/exe").read_bytes()
    assert outermost(content, np.zeros(1, np.uint64)) is not None
    assert outermost(content, np.zeros(2, np.uint64)) is None


def test_damaged_call_frame_information_does_no_harm() -> None:
    library = re.search(r"/\S+/libc\.so\.6", Path("/proc/self/maps").read_text())[0]  # type: ignore[index]
    whole = Path(library).read_bytes()
    with open(library, "rb") as file:
        elf = read_elf(file.fileno())
        indices = [elf.section(name) for name in (".eh_frame", ".eh_frame_hdr")]
        sections = [elf.sections[index] for index in indices if index is not None]
    assert len(sections) == 2
    answered = 0
    for seed in range(20):
        # given a library whose call frame information is damaged in many places
        rng, content = random.Random(seed), bytearray(whole)
        for section in sections:
            for _ in range(2000):
                content[section.offset + rng.randrange(section.size)] = rng.randrange(256)
        # when, then
        flags = outermost(bytes(content), np.array([rng.randrange(1 << 21) for _ in range(500)], np.uint64))
        if flags is not None:
            assert len(flags) == 500
            answered += 1
    assert answered > 0


def test_a_personality_pointer_of_unknown_encoding_does_no_harm(tmp_path: Path) -> None:
    # given a function with a personality routine
    (tmp_path / "a.c").write_text(
        "void g(void); void h(int *p) { g(); }\n"
        'void f(void) { __attribute__((cleanup(h))) int n = 1; g(); __asm__ volatile("" : : "r"(&n)); }\n'
    )
    library = tmp_path / "a.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-fexceptions", "-o", library, tmp_path / "a.c"], check=True)
    content = library.read_bytes()
    at = content.index(b"zPLR\0") + len(b"zPLR\0")  # followed by two factors, a register and a length, a byte each
    assert content[at + 4] == 0x9B
    text = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    starts = np.array([int(start, 16) for start in re.findall(r"^([0-9a-f]+) [tT] ", text, re.MULTILINE)], np.uint64)
    assert outermost(content, starts) is not None
    # when the pointer to it has an unknown encoding
    flags = outermost(content[: at + 4] + b"\x01" + content[at + 5 :], starts)
    # then
    assert flags is not None and len(flags) == len(starts)
