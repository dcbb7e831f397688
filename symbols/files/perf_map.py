"""Reads perf maps: text in which a process names the code that it generates, a line `START SIZE NAME` per function.

START and SIZE are hexadecimal, the name reaches to the end of the line (tools/perf/Documentation/jit-interface.txt).
Processes append lines, so of two overlapping lines the later one counts.

The process writes the file, so it may contain anything. It is read in chunks, from its end: an address that a later
chunk names is not looked up in earlier ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.symbols.files.hex_numbers import MOST_DIGITS, hex_numbers, padded
from iaprof.symbols.names.names import LONGEST_READ, shortened
from iaprof.symbols.names.segment_tree import SegmentTree

CHUNK = 4 << 20  # bytes
_LAST_ADDRESS = np.uint64((1 << 64) - 1)
_SPACE = (ord(" "), ord("\t"))


def read_perf_map(text: bytes | bytearray, addresses: NDArray[np.uint64]) -> tuple[dict[int, str], int]:
    """Finds the function at each address.

    Args:
        text: the whole file.
        addresses: uint64[n], sorted.

    Returns:
        The names by index in `addresses`, without entries for addresses that no line covers.
        The number of damaged lines.
    """
    names: dict[int, str] = {}
    unnamed = np.arange(len(addresses))
    skipped, end = 0, len(text)
    while end:
        begin = _chunk_begin(text, end)
        if end - begin > CHUNK:  # a single line: it is not worth the memory
            skipped, end = skipped + 1, begin
            continue
        names_of_chunk, damaged = _read_chunk(memoryview(text)[begin:end], addresses[unnamed])
        skipped += damaged
        names |= {int(unnamed[index]): name for index, name in names_of_chunk.items()}
        unnamed = np.delete(unnamed, list(names_of_chunk))
        end = begin
    return names, skipped


def _chunk_begin(text: bytes | bytearray, end: int) -> int:
    """Returns where the first whole line of the CHUNK bytes before `end` begins; `end` is the end of a line.

    A last line that is longer than that makes a chunk of its own.
    """
    if end <= CHUNK:
        return 0
    newline = text.find(b"\n", end - CHUNK - 1, end - 1)
    return (newline if newline >= 0 else text.rfind(b"\n", 0, end - CHUNK)) + 1


def _read_chunk(chunk: memoryview, addresses: NDArray[np.uint64]) -> tuple[dict[int, str], int]:
    """Like read_perf_map, for a chunk of whole lines."""
    text = padded(chunk)
    newlines = np.flatnonzero(text[: len(chunk)] == ord("\n"))
    begins = np.concatenate([np.zeros(1, np.int64), newlines + 1])
    ends = np.append(newlines, len(chunk))
    not_empty = begins < ends
    begins, ends = begins[not_empty], ends[not_empty]
    starts, positions, good = _field(text, begins)
    sizes, positions, also_good = _field(text, positions)
    good &= also_good & (sizes > 0) & (positions < ends)
    skipped = len(begins) - int(good.sum())

    # Functions that would end beyond the last address end there.
    stops = starts + np.minimum(sizes, _LAST_ADDRESS - starts)
    covers = np.searchsorted(addresses, starts) < np.searchsorted(addresses, stops)
    rows = np.flatnonzero(good & covers)
    order = np.arange(len(rows))
    tree = SegmentTree(starts[rows], stops[rows], order.astype(np.uint64), order)
    last = tree.last(tree.segments(addresses), np.full(len(addresses), _LAST_ADDRESS))
    return {
        int(index): text_of(chunk, int(positions[rows[last[index]]]), int(ends[rows[last[index]]]))
        for index in np.flatnonzero(last >= 0)
    }, skipped


def _field(
    text: NDArray[np.uint8], positions: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.bool_]]:
    """Parses a number and a space at each position.

    Returns:
        uint64[n], the numbers; int64[n], the positions after the spaces; bool[n], whether both are there.
    """
    prefixed = (text[positions] == ord("0")) & ((text[positions + 1] | 0x20) == ord("x"))
    positions = positions + 2 * prefixed
    numbers, digits = hex_numbers(text, positions)
    after = positions + digits
    good = (digits > 0) & (digits <= MOST_DIGITS) & np.isin(text[after], _SPACE)
    return numbers, np.where(good, after + 1, positions), good


def text_of(data: bytes | bytearray | memoryview, begin: int, end: int) -> str:
    """Returns the name from `begin` to `end`, shortened; bytes that are not UTF-8 are escaped."""
    return shortened(bytes(data[begin : min(end, begin + LONGEST_READ)]).decode("utf-8", "backslashreplace"))
