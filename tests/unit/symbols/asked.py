"""The names of code in a file: as gdb prints them, and as iaprof does."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from iaprof.basics.elf import PF_EXECUTE, PT_LOAD, SHF_EXECINSTR, ElfFile, in_memory
from iaprof.symbols.symbolizers.binaries import Binaries

_NAMED = re.compile(r"0x[0-9a-f]+ <(.*?)(?:\+\d+)?>")


def gdb_names(path: Path, addresses: Iterable[int], *, demangled: bool = False) -> list[str]:
    """The symbol that gdb prints for each address, without offset, demangled or not; empty for none."""
    words = ["gdb", "-nx", "-batch", "-ex", "set style enabled off"]
    words += ["-ex", "set print asm-demangle on"] if demangled else ["-ex", "set demangle off"]
    for address in addresses:
        words += ["-ex", f"output/a {address:#x}", "-ex", r"echo \n"]
    done = subprocess.run([*words, str(path)], capture_output=True, text=True, check=True)
    named = (_NAMED.fullmatch(line) for line in done.stdout.splitlines() if line.startswith("0x"))
    return [match[1] if match else "" for match in named]


def our_names(binaries: Binaries, path: Path, addresses: Iterable[int]) -> list[str]:
    """The outermost function that iaprof finds for each address of a file; empty for none."""
    loads = [load for load in ElfFile(in_memory(path.read_bytes())).segments if load.type == PT_LOAD]
    offsets = []
    for address in addresses:
        load = next(load for load in loads if load.flags & PF_EXECUTE and 0 <= address - load.address < load.size)
        offsets.append(address - load.address + load.offset)
    places = np.array(offsets, np.uint64)
    with path.open("rb") as file:
        names = binaries.name(file.fileno(), np.unique(places)).names
    return [names.frames(row)[0].function if row >= 0 else "" for row in names.find(places).tolist()]


def code(path: Path, section: str = "") -> range:
    """The addresses of all executable sections, or of one section, from the first to the last."""
    elf = ElfFile(in_memory(path.read_bytes()))
    chosen = [
        elf.sections[index]
        for name, index in elf.indices.items()
        if elf.sections[index].flags & SHF_EXECINSTR and section in ("", name)
    ]
    return range(min(each.address for each in chosen), max(each.address + each.size for each in chosen))
