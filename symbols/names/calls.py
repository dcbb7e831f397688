"""The addresses of stacks as columns: of each frame the instruction that called, and the distinct ones of many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.ranges import ranges
from iaprof.formats.wire.unwind_rules import Mark
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.modules import Module

DEEPEST_STACK = 1024  # frames; recorders keep fewer


@dataclass(frozen=True, eq=False)
class Calls:
    """Frames of stacks, one stack behind the other, each one's innermost frame first; all of shape [frames]."""

    stacks: NDArray[np.int64]  # which row
    pids: NDArray[np.uint32]
    addresses: NDArray[np.uint64]  # of the instruction that was executed, or of the call's last byte
    times: NDArray[np.uint64]  # CLOCK_MONOTONIC ns, when the stack was first seen


def calls(stacks: pa.Table | pa.StructArray) -> Calls:
    """The frames of `stack` rows; what is below DEEPEST_STACK is left out."""
    if isinstance(stacks, pa.StructArray):
        stacks = pa.Table.from_struct_array(stacks)
    ips = stacks["ips"].combine_chunks()
    ips = ips if isinstance(ips, pa.Array) else pa.concat_arrays(ips.chunks)
    ends = ips.offsets.to_numpy().astype(np.int64)
    depths = np.diff(ends)
    rows = np.repeat(np.arange(len(depths)), depths)
    within = ranges(0, depths)
    addresses = ips.flatten().to_numpy()
    kept = (addresses != 0) & (within < DEEPEST_STACK)
    rows, within, addresses = rows[kept], within[kept], addresses[kept]
    # All but the innermost are return addresses, the call is before them; but where a signal came.
    addresses = addresses - ((within > 0) & ~_interrupted(stacks, depths)[kept]).astype(np.uint64)
    return Calls(rows, stacks["pid"].to_numpy()[rows], addresses, stacks["time_ns"].to_numpy()[rows])


def _interrupted(stacks: pa.Table, depths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each address of stacks is that of an instruction that a signal interrupted: bool[sum of depths]."""
    found = np.zeros(int(depths.sum()), bool)
    if "marks" not in stacks.column_names or stacks["marks"].null_count == len(stacks):
        return found
    marks = stacks["marks"].combine_chunks()
    marks = marks if isinstance(marks, pa.Array) else pa.concat_arrays(marks.chunks)
    lengths = marks.value_lengths().fill_null(0).to_numpy()
    has = lengths == depths  # what else a stranger's capture has is not believed
    starts = np.cumsum(lengths) - lengths
    values = marks.flatten().to_numpy()
    chosen = np.flatnonzero(has & (depths > 0))
    if len(chosen):
        where = ranges((np.cumsum(depths) - depths)[chosen], depths[chosen])
        found[where] = values[ranges(starts[chosen], depths[chosen])] & np.uint8(Mark.INTERRUPTED) > 0
    return found


class Needed:
    """Collects the distinct addresses of stacks, to say what has to be named."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint64]]] = []

    def add(self, stacks: pa.Table | pa.StructArray) -> None:
        """Takes `stack` rows; keeps of them each distinct address of a process once."""
        if len(stacks):
            found = calls(stacks)
            self._parts.append(_distinct(found.pids, found.addresses, found.times))
            # A process may have executed another program meanwhile, and this address be in both.
            pids, addresses, times = _distinct(found.pids, found.addresses, ~found.times)
            self._parts.append((pids, addresses, ~times))

    def modules(self, spaces: AddressSpaces) -> Iterator[tuple[Module, NDArray[np.uint64], NDArray[np.uint64]]]:
        """What each module has to name: its addresses, uint64[n], sorted and distinct, and when each was first met."""
        if not self._parts:
            return
        pids, addresses, times = (np.concatenate(columns) for columns in zip(*self._parts, strict=True))
        modules, inside = spaces.locate(pids, addresses, times)
        yield from by_module(spaces.modules, modules, inside, times)


def by_module(
    modules: list[Module], numbers: NDArray[np.int32], addresses: NDArray[np.uint64], times: NDArray[np.uint64]
) -> Iterator[tuple[Module, NDArray[np.uint64], NDArray[np.uint64]]]:
    """Addresses by the identity of their module, each once, with the earliest of its times."""
    first: dict[tuple[object, ...], int] = {}
    same = np.array([first.setdefault(module.identity, index) for index, module in enumerate(modules)], np.uint32)
    which, inside, earliest = _distinct(same[numbers], addresses, times)
    for number in np.unique(which).tolist():
        low, high = np.searchsorted(which, [number, number + 1])
        yield modules[number], inside[low:high], earliest[low:high]


def _distinct(
    keys: NDArray[np.uint32], addresses: NDArray[np.uint64], times: NDArray[np.uint64]
) -> tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint64]]:
    """Each pair of key and address once, sorted, with the earliest of its times."""
    order = np.lexsort((times, addresses, keys))
    keys, addresses, times = keys[order], addresses[order], times[order]
    new = np.ones(len(keys), bool)
    new[1:] = (keys[1:] != keys[:-1]) | (addresses[1:] != addresses[:-1])
    return keys[new], addresses[new], times[new]
