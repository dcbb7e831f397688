"""Finds the text that a process has copied into anonymous memory at the same addresses, to have it in huge pages.

`node --use-largepages`, programs with Intel's iodlr and those of BOLT's -hugify do this. /proc/PID/maps then shows
memory without a file between the rest of the file's mappings, although the file still has this code, with its call
frame information.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence

from iaprof.formats.wire.process_maps import HUGE_PAGE
from iaprof.symbols.unwind.finishing import Mapping


def with_remapped_text(
    found: Sequence[Mapping], page: Callable[[int], bytes], opened: Callable[[int], int | None]
) -> Iterator[Mapping]:
    """Yields a process's executable mappings, copied text as if it were still mapped from its file.

    Copied text consists of whole huge pages. It borders on what is left of the file's mapping, and has the bytes of the
    file.

    Args:
        found: the mappings, sorted.
        page: returns the page of the process's memory at an address.
        opened: opens the file with a number; returns None if it cannot be read.
    """
    for at, mapping in enumerate(found):
        if mapping.image < 0 and not (mapping.start | mapping.end) % HUGE_PAGE:
            around = (found[index] for index in (at - 1, at + 1) if 0 <= index < len(found))
            texts = {_as_file(mapping, each) for each in around if _is_beside(mapping, each)}
            if len(texts) == 1 and _has_bytes_of_file(text := texts.pop(), page, opened):
                mapping = text
        yield mapping


def _is_beside(mapping: Mapping, other: Mapping) -> bool:
    return other.image >= 0 and (other.end == mapping.start or other.start == mapping.end)


def _as_file(mapping: Mapping, neighbour: Mapping) -> Mapping:
    """Returns a mapping with the file of a neighbour, at the offset that it would have had there."""
    return Mapping(mapping.start, mapping.end, mapping.start - neighbour.start + neighbour.offset, neighbour.image)


def _has_bytes_of_file(text: Mapping, page: Callable[[int], bytes], opened: Callable[[int], int | None]) -> bool:
    """Tells whether one of three pages of memory is as in the file: a probe's breakpoint may have changed others."""
    file = opened(text.image) if text.offset >= 0 else None
    if file is None:
        return False
    try:
        for part in range(3):
            address = text.start + (text.end - text.start) * part // 3 // mmap.PAGESIZE * mmap.PAGESIZE
            content = os.pread(file, mmap.PAGESIZE, address - text.start + text.offset)
            if len(set(content)) > 1 and content == page(address):
                return True
    except OSError:
        pass
    finally:
        os.close(file)
    return False
