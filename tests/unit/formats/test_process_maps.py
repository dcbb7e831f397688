"""/proc/PID/maps of real processes, and lines that are made to be misread."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from pathlib import Path

from iaprof.formats.wire.process_maps import EXECUTABLE, Mapping, lines, mappings, maps_of


def test_a_mapped_file_is_there_with_what_fstat_says(tmp_path: Path) -> None:
    # given a file that is mapped from its second page on, and then deleted
    path = tmp_path / "a file [heap]"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        memory = mmap.mmap(
            file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=mmap.PAGESIZE
        )
    path.unlink()
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # when
    [found] = [each for each in mappings(maps_of()) if each.start <= start < each.end]
    # then
    assert found.name == os.fsencode(path) + b" (deleted)"
    assert (found.start, found.end, found.offset) == (start, start + mmap.PAGESIZE, mmap.PAGESIZE)
    assert (found.rights, found.inode) == (b"rw-p", status.st_ino)


def test_every_line_of_a_process_is_read() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x\n")
        process.stdin.flush()
        process.stdout.readline()  # it runs
        text = maps_of(process.pid)
        process.stdin.close()
    found = list(mappings(text))
    assert len(found) == len(text.splitlines()) > 5
    assert [each for each in found if b"x" in each.rights] == list(mappings(text, EXECUTABLE))
    assert any(each.name == b"[vdso]" for each in found)
    assert maps_of(process.pid) == b""


def test_only_wanted_lines() -> None:
    text = (
        b"00400000-00401000 r-xp 00000000 fe:01 12 /a/lib.so\n"
        b"00401000-00402000 rw-p 00001000 fe:01 12 /a/lib.so\n"
        b"7f0000000000-7f0000001000 r-xp 00000000 00:00 0 \n"
        b"7f0000001000-7f0000002000 r-xp 00000000 103:2a 18446744073709551615 /b/other.so (deleted)\n"
        b"no line 00400000-00401000 r-xp 00000000 fe:01 12 /a/lib.so\n"
        b"7f0000003000-7f0000004000 r-xp"
    )
    first = Mapping(0x400000, 0x401000, b"r-xp", 0, 0xFE << 32 | 1, 12, b"/a/lib.so")
    nameless = Mapping(0x7F0000000000, 0x7F0000001000, b"r-xp", 0, 0, 0, b"")
    last = Mapping(
        0x7F0000001000, 0x7F0000002000, b"r-xp", 0, 0x103 << 32 | 0x2A, (1 << 64) - 1, b"/b/other.so (deleted)"
    )
    assert list(mappings(text, lines(rb"/a/.*", rights=rb"..x."))) == [first]
    assert list(mappings(text, EXECUTABLE)) == [first, nameless, last]
    assert first.span == "400000-401000"
