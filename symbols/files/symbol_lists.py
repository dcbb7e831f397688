"""Reads texts that name addresses, by whole columns: /proc/kallsyms and perf maps can have a million lines.

/proc/kallsyms, or a copy of it, names the code of the Linux kernel, its modules and BPF programs. A line is
`ADDRESS TYPE NAME`, followed by a tab and `[module]` for symbols of a module; `[bpf]` for a BPF program.

In a perf map a process names the code that it generates, a line `START SIZE NAME` per function. START and SIZE are
hexadecimal, the name reaches to the end of the line (tools/perf/Documentation/jit-interface.txt). Processes append
lines, so of two overlapping lines the later one counts. The process writes the file, so it may contain anything. It is
read in chunks, from its end: an address that a later chunk names is not looked up in earlier ones.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.symbols.names.names import LONGEST_READ, Frame, Module, ModuleKind, Names, Symbolized, shortened
from iaprof.symbols.names.segment_tree import SegmentTree

MOST_DIGITS = 16  # of a 64-bit number
_NO_DIGIT = 16
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
for _digit in range(16):
    _DIGITS[[ord(f"{_digit:x}"), ord(f"{_digit:X}")]] = _digit

MOST_BYTES = 256 << 20  # a kernel with all its modules has less than 20 MB
LARGEST_FUNCTION = 1 << 20  # bytes; a function ends where the next symbol begins, but has at most this size
_PREFERRED = b"wtWT"  # the types of functions; of several names at an address, the one with the last of these types

CHUNK = 4 << 20  # bytes
_LAST_ADDRESS = np.uint64((1 << 64) - 1)
_SPACE = (ord(" "), ord("\t"))


def padded(text: bytes | bytearray | memoryview) -> NDArray[np.uint8]:
    """Returns the text with a few newlines appended, so that it can be read a little past its end: uint8[n]."""
    return np.concatenate([np.frombuffer(text, np.uint8), np.full(MOST_DIGITS + 4, ord("\n"), np.uint8)])


def hex_numbers(text: NDArray[np.uint8], starts: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Parses the number at each of `starts`, one digit of all numbers at a time.

    Args:
        text: as `padded` made it.
        starts: int64[n], where the first digits should be; at most one byte after the text.

    Returns:
        uint64[n]: the numbers.
        int64[n]: their numbers of digits; 0 if there is no number, more than MOST_DIGITS if it has more than 64 bits.
    """
    numbers, lengths = np.zeros(len(starts), np.uint64), np.zeros(len(starts), np.int64)
    goes_on = np.ones(len(starts), np.bool_)
    for position in range(MOST_DIGITS + 1):
        digits = _DIGITS[text[starts + position]]
        goes_on &= digits != _NO_DIGIT
        if not goes_on.any():
            break
        numbers = np.where(goes_on, numbers << np.uint64(4) | digits, numbers)
        lengths += goes_on
    return numbers, lengths


class KernelSymbols:
    """A Symbolizer for the Linux kernel: functions sorted by address, each up to the next symbol."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        """Reads the file.

        Args:
            file: opened for reading bytes, at its beginning.
            path: the file's name in messages.

        Raises:
            IaprofError: the file has no addresses, because the Linux kernel hides them, or is not such a file.
        """
        self._path = path
        self._text = file.read(MOST_BYTES)
        text = padded(self._text)
        newlines = np.flatnonzero(text[: len(self._text)] == ord("\n"))
        begins = np.concatenate([np.zeros(1, np.int64), newlines + 1])
        addresses, digits = hex_numbers(text, begins)
        # A space, the type, a space and the name follow.
        types = text[begins + digits + 1]
        good = (
            (digits > 0)
            & (digits <= 16)
            & (text[begins + digits] == ord(" "))
            & (text[begins + digits + 2] == ord(" "))
        )
        rank = np.zeros(256, np.uint8)
        rank[list(_PREFERRED)] = np.arange(1, len(_PREFERRED) + 1)
        if not rank[types[good]].any():
            raise IaprofError(f"{path} has no kernel symbols: give a copy of /proc/kallsyms")
        if not addresses[good].any():
            raise IaprofError(
                f"{path} shows no addresses: read it as root, after sysctl kernel.kptr_restrict=1 where that is 2"
            )
        begins, addresses, types = (begins + digits + 3)[good], addresses[good], types[good]
        # Of several names with the same address and type the first in the file counts, as in the Linux kernel itself.
        order = np.lexsort((-np.arange(len(begins)), rank[types], addresses))
        begins, addresses, ranks = begins[order], addresses[order], rank[types][order]
        last = np.append(addresses[1:] != addresses[:-1], True)  # the last row of each address
        begins, addresses, ranks = begins[last], addresses[last], ranks[last]
        sizes = np.minimum(np.append(np.diff(addresses), np.uint64(LARGEST_FUNCTION)), np.uint64(LARGEST_FUNCTION))
        functions = ranks > 0
        self._begins, self._addresses, self._sizes = begins[functions], addresses[functions], sizes[functions]

    def name(self, module: Module, addresses: NDArray[np.uint64], _times: NDArray[np.uint64]) -> Symbolized | None:
        """See Symbolizer."""
        if module.kind is not ModuleKind.KERNEL:
            return None
        rows = np.searchsorted(self._addresses, addresses, side="right") - 1
        starts, sizes = self._addresses[np.maximum(rows, 0)], self._sizes[np.maximum(rows, 0)]
        rows = np.unique(rows[(rows >= 0) & (addresses - starts < sizes)])
        entries = [
            (int(self._addresses[row]), int(self._sizes[row]), [self._frame(int(self._begins[row]))]) for row in rows
        ]
        return Symbolized(Names.of(entries), source=self._path)

    def _frame(self, begin: int) -> Frame:
        """Returns the function whose name begins at this offset of the text."""
        end = self._text.find(b"\n", begin, begin + LONGEST_READ)
        line = self._text[begin : end if end >= 0 else begin + LONGEST_READ].decode("utf-8", "backslashreplace")
        name, _, module = line.partition("\t")
        return Frame(name, module)


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
