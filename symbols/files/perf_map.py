"""Perf maps: text in which a process says what the code is that it generates, a line `START SIZE NAME` per function.

START and SIZE are hexadecimal, the name reaches to the line's end (tools/perf/Documentation/jit-interface.txt). Lines
are appended, so a later one is right where two overlap.

The file is the process's, so anything may be in it. It is read in pieces, from its end: an address that a later piece
has named is not looked for in earlier ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.symbols.files.hex_numbers import MOST_DIGITS, hex_numbers, padded
from iaprof.symbols.names.layers import Layers
from iaprof.symbols.names.names import LONGEST_NAME

PIECE = 4 << 20  # bytes
_LAST_ADDRESS = np.uint64((1 << 64) - 1)
_LONGEST_CHARACTER = 4  # bytes, in UTF-8
_SPACE = (ord(" "), ord("\t"))


def read_perf_map(text: bytes | bytearray, addresses: NDArray[np.uint64]) -> tuple[dict[int, str], int]:
    """Finds the functions at some addresses.

    Args:
        text: the whole file.
        addresses: uint64[n], sorted.

    Returns:
        The names by index in `addresses`; no entry for what no line covers.
        How many lines are none that a perf map can have.
    """
    names: dict[int, str] = {}
    left = np.arange(len(addresses))
    skipped, end = 0, len(text)
    while end:
        begin = _begin_of_piece(text, end)
        if end - begin > PIECE:  # one line, which is not worth its memory
            skipped, end = skipped + 1, begin
            continue
        found, bad = _read_piece(memoryview(text)[begin:end], addresses[left])
        skipped += bad
        names |= {int(left[index]): name for index, name in found.items()}
        left = np.delete(left, list(found))
        end = begin
    return names, skipped


def _begin_of_piece(text: bytes | bytearray, end: int) -> int:
    """Where the first whole line begins in the PIECE bytes before `end`, the end of a line; or else that one line."""
    if end <= PIECE:
        return 0
    newline = text.find(b"\n", end - PIECE - 1, end - 1)
    return (newline if newline >= 0 else text.rfind(b"\n", 0, end - PIECE)) + 1


def _read_piece(piece: memoryview, addresses: NDArray[np.uint64]) -> tuple[dict[int, str], int]:
    """The same for some whole lines."""
    text = padded(piece)
    newlines = np.flatnonzero(text[: len(piece)] == ord("\n"))
    begins = np.concatenate([np.zeros(1, np.int64), newlines + 1])
    ends = np.append(newlines, len(piece))
    some = begins < ends
    begins, ends = begins[some], ends[some]
    starts, places, good = _field(text, begins)
    sizes, places, also_good = _field(text, places)
    good &= also_good & (sizes > 0) & (places < ends)
    skipped = len(begins) - int(good.sum())

    # What would end behind the last address ends there.
    stops = starts + np.minimum(sizes, _LAST_ADDRESS - starts)
    covers = np.searchsorted(addresses, starts) < np.searchsorted(addresses, stops)
    rows = np.flatnonzero(good & covers)
    order = np.arange(len(rows))
    layers = Layers(starts[rows], stops[rows], order.astype(np.uint64), order)
    last = layers.last(layers.pieces(addresses), np.full(len(addresses), _LAST_ADDRESS))
    return {
        int(index): text_of(piece, int(places[rows[last[index]]]), int(ends[rows[last[index]]]))
        for index in np.flatnonzero(last >= 0)
    }, skipped


def _field(
    text: NDArray[np.uint8], places: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.bool_]]:
    """A number and a space at each place; the numbers, the places behind the spaces, and whether both are there."""
    prefixed = (text[places] == ord("0")) & ((text[places + 1] | 0x20) == ord("x"))
    places = places + 2 * prefixed
    numbers, digits = hex_numbers(text, places)
    behind = places + digits
    good = (digits > 0) & (digits <= MOST_DIGITS) & np.isin(text[behind], _SPACE)
    return numbers, np.where(good, behind + 1, places), good


def text_of(data: bytes | bytearray | memoryview, begin: int, end: int) -> str:
    """The name from `begin` up to `end`, of bounded length, with what is no UTF-8 escaped."""
    # Somewhat more than fits: what is cut in the middle of a character then is none of those that are kept.
    some = bytes(data[begin : min(end, begin + (LONGEST_NAME + 1) * _LONGEST_CHARACTER)])
    return some.decode("utf-8", "backslashreplace")[:LONGEST_NAME]
