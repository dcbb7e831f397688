"""Split debug information: the same lines and inlined functions as without -gsplit-dwarf, or why there are none."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.symbolizer import MEANT, difference, llvm_symbolizer
from iaprof.report.cpu_names import SymbolizerChain
from iaprof.symbols.files.elf import read_elf
from iaprof.symbols.files.split_dwarf import Sections, skeletons, whole_unit
from iaprof.symbols.names.names import Frame, Module, ModuleKind, Symbolized
from iaprof.symbols.symbolizers.binaries import Binaries, Companions
from iaprof.symbols.symbolizers.local_files import LocalFiles
from thorough import usually
from unit.builds import no_descriptor_is_lost
from unit.elf_patching import bounds_of

SOURCE = """
#include <cstdlib>
static inline __attribute__((always_inline)) int inner_UNIT(int x) {
    if (x & 1)
        x += std::abs(x - 3) * 7;
    return x * 3;
}
#ifdef MORE
int more_UNIT(int x) { return x; }
#endif
__attribute__((noinline)) int outer_UNIT(int x) {
    int y = inner_UNIT(x);
    if (__builtin_expect(y == 12345, 0))
        std::abort();
    for (int i = 0; i < x; i++)
        y ^= inner_UNIT(y + i);
    return y ^ 5;
}
"""
MAIN = """
int outer_one(int), outer_two(int);
int main(int count, char **) { return outer_one(count) + outer_two(count); }
"""
COMPILERS = [(compiler, version) for compiler in ("g++", "clang++") for version in (4, 5)]
LEVELS = ["-g", "-g1"]


@pytest.fixture
def binaries(tmp_path: Path) -> Iterator[Binaries]:
    with Binaries(tmp_path / "cache") as made, open("/proc/self/exe", "rb") as file:
        made.facts(file.fileno())  # starts the child, which stays
        yield made


def compiled(folder: Path, compiler: str, version: int, *flags: str) -> Path:
    """A program of three units; those with functions of several sections have ranges."""
    folder.mkdir(exist_ok=True)
    for unit in ("one", "two"):
        (folder / f"{unit}.cpp").write_text(SOURCE.replace("UNIT", unit))
    (folder / "main.cpp").write_text(MAIN)
    for unit in ("one", "two", "main"):
        words = [compiler, "-O2", f"-gdwarf-{version}", *flags, "-ffunction-sections", "-c", f"{unit}.cpp"]
        subprocess.run(words, cwd=folder, check=True)
    subprocess.run([compiler, "-Wl,--build-id", "-o", "program", "one.o", "two.o", "main.o"], cwd=folder, check=True)
    return folder / "program"


def opened(path: str) -> int | None:
    return os.open(path, os.O_RDONLY) if os.path.isfile(path) else None


def functions_of(program: Path) -> np.ndarray:
    """The addresses of the code of the units."""
    listed = subprocess.run(["nm", "-S", program], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines() if len(line.split()) == 4]
    mine = [(int(at, 16), int(size, 16)) for at, size, kind, name in rows if "outer_" in name or name == "main"]
    return np.unique(np.concatenate([np.arange(at, at + size, dtype=np.uint64) for at, size in mine]))


def named(binaries: Binaries, program: Path, addresses: np.ndarray, path: Path | None = None) -> Symbolized:
    """Names addresses of a program without segments that are moved in the file."""
    with program.open("rb") as file, no_descriptor_is_lost():
        elf = read_elf(file.fileno())
        offsets, known = elf.offsets(addresses)
        assert known.all()
        return binaries.name(file.fileno(), offsets, companions=Companions(str(path or program), opened))


def chains(symbolized: Symbolized, program: Path, addresses: np.ndarray) -> list[tuple[Frame, ...]]:
    with program.open("rb") as file:
        offsets, _ = read_elf(file.fileno()).offsets(addresses)
    names = symbolized.names
    return [names.frames(row) if row >= 0 else () for row in names.find(offsets).tolist()]


@pytest.mark.parametrize("level", usually(LEVELS[-1:], LEVELS))
@pytest.mark.parametrize(("compiler", "version"), COMPILERS)
def test_lines_and_inlined_functions_are_those_of_the_program_that_is_not_split(
    compiler: str, version: int, level: str, tmp_path: Path, binaries: Binaries
) -> None:
    program = compiled(tmp_path / "build", compiler, version, level)
    addresses = functions_of(program)
    whole = chains(named(binaries, program, addresses), program, addresses)
    program = compiled(tmp_path / "build", compiler, version, level, "-gsplit-dwarf")
    assert functions_of(program).tolist() == addresses.tolist()
    symbolized = named(binaries, program, addresses)
    ours = chains(symbolized, program, addresses)
    assert ours == whole
    if compiler == "g++":  # for clang's, ours differ from llvm-symbolizer's without -gsplit-dwarf, too
        theirs = llvm_symbolizer(program, addresses.tolist())
        assert [pair for pair in zip(ours, theirs, strict=True) if difference(*pair) not in MEANT] == []
    assert symbolized.problem == ""
    assert symbolized.source.startswith("debug information")
    inlined = {frame.function for chain in ours for frame in chain[1:]}
    assert len([name for name in inlined if "inner_one" in name or "inner_two" in name]) == 2


# LLVM 14's does not end for units of GCC's DWARF 5, and binutils' reads only DWARF 4.
@pytest.mark.parametrize(
    ("compiler", "version", "collector"),
    [("g++", 4, "dwp"), ("clang++", 4, "dwp"), ("g++", 4, "llvm-dwp"), ("clang++", 4, "llvm-dwp"),
     ("clang++", 5, "llvm-dwp")],
)  # fmt: skip
def test_a_dwp_beside_the_program_has_all_units(
    compiler: str, version: int, collector: str, tmp_path: Path, binaries: Binaries
) -> None:
    program = compiled(tmp_path / "build", compiler, version, "-g", "-gsplit-dwarf")
    addresses = functions_of(program)
    before = chains(named(binaries, program, addresses), program, addresses)
    subprocess.run([collector, "-e", program, "-o", f"{program}.dwp"], cwd=tmp_path / "build", check=True, timeout=60)
    for path in (tmp_path / "build").glob("*.dwo"):
        path.unlink()
    symbolized = named(binaries, program, addresses)
    assert chains(symbolized, program, addresses) == before
    assert (symbolized.source, symbolized.problem) == ("debug information", "")


@pytest.mark.parametrize(("compiler", "version"), usually(COMPILERS[-1:], COMPILERS))
def test_what_is_missing_is_told(compiler: str, version: int, tmp_path: Path, binaries: Binaries) -> None:
    program = compiled(tmp_path / "build", compiler, version, "-g", "-gsplit-dwarf")
    addresses = functions_of(program)
    whole = chains(named(binaries, program, addresses), program, addresses)
    # beside the program instead of where they were made
    (tmp_path / "elsewhere").mkdir()
    for path in [program, *(tmp_path / "build").glob("*.dwo")]:
        path.rename(tmp_path / "elsewhere" / path.name)
    program = tmp_path / "elsewhere" / "program"
    assert chains(named(binaries, program, addresses), program, addresses) == whole
    # one is of another build, whose id differs
    other = compiled(tmp_path / "other", compiler, version, "-g", "-gsplit-dwarf", "-DMORE")
    shutil.copy(other.with_name("one.dwo"), program.with_name("one.dwo"))
    symbolized = named(binaries, program, addresses)
    assert symbolized.problem == "its lines are in one.dwo, which is not there, or of another build"
    lines = {chain[0].function: {frame.line for frame in chain} for chain in chains(symbolized, program, addresses)}
    assert lines["_Z9outer_onei"] == {0}
    assert lines["_Z9outer_twoi"] != {0}
    # all are gone
    for path in program.parent.glob("*.dwo"):
        path.unlink()
    symbolized = named(binaries, program, addresses)
    assert "its lines are in " in symbolized.problem
    assert " and 2 more files, which are not there, or of another build" in symbolized.problem
    assert symbolized.source == "symbol table"


def test_reports_say_that_lines_are_missing_though_all_functions_have_names(tmp_path: Path, binaries: Binaries) -> None:
    program = compiled(tmp_path / "build", "g++", 5, "-g", "-gsplit-dwarf")
    addresses = functions_of(program)
    with program.open("rb") as file:
        elf = read_elf(file.fileno())
        offsets, _ = elf.offsets(addresses)
        module = Module(ModuleKind.FILE, str(program), elf.build_id)
    symbolizer = SymbolizerChain([LocalFiles(binaries, None, [], None)])
    found = symbolizer.name(module, offsets, offsets)
    assert (found.source, found.problem) == (f"debug information of {program}", "")
    (tmp_path / "build" / "two.dwo").unlink()
    with no_descriptor_is_lost():
        found = symbolizer.name(module, offsets, offsets)
    assert found.problem == "its lines are in two.dwo, which is not there, or of another build"
    # and below --symfs, where the paths of another system are
    shutil.copytree(tmp_path / "build", tmp_path / "root" / tmp_path.relative_to("/") / "build", dirs_exist_ok=True)
    found = SymbolizerChain([LocalFiles(binaries, tmp_path / "root", [], None)]).name(module, offsets, offsets)
    assert "two.dwo" in found.problem


@pytest.mark.parametrize(("compiler", "version"), COMPILERS)
def test_damage_costs_lines_only(compiler: str, version: int, tmp_path: Path, binaries: Binaries) -> None:
    program = compiled(tmp_path / "build", compiler, version, "-g", "-gsplit-dwarf")
    addresses = functions_of(program)
    good = (tmp_path / "build" / "one.dwo").read_bytes()
    random = np.random.default_rng(7)
    for section in (".debug_info.dwo", ".debug_abbrev.dwo", ".debug_str_offsets.dwo"):
        damaged = bytearray(good)
        offset, size = bounds_of(good, section)
        damaged[offset + 20 : offset + size] = random.bytes(size - 20)
        (tmp_path / "build" / "one.dwo").write_bytes(damaged)
        result = named(binaries, program, addresses)
        functions = {chain[0].function for chain in chains(result, program, addresses)}
        assert {"_Z9outer_onei", "_Z9outer_twoi", "main"} <= functions
    # and of the program
    content = program.read_bytes()
    for section in (".debug_info", ".debug_abbrev", ".debug_addr", ".debug_str"):
        damaged = bytearray(content)
        offset, size = bounds_of(content, section)
        damaged[offset : offset + size] = random.bytes(size)
        program.write_bytes(damaged)
        functions = {chain[0].function for chain in chains(named(binaries, program, addresses), program, addresses)}
        assert {"_Z9outer_onei", "_Z9outer_twoi", "main"} <= functions


def test_a_unit_is_made_only_of_the_dwo_with_its_id(tmp_path: Path) -> None:
    program = compiled(tmp_path / "build", "clang++", 5, "-g", "-gsplit-dwarf")
    with program.open("rb") as file, program.with_name("one.dwo").open("rb") as other:
        elf, split = Sections(read_elf(file.fileno())), Sections(read_elf(other.fileno()))
        found = {unit.name: whole_unit(elf, unit, split) is not None for unit in skeletons(elf)}
    assert found == {b"one.dwo": True, b"two.dwo": False, b"main.dwo": False}
