"""Which anonymous memory counts as text of a file that its process copied there."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaprof.formats.wire.process_maps import HUGE_PAGE
from iaprof.record.unwinding.mappings import with_remapped_text
from iaprof.symbols.unwind.finishing import Mapping

AT = 0x5600_0000_0000  # a multiple of HUGE_PAGE
SIZE = 4 * HUGE_PAGE
HEAD, COPY = Mapping(AT - 4096, AT, 4096, 3), Mapping(AT, AT + HUGE_PAGE, 0, -1)
TAIL = Mapping(AT + HUGE_PAGE, AT + HUGE_PAGE + 4096, 8192 + HUGE_PAGE, 3)
TEXT = Mapping(AT, AT + HUGE_PAGE, 8192, 3)


@pytest.fixture
def content(tmp_path: Path) -> Iterator[bytes]:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 * mmap.PAGESIZE) * (SIZE // mmap.PAGESIZE // 4))
    yield path.read_bytes()


def found(content: bytes, *mappings: Mapping, changed: int = 0, readable: bool = True) -> list[Mapping]:
    """What `with_remapped_text` gives; the memory is that of the file, but for the first `changed` bytes of pages."""
    opened: list[int] = []

    def page(address: int) -> bytes:
        at = address - AT + TEXT.offset
        return bytes(changed) + content[at + changed : at + mmap.PAGESIZE]

    def open_(image: int) -> int | None:
        assert image == 3
        if not readable:
            return None
        file = os.memfd_create("file")
        os.write(file, content)
        opened.append(file)
        return file

    result = list(with_remapped_text(mappings, page, open_))
    for file in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)
    return result


def test_memory_between_or_beside_what_is_left_of_the_text(content: bytes) -> None:
    assert found(content, HEAD, COPY, TAIL) == [HEAD, TEXT, TAIL]
    assert found(content, HEAD, COPY) == [HEAD, TEXT]
    assert found(content, COPY, TAIL) == [TEXT, TAIL]


def test_other_bytes_or_a_file_that_cannot_be_read(content: bytes) -> None:
    """A process may generate code there."""
    assert found(content, HEAD, COPY, TAIL, changed=8) == [HEAD, COPY, TAIL]
    assert found(content, HEAD, COPY, TAIL, readable=False) == [HEAD, COPY, TAIL]
    assert found(bytes(SIZE), HEAD, COPY, TAIL) == [HEAD, COPY, TAIL], "zeros, as memory has that nobody wrote"
    assert found(content[:8192], HEAD, COPY, TAIL) == [HEAD, COPY, TAIL], "the file ends before"


@pytest.mark.parametrize(
    "mappings",
    [
        (HEAD, COPY, TAIL._replace(offset=TAIL.offset + 4096)),  # the two parts are not of one text
        (HEAD, COPY, TAIL._replace(image=4)),
        (HEAD, COPY._replace(end=COPY.end - 4096)),
        (HEAD._replace(end=AT - 8192, start=AT - 12288), COPY),
        (COPY, TAIL._replace(offset=4096)),  # the text would begin before the file
        (COPY._replace(image=5), TAIL),
        (COPY,),
    ],
)
def test_what_is_no_text(mappings: tuple[Mapping, ...], content: bytes) -> None:
    assert found(content, *mappings) == list(mappings)
