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
    sums = _Sums()
    for part, start_ns in zip(capture.parts, starts_ns(capture), strict=True):
        known_stacks = [(np.empty(0, np.uint64), np.empty(0, np.int64))]
        for table in _selected_rows(part, "transfer", (*_CALLER, "function", "bytes"), selection, start_ns):
            function = sums.add_calls(table)
            known_stacks.append(_last_functions(table["stack"].to_numpy(), function))
        stacks, functions = _last_functions(*map(np.concatenate, zip(*known_stacks, strict=True)))
        for table in _selected_rows(part, "launch", _CALLER, selection, start_ns):
            own = (table["flags"].to_numpy() & LaunchFlags.OWN) > 0
            stack = table["stack"].to_numpy()[own & (table["stack"].to_numpy() > 0)]
            at = np.searchsorted(stacks, stack)
            known = np.append(stacks, np.uint64(0))[at] == stack
            sums.add_kernels(functions[at[known]])
    found = sums.all()
    if selection.kernel is not None:
        found = [each for each in found if selection.kernel.search(each.function)]
    return sorted(found, key=lambda each: (-each.bytes, -each.calls, each.function))


def _last_functions(stack: NDArray[np.uint64], function: _Ints) -> tuple[NDArray[np.uint64], _Ints]:
    """Returns the distinct stacks in ascending order, and the last function of each."""
    stacks, first = np.unique(stack[::-1], return_index=True)
    return stacks, function[::-1][first]


class _Sums:
    """Calls added up by function."""

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {}  # of functions
        # Calls, the upper and lower halves of bytes, which add up to more than 64 bits, unknown bytes, and kernels.
        self._sums = np.zeros((5, 0), np.uint64)

    def add_calls(self, calls: pa.Table) -> _Ints:
        """Adds calls, and returns the number of each one's function: int64[n]."""
        function = number_texts(calls["function"], self._numbers)
        self._sums = np.pad(self._sums, ((0, 0), (0, len(self._numbers) - self._sums.shape[1])))
        size = pc.fill_null(calls["bytes"], 0).to_numpy()
        added = (1, size >> np.uint64(32), size & np.uint64(0xFFFF_FFFF), pc.is_null(calls["bytes"]).to_numpy())
        for sums, values in zip(self._sums, added, strict=False):
            np.add.at(sums, function, values)
        return function

    def add_kernels(self, function: _Ints) -> None:
        """Adds launches of the driver's own kernels by their functions' numbers: int64[n]."""
        np.add.at(self._sums[4], function, 1)

    def all(self) -> list[Transfers]:
        """Returns the functions with calls."""
        rows = zip(self._numbers, self._sums.T.tolist(), strict=True)
        return [
            Transfers(name or "", calls, (upper << 32) + lower, unknown, kernels)
            for name, (calls, upper, lower, unknown, kernels) in rows
            if calls
        ]


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
