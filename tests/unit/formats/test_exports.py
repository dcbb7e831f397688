"""Exported symbols found by hash tables, compared with readelf; and hash tables that lead nowhere."""

from __future__ import annotations

import os
import struct
import subprocess
import time
from pathlib import Path

import pytest

from iaprof.basics.elf import LONGEST_CHAIN, ElfFile, in_memory

LIBRARIES = [Path("/lib/x86_64-linux-gnu") / name for name in ("libc.so.6", "libm.so.6", "libstdc++.so.6")]


def told(library: Path) -> dict[str, set[int]]:
    """The addresses of each function and variable, of whose versions there may be several."""
    words = ["readelf", "--wide", "--dyn-syms", str(library)]
    found: dict[str, set[int]] = {}
    for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[3] in ("FUNC", "OBJECT") and fields[6] != "UND":
            found.setdefault(fields[7].split("@")[0], set()).add(int(fields[1], 16))
    return found


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_each_symbol_is_where_readelf_says(library: Path) -> None:
    names = told(library)
    assert len(names) > 500
    with library.open("rb") as file:
        elf = ElfFile(in_memory(file.read()))
        for name, addresses in names.items():
            assert elf.exported(name.encode()) in addresses, name
        assert [elf.exported(name) for name in (b"", b"_PyRuntime", b"pthread", b"x" * 10_000)] == [None] * 4


@pytest.mark.parametrize("style", ["sysv", "gnu"])
def test_a_chain_without_an_end_is_left(style: str, tmp_path: Path) -> None:
    source = "".join(f"int variable_{number};" for number in range(8 * LONGEST_CHAIN))
    output = tmp_path / "library.so"
    words = [os.environ.get("CC", "cc"), "-shared", "-nostdlib", f"-Wl,--hash-style={style}", "-x", "c", "-", "-o"]
    subprocess.run([*words, output], input=source.encode(), check=True)
    content = bytearray(output.read_bytes())
    elf = ElfFile(in_memory(content))
    assert elf.exported(b"variable_77") is not None
    index = elf.section(".hash" if style == "sysv" else ".gnu.hash")
    assert index is not None
    start, size = elf.sections[index].offset, elf.sections[index].size
    content[start : start + size] = (round_and_round if style == "sysv" else all_the_same)(
        bytes(content[start : start + size])
    )
    began = time.process_time()
    assert elf.exported(b"missing") is None
    assert time.process_time() - began < 10


def round_and_round(table: bytes) -> bytes:
    """A DT_HASH in which the first symbol leads to itself."""
    return table[:8] + struct.pack("<I", 1) * (len(table) // 4 - 2)


def all_the_same(table: bytes) -> bytes:
    """A DT_GNU_HASH in which all symbols are in one chain and have the hash of "missing"."""
    hashed = 5381
    for byte in b"missing":
        hashed = hashed * 33 + byte & 0xFFFF_FFFF
    buckets, first, bloom_words = struct.unpack_from("<III", table)
    head = 16 + 8 * bloom_words
    chain = (len(table) - head) // 4 - buckets
    return b"".join((table[:head], struct.pack("<I", first) * buckets, struct.pack("<I", hashed & ~1) * chain))
