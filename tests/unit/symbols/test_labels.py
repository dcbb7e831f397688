"""Symbols of assembly, which often have no type and no size: the same names as gdb's."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaprof.symbols.symbolizers.binaries import Binaries
from unit.symbols.asked import code, gdb_names, our_names

NASM = """
bits 64
absolute_ equ 0x401003
section .text
global _start
global typed:function
_start: nop
  nop
.loop: nop
  jmp .loop
helper: nop
  ret
typed: nop
label: ret
section .other progbits alloc exec nowrite align=16
elsewhere: ret
  times 64 nop
section .data
datum: dq 0
"""

GNU = """
.text
.globl _start
_start: nop
.Llocal: nop
.set absolute, 0x401002
.globl sized
.type sized, @function
sized: nop
inner: nop
 ret
.size sized, . - sized
after: nop
 ret
.type typed, @function
typed:
untyped: ret
$x: nop
$d.1: nop
.weak strong
.globl weak
strong:
weak: ret
"""

# A function with call frame information of its own, but without a symbol, follows a label.
FRAMES = """
.text
.globl _start
_start: nop
 ret
before:
 .cfi_startproc
 ret
 .cfi_endproc
 nop
.Lstatic:
 .cfi_startproc
 nop
 ret
 .cfi_endproc
"""


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Binaries]:
    with Binaries(tmp_path_factory.mktemp("cache") / "cache") as made:
        yield made


def assembled(folder: Path, text: str) -> Path:
    (folder / "a.S").write_text(text)
    flags = ["-nostdlib", "-static", "-Wl,--eh-frame-hdr"]
    subprocess.run(["gcc", *flags, "-o", "program", "a.S"], cwd=folder, check=True)
    return folder / "program"


def test_labels_of_nasm_are_names(tmp_path: Path, binaries: Binaries) -> None:
    (tmp_path / "a.asm").write_text(NASM)
    subprocess.run(["nasm", "-f", "elf64", "a.asm"], cwd=tmp_path, check=True)
    subprocess.run(["ld", "-o", "program", "a.o"], cwd=tmp_path, check=True)
    program = tmp_path / "program"
    places = code(program)
    ours = our_names(binaries, program, places)
    assert ours == gdb_names(program, places)
    assert set(ours) == {"_start", "_start.loop", "helper", "typed", "label", "elsewhere", ""}, "and padding has none"
    stripped = tmp_path / "stripped"
    shutil.copy(program, stripped)
    subprocess.run(["strip", stripped], check=True)
    assert set(our_names(binaries, stripped, places)) == {""}


def test_exported_labels_of_a_stripped_library_are_names(tmp_path: Path, binaries: Binaries) -> None:
    (tmp_path / "a.asm").write_text(NASM.replace("_start", "exported"))
    subprocess.run(["nasm", "-f", "elf64", "a.asm"], cwd=tmp_path, check=True)
    subprocess.run(["ld", "-shared", "-s", "-o", "a.so", "a.o"], cwd=tmp_path, check=True)
    places = code(tmp_path / "a.so", ".text")
    ours = our_names(binaries, tmp_path / "a.so", places)
    assert ours == gdb_names(tmp_path / "a.so", places)
    assert set(ours) == {"exported", "typed"}


def test_labels_of_gnu_as_are_names_but_for_those_in_functions_and_local_ones(
    tmp_path: Path, binaries: Binaries
) -> None:
    program = assembled(tmp_path, GNU)
    places = code(program)
    ours = our_names(binaries, program, places)
    same = {"untyped": "typed", "strong": "weak", "$x": "typed", "$d.1": "typed"}
    assert ours == [same.get(name, name) for name in gdb_names(program, places)]
    assert {"sized", "after", "typed"} < set(ours)
    assert not {"inner", "absolute", "untyped", ".Llocal"} & set(ours)


def test_a_label_does_not_reach_into_a_function_with_frames_of_its_own(tmp_path: Path, binaries: Binaries) -> None:
    program = assembled(tmp_path, FRAMES)
    frames = subprocess.run(
        ["readelf", "--debug-dump=frames", program], capture_output=True, text=True, check=True
    ).stdout
    starts = [int(line.split("pc=")[1].split("..")[0], 16) for line in frames.splitlines() if "pc=" in line]
    places = code(program)
    names = our_names(binaries, program, places)
    assert names == ["_start", "_start", "before", "before", "", ""]
    assert starts == [places[2], places[4]]
