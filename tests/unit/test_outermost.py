"""Which code has no caller, by unwind data and code, compared with what gdb and readelf find."""

from __future__ import annotations

import random
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from iaprof.symbols.files.elf import read_elf
from iaprof.symbols.unwind import outermost as subject
from iaprof.symbols.unwind.outermost import outermost
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
            found = outermost(self.file.read_bytes(), addresses)
            return None if found is None else bool(found[0])


@pytest.mark.parametrize("flags", [(), ("-static-pie",), ("-fno-omit-frame-pointer",)])
def test_where_main_and_threads_begin(tmp_path: Path, flags: tuple[str, ...]) -> None:
    # given what gdb finds above a function
    program = build(tmp_path, "beginnings.c", "-O1", *flags)
    main_s, thread_s = stops([program], tmp_path, memory=True)
    found = {
        name: [Place(offset, path) for path, offset in stop.places]
        for name, stop in {"MAIN": main_s, "THREAD": thread_s}.items()
    }
    # when, in the file as it is without names
    for place in {place.file for places in found.values() for place in places} & {program}:
        subprocess.run(["strip", place], check=True)
    begun = {stop: [place.is_outermost for place in places] for stop, places in found.items()}
    # then it is what calls main or a thread's function, and the very first, and nothing before them
    _, main, caller, *_, first = begun["MAIN"]
    assert (main, caller, first) == (False, True, True)
    _, function, caller, *_, first = begun["THREAD"]
    assert (function, caller, first) == (False, True, True)


def test_of_all_functions_of_the_c_library_four_begin_something() -> None:
    # given the functions whose return address is undefined, as readelf has them, and all
    library = re.search(r"/\S+/libc\.so\.6", Path("/proc/self/maps").read_text())[0]  # type: ignore[index]
    # Its exit status is that of what it makes of the link to a debug file.
    text = subprocess.run(
        ["readelf", "--debug-dump=frames", library], capture_output=True, text=True, check=False
    ).stdout
    entries = re.findall(r"FDE cie=\S+ pc=([0-9a-f]+)\.\.([0-9a-f]+)\n((?:  .*\n)*)", text)
    marked = {int(start, 16) for start, _, cfi in entries if "DW_CFA_undefined: r16" in cfi}
    starts = np.array(sorted(int(start, 16) for start, _, _ in entries), np.uint64)
    # when
    found = outermost(Path(library).read_bytes(), starts)
    # then
    assert found is not None
    told = set(starts[found].tolist())
    assert marked and marked < told
    assert len(told - marked) == 2


def test_a_file_without_unwind_data_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int f(int n) { return n; }\n")
    flags = ("-shared", "-fno-asynchronous-unwind-tables", "-nostdlib")
    subprocess.run(["cc", *flags, "-o", tmp_path / "a.so", tmp_path / "a.c"], check=True)
    assert outermost((tmp_path / "a.so").read_bytes(), np.zeros(1, np.uint64)) is None


def test_too_many_addresses_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MOST_ADDRESSES", 1)
    content = Path("/proc/self/exe").read_bytes()
    assert outermost(content, np.zeros(1, np.uint64)) is not None
    assert outermost(content, np.zeros(2, np.uint64)) is None


def test_damaged_unwind_data_is_no_more_than_wrong() -> None:
    library = re.search(r"/\S+/libc\.so\.6", Path("/proc/self/maps").read_text())[0]  # type: ignore[index]
    whole = Path(library).read_bytes()
    with open(library, "rb") as file:
        elf = read_elf(file.fileno())
        indices = [elf.section(name) for name in (".eh_frame", ".eh_frame_hdr")]
        places = [elf.sections[index] for index in indices if index is not None]
    assert len(places) == 2
    answered = 0
    for seed in range(20):
        # given a library whose unwind data is damaged in many places
        rng, content = random.Random(seed), bytearray(whole)
        for section in places:
            for _ in range(2000):
                content[section.offset + rng.randrange(section.size)] = rng.randrange(256)
        # when, then
        found = outermost(bytes(content), np.array([rng.randrange(1 << 21) for _ in range(500)], np.uint64))
        if found is not None:
            assert len(found) == 500
            answered += 1
    assert answered > 0


def test_a_pointer_to_a_personality_of_unknown_encoding_is_not_read(tmp_path: Path) -> None:
    # given a function with a personality
    (tmp_path / "a.c").write_text(
        "void g(void); void h(int *p) { g(); }\n"
        'void f(void) { __attribute__((cleanup(h))) int n = 1; g(); __asm__ volatile("" : : "r"(&n)); }\n'
    )
    library = tmp_path / "a.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-fexceptions", "-o", library, tmp_path / "a.c"], check=True)
    content = library.read_bytes()
    at = content.index(b"zPLR\0") + len(b"zPLR\0")  # the factors, the register and a length are a byte each
    assert content[at + 4] == 0x9B
    text = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    starts = np.array([int(start, 16) for start in re.findall(r"^([0-9a-f]+) [tT] ", text, re.MULTILINE)], np.uint64)
    assert outermost(content, starts) is not None
    # when it is encoded as nothing is
    found = outermost(content[: at + 4] + b"\x01" + content[at + 5 :], starts)
    # then
    assert found is not None and len(found) == len(starts)
