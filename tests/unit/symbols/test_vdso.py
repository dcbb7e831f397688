"""The copy of the vDSO in a file."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

import elf_sections
from iaprof.symbols.names import boot
from iaprof.symbols.names.boot import open_vdso


def test_the_vdso_is_the_mapped_elf_image() -> None:
    # when
    fd = open_vdso()
    # then
    assert fd is not None
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with os.fdopen(fd, "rb") as file:
        functions = {symbol.name: symbol["st_value"] for symbol in elf_sections.symbols(ELFFile(file)).iter_symbols()}
        assert functions["clock_gettime"] > 0
        # and its functions lie within the mapping
        spans = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "[vdso]" in line]
        start, end = (int(part, 16) for part in spans[0].split("-"))
        assert os.fstat(fd).st_size == end - start
        assert all(0 <= offset < end - start for offset in functions.values())


def test_a_process_without_a_vdso(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"7f00-7f10 r--p 00000000 00:00 0 [vvar]\n7f10-7f20 r-xp 00000000 00:01 7 /tmp/x [vdso]\n"
    monkeypatch.setattr(boot, "maps_of", lambda: text)
    assert open_vdso() is None
