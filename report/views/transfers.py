"""Adds up copies and fills by the function that makes them, with the driver's own kernels that execute them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.basics.errors import UsageError
from iaprof.formats.capture.dictionaries import number_texts
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.report.join.selection import Selection
from iaprof.report.parts import starts_ns

_Ints = NDArray[np.int64]
_CALLER = ("time_ns", "pid", "tid", "comm", "stack", "flags")


@dataclass(frozen=True)
class Transfers:
    """Calls of one function, or of several together."""

    function: str
    calls: int = 0
    bytes: int = 0
    unknown: int = 0  # calls with an unknown number of bytes
    kernels: int = 0  # launches of the driver's own kernels by these calls


def transfers(capture: CaptureReader, selection: Selection) -> list[Transfers]:
    """Returns the functions that copy and fill, most bytes first.

    A kernel of the driver belongs to the function with the same stack; one without a stack, to no function.

    Args:
        capture: the open capture.
        selection: by times, processes, threads and cgroups; `kernel` matches the functions' names.

    Raises:
        CaptureError: the capture is damaged.
        UsageError: the selection is by device, reason or Python function, which transfers do not have.
    """
    if selection.devices or selection.reasons or not selection.active or selection.python is not None:
        raise UsageError("--by transfer goes with options that choose times, processes and threads only")
    numbers: dict[str | None, int] = {}  # of functions
    rows: list[tuple[_Ints, NDArray[np.uint64], NDArray[np.bool_]]] = []  # function, bytes, whether these are known
    own_kernels: list[_Ints] = []  # the functions of the driver's own kernels
    for part, start_ns in zip(capture.parts, starts_ns(capture), strict=True):
        known_stacks = [(np.empty(0, np.uint64), np.empty(0, np.int64))]
        for table in _selected_rows(part, "transfer", (*_CALLER, "function", "bytes"), selection, start_ns):
            function = number_texts(table["function"], numbers)
            is_known = table["bytes"].is_valid().to_numpy(zero_copy_only=False)
            rows.append((function, pc.fill_null(table["bytes"], 0).to_numpy(), is_known))
            known_stacks.append((table["stack"].to_numpy(), function))
        functions = _FunctionOfStack(*map(np.concatenate, zip(*known_stacks, strict=True)))
        for table in _selected_rows(part, "launch", _CALLER, selection, start_ns):
            own = (table["flags"].to_numpy() & LaunchFlags.OWN) > 0
            own_kernels.append(functions.of(table["stack"].to_numpy()[own]))
    found = _sums(numbers, rows, own_kernels)
    if selection.kernel is not None:
        found = [each for each in found if selection.kernel.search(each.function)]
    return sorted(found, key=lambda each: (-each.bytes, -each.calls, each.function))


class _FunctionOfStack:
    """The function that each stack calls."""

    def __init__(self, stack: NDArray[np.uint64], function: _Ints) -> None:
        self._stacks, first = np.unique(stack[::-1], return_index=True)  # of several functions the last one
        self._functions = function[::-1][first]

    def of(self, stacks: NDArray[np.uint64]) -> _Ints:
        """Returns the functions of those stacks that are known: int64[m]."""
        at = np.searchsorted(self._stacks, stacks)
        known = (stacks > 0) & (at < len(self._stacks))
        known[known] = self._stacks[at[known]] == stacks[known]
        return self._functions[at[known]]


def _sums(
    numbers: dict[str | None, int],
    rows: list[tuple[_Ints, NDArray[np.uint64], NDArray[np.bool_]]],
    own_kernels: list[_Ints],
) -> list[Transfers]:
    """Adds up calls by function."""
    if not rows:
        return []
    function, size, is_known = map(np.concatenate, zip(*rows, strict=True))
    kernels = np.bincount(np.concatenate([np.empty(0, np.int64), *own_kernels]), minlength=len(numbers))
    calls = np.bincount(function, minlength=len(numbers))
    unknown = np.bincount(function[~is_known], minlength=len(numbers))
    # 64-bit sizes add up to more than 64 bits: upper and lower halves are added up apart.
    halves = np.zeros((2, len(numbers)), np.uint64)
    for half, values in zip(halves, (size >> np.uint64(32), size & np.uint64(0xFFFF_FFFF)), strict=True):
        np.add.at(half, function, values)
    bytes_ = [(upper << 32) + lower for upper, lower in halves.T.tolist()]
    columns = (calls.tolist(), bytes_, unknown.tolist(), kernels.tolist())
    return [Transfers(name or "", *each) for name, *each in zip(numbers, *columns, strict=True) if each[0]]


def sum_transfers(found: Sequence[Transfers], function: str) -> Transfers:
    """Adds up calls, under the name `function`."""
    names = ("calls", "bytes", "unknown", "kernels")
    return Transfers(function, *(sum(getattr(each, name) for each in found) for name in names))


def _selected_rows(
    part: CaptureReader, kind: str, columns: tuple[str, ...], selection: Selection, start_ns: int
) -> Iterator[pa.Table]:
    """Yields the rows of a kind that the selection keeps."""
    row_filter = selection.row_filter(part.header, start_ns)
    inside = selection.in_cgroups(part)
    for table in part.tables(kind, columns):
        times, pids, flags = (table[name].to_numpy() for name in ("time_ns", "pid", "flags"))
        keep: NDArray[np.bool_] = (flags & (LaunchFlags.OTHER | LaunchFlags.CARRIED)) == 0
        keep &= (times >= np.uint64(row_filter.begin_ns)) & (times <= np.uint64(row_filter.end_ns))
        if selection.pids:
            keep &= np.isin(pids, np.fromiter(selection.pids, np.int64))
        if selection.tids:
            keep &= np.isin(table["tid"].to_numpy(), np.fromiter(selection.tids, np.int64))
        if inside is not None:
            keep &= inside.has(pids, times)
        if selection.comms:
            keep &= pc.is_in(table["comm"], pa.array(sorted(selection.comms))).to_numpy(zero_copy_only=False)
        yield table.filter(pa.array(keep))
