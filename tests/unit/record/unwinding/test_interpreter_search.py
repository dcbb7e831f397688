"""In which of a process's files an interpreter is searched, and which results other processes share."""

from __future__ import annotations

from typing import cast

import pytest

from iaprof.record.symbolize.opener import Opener
from iaprof.record.unwinding.interpreters import InterpreterSearch
from iaprof.record.unwinding.mappings import Images
from iaprof.sandbox.parent import AnswerError
from iaprof.symbols.python.layout import layout_of
from iaprof.symbols.unwind.finishing import Finishing, FoundInterpreter, Mapping

LAYOUT = layout_of(11, 0x030B0000, lambda _: b"")
PROGRAM, LIBRARY = 1, 2  # inodes
RUNTIME = 0x9000  # in LIBRARY


class Files:
    """Stands for the child that reads files; one of them has an interpreter."""

    def __init__(self, images: Images) -> None:
        self.library = images.number(1, LIBRARY, b"/usr/lib/libpython3.11.so.1.0", 1, 0, 1)
        self.fails = 0

    def interpreter(self, image: int, offset: int) -> FoundInterpreter | None:
        if self.fails:
            self.fails -= 1
            raise AnswerError
        return FoundInterpreter(RUNTIME - offset, 0, 0, LAYOUT, "3.11.2") if image == self.library else None


@pytest.fixture
def images() -> Images:
    return Images(cast(Opener, None))


def mapping(images: Images, inode: int, name: bytes, start: int, offset: int = 0) -> Mapping:
    return Mapping(start, start + 0x1000, offset, images.number(1, inode, name, 1, start, start + 0x1000))


def library(images: Images, start: int, offset: int = 0) -> Mapping:
    return mapping(images, LIBRARY, b"/usr/lib/libpython3.11.so.1.0", start, offset)


def runtime(search: InterpreterSearch, *mappings: Mapping) -> int | None:
    found = search.find(mappings)
    assert found is None or not isinstance(found[1], str)
    return found[0].start + found[1].runtime if found is not None and not isinstance(found[1], str) else None


def test_libpython_behind_many_extension_modules_is_found(images: Images) -> None:
    """Libraries loaded later have lower addresses: extension modules come before libpython."""
    search = InterpreterSearch(cast(Finishing, Files(images)), images)
    program = mapping(images, PROGRAM, b"/usr/bin/python3.11", 0x1000)
    modules = [
        mapping(images, 10 + n, b"/lib/_m%d.cpython-311-x86_64-linux-gnu.so" % n, 0x10_0000 * (n + 1))
        for n in range(100)
    ]
    assert runtime(search, program, *modules, library(images, 0x7F00_0000_0000)) == 0x7F00_0000_0000 + RUNTIME


def test_processes_that_map_different_parts_of_a_file_get_their_own_addresses(images: Images) -> None:
    search = InterpreterSearch(cast(Finishing, Files(images)), images)
    assert runtime(search, library(images, 0x20_0000, offset=0x1000)) == 0x20_0000 - 0x1000 + RUNTIME
    assert runtime(search, library(images, 0x40_0000, offset=0x5000)) == 0x40_0000 - 0x5000 + RUNTIME


def test_a_file_that_could_not_be_read_once_is_read_for_the_next_process(images: Images) -> None:
    files = Files(images)
    search, files.fails = InterpreterSearch(cast(Finishing, files), images), 1
    assert runtime(search, library(images, 0x40_0000)) is None
    assert search.failures == 1
    assert runtime(search, library(images, 0x40_0000)) == 0x40_0000 + RUNTIME
