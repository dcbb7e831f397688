"""iaprof text in the format of Intel's iaprof 2026.2: tab-separated lines that intern every string.

Rows that the format cannot distinguish are added up, and kernels are sorted by address, then by their lines: the same
profile gives the same text, even after importing the text again (iaprof_import.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TypeVar

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.clean import clean
from iaprof.formats.distinct import distinct_rows, sum_groups
from iaprof.formats.export import Export
from iaprof.formats.profile import UNKNOWN_PROCESS, Code, Gauges, Kernel, Launch, Profile, StackOptions, kernel_name
from iaprof.formats.stacks.frames import StackTexts
from iaprof.formats.writers.writer import Writer

UNKNOWN_FILE = "[unknown file]"

_Head = tuple[int, str, int, str, str, str]
"""The fields of a kernel line: address, process, pid, stack, file, symbol."""
_Value = TypeVar("_Value", str, _Head)


class IaprofText(Writer):
    """The text format of Intel's iaprof."""

    hides_cpython = False
    interval_s = 1.0
    has_stacks = False

    def write(self, export: Export, options: StackOptions, out: IO[str]) -> None:
        """Writes interval by interval; each distinct kernel line, followed by its stalls."""
        profile = export.profile
        strings = _Strings(out)
        heads, head_of = _heads(profile, options)
        mnemonics, rank = _ranked([clean(code.mnemonic) for code in profile.codes])
        columns = (profile.interval, head_of, profile.offset, rank[profile.code])
        first, number = distinct_rows(*columns)
        counts = sum_groups(profile.counts, number)
        current, before = -1, -1
        rows = zip(*(column[first].tolist() for column in columns), counts.tolist(), strict=True)
        for interval, head, offset, mnemonic, stalls in rows:
            while current < interval:
                if current >= 0:
                    _end_interval(profile.gauges.get(current), out)
                current, before = current + 1, -1
                out.write(f"interval\t{current}\t{profile.intervals[current]:.6f}\n")
            if head != before:
                before = head
                out.write(_kernel_line(heads[head], strings))
            instruction = strings.id(mnemonics[mnemonic])
            numbers = "\t".join(map(str, stalls))
            out.write(f"eustall\t0x{offset:x}\t{instruction}\t{numbers}\n")
        if current >= 0:
            _end_interval(profile.gauges.get(current), out)


def _heads(profile: Profile, options: StackOptions) -> tuple[list[_Head], NDArray[np.int64]]:
    """The distinct kernel lines, sorted, and the index of each row's."""
    first, number = distinct_rows(profile.launch, profile.kernel, profile.code)
    columns = (profile.launch[first].tolist(), profile.kernel[first].tolist(), profile.code[first].tolist())
    stacks = StackTexts(options)
    heads, rank = _ranked(
        [
            _head(profile.launches[launch], profile.kernels[kernel], profile.codes[code], stacks)
            for launch, kernel, code in zip(*columns, strict=True)
        ]
    )
    return heads, rank[number]


def _head(launch: Launch | None, kernel: Kernel | None, code: Code, stacks: StackTexts) -> _Head:
    return (
        kernel.address if kernel else 0,  # for an unknown kernel, offsets are addresses
        clean(launch.comm if launch and launch.comm else UNKNOWN_PROCESS),
        launch.pid if launch else 0,
        stacks.of(launch) or UNKNOWN_PROCESS,
        clean(kernel.file if kernel and kernel.file else UNKNOWN_FILE),
        clean((kernel.symbol or f"0x{kernel.address:x}") if kernel else kernel_name(kernel, code)),
    )


def _kernel_line(head: _Head, strings: _Strings) -> str:
    address, comm, pid, *others = head
    ids = [strings.id(comm), pid, *map(strings.id, others)]
    return "\t".join(("kernel", f"0x{address:x}", *map(str, ids))) + "\n"


def _ranked(values: Sequence[_Value]) -> tuple[list[_Value], NDArray[np.int64]]:
    """The distinct values, sorted, and the index of each given value among them."""
    found = sorted(set(values))
    ranks = {value: rank for rank, value in enumerate(found)}
    return found, np.array([ranks[value] for value in values], np.int64)


def _end_interval(gauges: Gauges | None, out: IO[str]) -> None:
    gauges = gauges or Gauges()
    out.write(f"metric\tfrequency-MHz\t{gauges.frequency_mhz:.0f}\nmetric\tbusy-percent\t{gauges.busy_percent:.0f}\n")


class _Strings:
    """Assigns ids to strings, and writes a string's line before its first use."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._ids: dict[str, int] = {}

    def id(self, text: str) -> int:
        known = self._ids.get(text)
        if known is None:
            known = self._ids[text] = len(self._ids) + 1
            self._out.write(f"string\t{known}\t{text}\n")
        return known
