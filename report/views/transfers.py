"""Adds up copies and fills by the function that makes them, with the driver's own kernels that execute them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.basics.errors import UsageError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.report.join.selection import Selection
from iaprof.report.parts import starts_ns

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
    calls: Counter[str] = Counter()
    bytes_: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for part, start_ns in zip(capture.parts, starts_ns(capture), strict=True):
        of_stack: dict[int, str] = {}
        for table in _selected_rows(part, "transfer", (*_CALLER, "function", "bytes"), selection, start_ns):
            names = table["function"].unify_dictionaries().combine_chunks()
            texts = [str(text) for text in names.dictionary.to_pylist()]
            which = names.indices.to_numpy().astype(np.int64)
            known = table["bytes"].is_valid().to_numpy(zero_copy_only=False)
            sizes = pc.fill_null(table["bytes"], 0).to_numpy()
            for number, text in enumerate(texts):
                own = which == number
                calls[text] += int(own.sum())
                bytes_[text] += sum(sizes[own].tolist()) if own.any() else 0
                unknown[text] += int((own & ~known).sum())
                of_stack |= dict.fromkeys(np.unique(table["stack"].to_numpy()[own]).tolist(), text)
        of_stack.pop(0, None)
        for table in _selected_rows(part, "launch", _CALLER, selection, start_ns):
            own = (table["flags"].to_numpy() & LaunchFlags.OWN) > 0
            stacks, counts = np.unique(table["stack"].to_numpy()[own], return_counts=True)
            for stack, count in zip(stacks.tolist(), counts.tolist(), strict=True):
                if stack in of_stack:
                    kernels[of_stack[stack]] += count
    found = [Transfers(name, calls[name], bytes_[name], unknown[name], kernels[name]) for name in calls if calls[name]]
    if selection.kernel is not None:
        found = [each for each in found if selection.kernel.search(each.function)]
    return sorted(found, key=lambda each: (-each.bytes, -each.calls, each.function))


def sum_transfers(found: Sequence[Transfers], function: str) -> Transfers:
    """Adds up calls, under the name `function`."""
    total = Transfers(function)
    for each in found:
        total = replace(
            total,
            calls=total.calls + each.calls,
            bytes=total.bytes + each.bytes,
            unknown=total.unknown + each.unknown,
            kernels=total.kernels + each.kernels,
        )
    return total


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
