"""Call frame information that is only on a disk: the child reads it ahead, so that stacks do not wait for each part."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from elftools.elf.elffile import ELFFile
from numpy.typing import NDArray

from iaprof.symbols.unwind.finishing import PAGE, Finishing
from waiting import until

LIBC = ctypes.CDLL(None, use_errno=True)
MOST_PIECES = 200
PAGES_OF_PIECE = (512 << 10) // PAGE


def in_memory(path: Path) -> NDArray[np.bool_]:
    """Which pages of a file the page cache has."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE) as mapped:
        pages = (len(mapped) + PAGE - 1) // PAGE
        found = (ctypes.c_ubyte * pages)()
        start = ctypes.c_ubyte.from_buffer(mapped)
        failed = LIBC.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), found)
        del start
        assert not failed
        return np.array(np.frombuffer(bytes(found), np.uint8) & 1, np.bool_)


def forget(path: Path) -> None:
    """Has the page cache forget a file, but for pages that are mapped."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library of which no page is in memory."""
    original = max(Path(pyarrow.__file__).parent.glob("libarrow*.so*"), key=lambda each: each.stat().st_size)
    copied = tmp_path / "library.so"
    copied.write_bytes(original.read_bytes())
    with open(copied, "rb") as file:
        os.fsync(file.fileno())
    forget(copied)
    if in_memory(copied).all():
        pytest.skip("the folder for temporary files is in memory")
    return copied


def test_all_call_frame_information_is_read_ahead(library: Path) -> None:
    with open(library, "rb") as file:
        names = (".eh_frame_hdr", ".eh_frame")
        sections = [each for each in ELFFile(file).iter_sections() if each.name in names]
        first = min(each["sh_offset"] for each in sections) // PAGE
        end = -(-max(each["sh_offset"] + each["sh_size"] for each in sections) // PAGE)
    assert end - first > 3 * PAGES_OF_PIECE
    with Finishing(lambda _: os.open(library, os.O_RDONLY)) as finishing:
        assert finishing.prepare(0)
        assert not finishing.prepare(0)
        until(lambda: in_memory(library)[first : first + PAGES_OF_PIECE].all())
        forget(library)  # the kernel may have read much more than the first piece, up to some MB for each page
        rest = slice(first + PAGES_OF_PIECE, end)
        assert np.mean(in_memory(library)[rest]) < 0.5
        # when
        pieces = 0
        while finishing.read_ahead(0):
            pieces += 1
            assert pieces < MOST_PIECES
    # then all of it is there, or on its way
    assert pieces > 1
    until(lambda: in_memory(library)[rest].all())


def test_nothing_is_read_ahead_of_an_image_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with Finishing(lambda _: os.open(tmp_path / "file", os.O_RDONLY)) as finishing:
        assert not finishing.prepare(0)
        assert not finishing.read_ahead(0)
        assert not finishing.read_ahead(1)
