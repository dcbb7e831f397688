"""Names the code of the Linux kernel, its modules and BPF programs, from /proc/kallsyms or a copy of it.

A line is `ADDRESS TYPE NAME`, followed by a tab and `[module]` for symbols of a module; `[bpf]` for a BPF program.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.symbols.files.hex_numbers import hex_numbers, padded
from iaprof.symbols.names.modules import Module, ModuleKind
from iaprof.symbols.names.names import LONGEST_READ, Frame, Names, Symbolized

MOST_BYTES = 256 << 20  # a kernel with all its modules has less than 20 MB
LARGEST_FUNCTION = 1 << 20  # bytes; a function ends where the next symbol begins, but has at most this size
_PREFERRED = b"wtWT"  # the types of functions; of several names at an address, the one with the last of these types


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
