"""Names of the entries of procedure linkage tables: as objdump and gdb print them, for all linkers' tables."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaprof.symbols.names.demangle import demangled
from iaprof.symbols.symbolizers.binaries import Binaries
from thorough import usually
from unit.elf_patching import bounds_of
from unit.symbols.asked import code, gdb_names, our_names

SOURCE = """
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int (*volatile printing)(const char *) = puts;
int main(int count, char **words) {
    printing("x");
    puts(words[0]);
    free(malloc(count));
    printf("%zu %f\\n", strlen(words[0]), cos(count));
    return atoi(words[0]);
}
"""
IBT = "-fcf-protection -Wl,-z,ibtplt"
LLD_IBT = "-fcf-protection -fuse-ld=lld -Wl,-z,force-ibt"
LAYOUTS = [
    "-no-pie -Wl,-z,lazy",
    "-no-pie -Wl,-z,now",
    "-pie -Wl,-z,lazy",
    "-pie -Wl,-z,now",
    f"-pie -Wl,-z,lazy {IBT}",
    f"-pie -Wl,-z,now {IBT}",
    f"-no-pie -Wl,-z,lazy {IBT}",
    "-pie -fno-plt",
    "-pie -fuse-ld=gold -Wl,-z,lazy",
    "-no-pie -fuse-ld=gold -Wl,-z,now",
    "-pie -fuse-ld=lld -Wl,-z,lazy",
    "-no-pie -fuse-ld=lld -Wl,-z,now",
    f"-pie -Wl,-z,lazy {LLD_IBT}",
    f"-pie -Wl,-z,now {LLD_IBT}",
]


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Binaries]:
    with Binaries(tmp_path_factory.mktemp("cache") / "cache") as made:
        yield made


def linked(folder: Path, flags: str, *more: str) -> Path:
    (folder / "a.c").write_text(SOURCE)
    words = ["gcc", "-O1", "-fno-builtin", *flags.split(), *more, "-o", "program", "a.c", "-lm"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return folder / "program"


def tables(path: Path) -> list[range]:
    return [code(path, name) for name in (".plt", ".plt.sec", ".plt.got", ".iplt") if has(path, name)]


def has(path: Path, section: str) -> bool:
    try:
        bounds_of(path.read_bytes(), section)
    except KeyError:
        return False
    return True


def of_objdump(path: Path) -> dict[int, str]:
    """The name of each instruction's address in these tables, by objdump."""
    names = {}
    for table in tables(path):
        words = ["objdump", "-d", f"--start-address={table[0]:#x}", f"--stop-address={table[-1] + 1:#x}", str(path)]
        name = ""
        for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines():
            if head := re.fullmatch(r"([0-9a-f]+) <(.*)>:", line):
                name = head[2] if head[2].endswith("@plt") else ""
            elif instruction := re.match(r" *([0-9a-f]+):\t", line):
                names[int(instruction[1], 16)] = name
    return names


@pytest.mark.parametrize("stripped", usually([True], [False, True]))
@pytest.mark.parametrize("flags", LAYOUTS)
def test_entries_have_the_names_that_objdump_gives_them(
    flags: str, stripped: bool, tmp_path: Path, binaries: Binaries
) -> None:
    program = linked(tmp_path, flags, *(["-s"] if stripped else []))
    theirs = of_objdump(program)
    ours = dict(zip(theirs, our_names(binaries, program, theirs), strict=True))
    named = {address: name for address, name in theirs.items() if name}
    assert {address: ours[address] for address in named} == named
    if "no-plt" not in flags:
        assert len(set(named.values())) >= 7
    # objdump and gdb do not name the first half of an entry that is split, which pushes the relocation's index.
    others = {ours[address] for address in theirs if not theirs[address]} - {""}
    assert others <= set(theirs.values())
    assert bool(others) == ("ibt" in flags)


def test_bytes_between_instructions_belong_to_the_same_entry_as_in_gdb(tmp_path: Path, binaries: Binaries) -> None:
    program = linked(tmp_path, "-pie -Wl,-z,lazy", "-s")
    places = [place for table in tables(program) for place in table]
    assert our_names(binaries, program, places) == gdb_names(program, places)


@pytest.mark.parametrize("flags", ["-static", "-static-pie", "-static -fuse-ld=lld", "-static -fuse-ld=gold"])
def test_entries_of_static_programs_have_the_name_of_the_function_that_chooses(
    flags: str, tmp_path: Path, binaries: Binaries
) -> None:
    program = linked(tmp_path, flags)
    listed = subprocess.run(["readelf", "-sW", program], capture_output=True, text=True, check=True).stdout
    choosing: dict[int, set[str]] = {}
    # readelf calls the type IFUNC only in files that say that they are for GNU's system, which lld does not write.
    for match in re.finditer(r"^ *\d+: ([0-9a-f]+) +\d+ (?:IFUNC|<OS specific>: 10) .* (\S+)$", listed, re.MULTILINE):
        choosing.setdefault(int(match[1], 16), set()).add(f"{match[2]}@plt")
    listed = subprocess.run(["readelf", "-rW", program], capture_output=True, text=True, check=True).stdout
    addends = {int(match[1], 16) for match in re.finditer(r"R_X86_64_IRELATIVE? +([0-9a-f]+)", listed)}
    places = [place for table in tables(program) for place in table]
    ours = set(our_names(binaries, program, places)) - {""}
    without = {f"*ABS*+{addend:#x}@plt" for addend in addends - choosing.keys()}
    chosen = {min(names, key=lambda name: (len(name), name)) for at, names in choosing.items() if at in addends}
    assert ours == chosen | without
    assert "strlen@plt" in ours
    # when it is stripped
    subprocess.run(["strip", program], check=True)
    assert set(our_names(binaries, program, places)) - {""} == {f"*ABS*+{addend:#x}@plt" for addend in addends}


def test_retpolines_of_lld_have_names_too(tmp_path: Path, binaries: Binaries) -> None:
    """objdump knows no such entry; the calls in main tell."""
    program = linked(tmp_path, "-no-pie -fuse-ld=lld -Wl,-z,retpolineplt", "-Wl,--emit-relocs")
    main = subprocess.run(["objdump", "-dr", "--disassemble=main", program], capture_output=True, text=True, check=True)
    called = re.findall(r"call +([0-9a-f]+).*\n.*R_X86_64_PLT32\t(\w+)", main.stdout)
    assert len(called) >= 5
    ours = our_names(binaries, program, [int(address, 16) for address, _ in called])
    assert ours == [f"{name}@plt" for _, name in called]


def test_names_of_c_plus_plus_are_demangled_as_in_gdb(tmp_path: Path, binaries: Binaries) -> None:
    (tmp_path / "a.cpp").write_text("#include <string>\nint main(int, char **a) { return std::stoi(std::string(*a)); }")
    program = tmp_path / "program"
    subprocess.run(["g++", "-O1", "-o", program, "a.cpp"], cwd=tmp_path, check=True)
    places = code(program, ".plt")[16::16]
    ours = [demangled(name) for name in our_names(binaries, program, places)]
    assert ours == gdb_names(program, places, demangled=True)
    assert any(name.startswith("std::") and name.endswith(")@plt") for name in ours)


@pytest.mark.parametrize("value", [0, 1 << 31, (1 << 32) - 1])
def test_damaged_relocations_cost_only_their_names(value: int, tmp_path: Path, binaries: Binaries) -> None:
    program = linked(tmp_path, "-pie -Wl,-z,lazy")
    content = bytearray(program.read_bytes())
    offset, size = bounds_of(bytes(content), ".rela.plt")
    for at in range(offset, offset + size, 24):
        struct.pack_into("<I", content, at + 12, value)  # the relocation's symbol
    program.write_bytes(content)
    places = [*code(program, ".plt"), *code(program, ".plt.got")]
    assert set(our_names(binaries, program, places)) <= {"", "__cxa_finalize@plt"}
    assert "main" in our_names(binaries, program, code(program, ".text"))
