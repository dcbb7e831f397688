"""The two versions of Intel's iaprof text: 2026.2, and 0.5 (the Tiber release).

Both number their strings, and list the stalls of each interval by kernel, instruction and reason. 2026.2 has `kernel`
lines, each followed by `eustall` lines with a count per reason. 0.5 has an `e` line per reason, and state lines that
remain in force, in following intervals too, until another one replaces them.

Both print the line of an interval when it is over, with the time of its end; iaprof's own text has the time of its
start. As the text does not say which program wrote it, the time is used as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.imports.iaprof_lines import MOST_SAMPLES, LineReader, quoted, whole_number
from iaprof.formats.profile import UNKNOWN_KERNEL, UNKNOWN_PROCESS
from iaprof.gpu.vendors import IMPORTED_REASONS as REASONS

_HEX = re.compile(rb"0x([0-9a-fA-F]{1,16})")


class LineReader2026(LineReader):
    """Version 2026.2."""

    format = "iaprof 2026.2"
    stall_form = "eustall 0xOFFSET INSTRUCTION" + " COUNT" * len(REASONS)
    stall_line = re.compile(rb"eustall\t0x([0-9a-fA-F]{1,16})\t([0-9]{1,18})((?:\t[0-9]{1,16}){10})")

    def __init__(self) -> None:
        """Starts before the first line."""
        super().__init__()
        self._kernel: tuple[int, ...] | None = None  # a tuple of _owners without its time
        self._kinds |= {
            b"interval": (2, self._new_interval),
            b"kernel": (6, self._new_kernel),
        }

    def _begin_rows(self) -> None:
        super()._begin_rows()
        self._ten_counts: list[bytes] = []

    def _new_interval(self, fields: list[bytes]) -> None:
        self._interval(fields)
        self._kernel = None

    def _new_kernel(self, fields: list[bytes]) -> None:
        address = _hex(fields[0])
        comm, stack, file, symbol = (self._index(fields[n]) for n in (1, 3, 4, 5))
        # A kernel known only from its launch or only from its debug ELF has zeros for what is missing.
        if not self._texts[symbol]:
            symbol = self._make(f"0x{address:x}" if address else UNKNOWN_KERNEL)
        self._kernel = (
            comm or self._unknown_process,
            whole_number(fields[2], (1 << 32) - 1),
            stack or self._unknown_process,
            address,
            symbol,
            file or self._unknown_file,
        )
        self._owner = -1

    def _stall(self, found: re.Match[bytes]) -> None:
        offset, instruction, counts = found.groups()
        if self._owner < 0:
            if self._kernel is None:
                raise ValueError("there is no kernel above this line")
            self._owners.append((self._in_interval(), *self._kernel))
            self._owner = len(self._owners) - 1
        self._owner_of.append(self._owner)
        self._offsets.append(int(offset, 16))
        self._mnemonics.append(self._index(instruction))
        self._ten_counts.append(counts)

    def _counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        counts = np.fromstring(b"".join(self._ten_counts), np.int64, sep="\t")
        return np.arange(len(self._offsets)), counts.reshape(-1, len(REASONS))


class LineReader05(LineReader):
    """Version 0.5."""

    format = "iaprof 0.5"
    stall_form = "e STACK REASON OFFSET COUNT"
    stall_line = re.compile(rb"e\t[0-9]{1,18}\t([0-9]{1,18})\t([0-9a-fA-F]{1,16})\t([0-9]{1,16})")

    def __init__(self) -> None:
        """Starts before the first line."""
        super().__init__()
        self._state = dict.fromkeys((b"proc_name", b"ustack", b"kstack", b"gpu_file", b"gpu_symbol", b"insn_text"), 0)
        self._pid = 0
        self._base = 0  # added to offsets: the address, if nothing is known of a stall
        self._reasons: dict[bytes, int] = {}  # string id -> index into REASONS
        self._kinds |= {
            b"interval_start": (2, self._interval),
            b"interval_end": (1, self._end_interval),
            b"pid": (1, self._new_pid),
            b"shader_type": (1, lambda fields: None),  # other lines tell as much
            b"eustall": (12, self._whole_stall),
            **{kind: (1, self._new_state(kind)) for kind in self._state},
        }

    def _begin_rows(self) -> None:
        super()._begin_rows()
        self._one_count: list[tuple[int, int]] = []  # index into REASONS, count

    def _string(self, line: bytes) -> None:
        # Skip whole stacks, one per offset and reason: they repeat the state, and are most of the file.
        if not line.endswith(b"_[g]"):
            super()._string(line)

    def _new_state(self, kind: bytes) -> Callable[[list[bytes]], None]:
        def change(fields: list[bytes]) -> None:
            self._state[kind] = self._index(fields[0])
            self._owner = -1

        return change

    def _new_pid(self, fields: list[bytes]) -> None:
        self._pid = whole_number(fields[0], (1 << 32) - 1)
        self._owner = -1

    def _end_interval(self, fields: list[bytes]) -> None:
        self._time = None
        self._owner = -1

    def _stall(self, found: re.Match[bytes]) -> None:
        reason, offset, count = found.groups()
        self._count(reason, int(offset, 16), int(count))

    def _whole_stall(self, fields: list[bytes]) -> None:
        """An `eustall` line of the tag v0.5.0, which has all of the state."""
        proc_name, pid, ustack, kstack, _is_debug, _is_system, *rest = fields
        for kind, number in zip(self._state, (proc_name, ustack, kstack, *rest[:3]), strict=True):
            self._state[kind] = self._index(number)
        self._new_pid([pid])
        self._count(rest[3], _hex(rest[4]), whole_number(rest[5], MOST_SAMPLES))

    def _count(self, reason: bytes, offset: int, count: int) -> None:
        if self._owner < 0:
            self._owners.append((self._in_interval(), *self._kernel()))
            self._owner = len(self._owners) - 1
        if reason not in self._reasons:
            self._reasons[reason] = _reason(self._texts[self._index(reason)])
        self._owner_of.append(self._owner)
        self._offsets.append(offset + self._base & (1 << 64) - 1)
        self._mnemonics.append(self._state[b"insn_text"])
        self._one_count.append((self._reasons[reason], count))

    def _kernel(self) -> tuple[int, ...]:
        """The state as a tuple of _owners without its time."""
        state = self._state
        stacks = (self._texts[state[kind]].rstrip(";") for kind in (b"ustack", b"kstack"))
        stack = ";".join(stack for stack in stacks if stack)
        symbol = state[b"gpu_symbol"]
        named = _HEX.fullmatch(self._texts[symbol].encode())
        address, self._base = int(named[1], 16) if named else 0, 0
        if not (state[b"proc_name"] or self._pid):  # the profiler found nothing at this address
            address, self._base = 0, address
        return (
            state[b"proc_name"] or self._unknown_process,
            self._pid,
            self._make(stack or UNKNOWN_PROCESS),
            address,
            self._make(UNKNOWN_KERNEL) if self._base or not symbol else symbol,
            state[b"gpu_file"] or self._unknown_file,
        )

    def _counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        key = np.array([self._owner_of, self._mnemonics], np.int64)
        offset = np.array(self._offsets, np.uint64)
        first = np.concatenate([[True], (key[:, 1:] != key[:, :-1]).any(axis=0) | (offset[1:] != offset[:-1])])
        reason, count = np.array(self._one_count, np.int64).T
        counts = np.zeros((int(first.sum()), len(REASONS)), np.int64)
        np.add.at(counts, (np.cumsum(first) - 1, reason), count)
        return np.flatnonzero(first), counts


def line_reader(block: bytes) -> LineReader | None:
    """The reader for a text with this first block; None if the block has no interval."""
    found = re.search(rb"^interval(_start)?\t", block, re.MULTILINE)
    return None if not found else LineReader05() if found[1] else LineReader2026()


def _reason(text: str) -> int:
    if text == "unknown":  # 0.5 counts this reason but has no name for it (interval_printer.c)
        text = "tdr"
    if text not in REASONS:
        raise ValueError(f"'{quoted(text.encode())}' is not a reason to wait")
    return REASONS.index(text)


def _hex(field: bytes) -> int:
    found = _HEX.fullmatch(field)
    if not found:
        raise ValueError(f"'{quoted(field)}' is not an address, such as 0x1f00")
    return int(found[1], 16)
