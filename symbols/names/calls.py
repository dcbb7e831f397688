"""The addresses of stacks, as columns: the call instruction of each frame, and the distinct ones of many stacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.ranges import ranges
from iaprof.formats.wire.unwind_rules import Mark
from iaprof.symbols.names.address_space import AddressSpaces
from iaprof.symbols.names.names import Module

DEEPEST_STACK = 1024  # frames; recorders write fewer


@dataclass(frozen=True, eq=False)
class Calls:
    """Frames of stacks, stack by stack, each from the innermost frame outwards; all columns have the shape [frames]."""

    stacks: NDArray[np.int64]  # the row of the stack
    pids: NDArray[np.uint32]
    addresses: NDArray[np.uint64]  # of the executed instruction, or of the last byte of the call
    times: NDArray[np.uint64]  # CLOCK_MONOTONIC ns, when the stack was first seen
    guessed: NDArray[np.bool_]  # whether the address was found by a guess: see wire.unwind_rules.Mark


def calls(stacks: pa.Table | pa.StructArray) -> Calls:
    """Returns the frames of `stack` rows, at most the DEEPEST_STACK innermost ones of each."""
    if isinstance(stacks, pa.StructArray):
        stacks = pa.Table.from_struct_array(stacks)
    ips = stacks["ips"].combine_chunks()
    ips = ips if isinstance(ips, pa.Array) else pa.concat_arrays(ips.chunks)
    ends = ips.offsets.to_numpy().astype(np.int64)
    depths = np.diff(ends)
    rows = np.repeat(np.arange(len(depths)), depths)
    levels = ranges(0, depths)
    addresses = ips.flatten().to_numpy()
    kept = (addresses != 0) & (levels < DEEPEST_STACK)
    rows, levels, addresses = rows[kept], levels[kept], addresses[kept]
    marks = _marks(stacks, depths)[kept]
    # Return addresses are all but the innermost address and those that a signal interrupted: the call is before them.
    is_return = (levels > 0) & (marks & np.uint8(Mark.INTERRUPTED) == 0)
    addresses = addresses - is_return.astype(np.uint64)
    times = stacks["time_ns"].to_numpy()[rows]
    return Calls(rows, stacks["pid"].to_numpy()[rows], addresses, times, marks & np.uint8(Mark.GUESSED) > 0)


def _marks(stacks: pa.Table, depths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Returns the marks of the stacks' addresses: uint8[sum of depths]."""
    found = np.zeros(int(depths.sum()), np.uint8)
    if "marks" not in stacks.column_names or stacks["marks"].null_count == len(stacks):  # since format 6
        return found
    marks = stacks["marks"].combine_chunks()
    marks = marks if isinstance(marks, pa.Array) else pa.concat_arrays(marks.chunks)
    lengths = marks.value_lengths().fill_null(0).to_numpy()
    is_valid = lengths == depths  # a hostile capture may have another number of marks than addresses
    starts = np.cumsum(lengths) - lengths
    values = marks.flatten().to_numpy()
    chosen = np.flatnonzero(is_valid & (depths > 0))
    if len(chosen):
        frames = ranges((np.cumsum(depths) - depths)[chosen], depths[chosen])
        found[frames] = values[ranges(starts[chosen], depths[chosen])]
    return found


class StackAddresses:
    """Collects the distinct addresses of stacks, which are to be named."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint64]]] = []

    def add(self, stacks: pa.Table | pa.StructArray) -> None:
        """Adds the addresses of `stack` rows: of each process, each distinct one with its first and its last time."""
        if len(stacks):
            frames = calls(stacks)
            self._parts.append(_distinct(frames.pids, frames.addresses, frames.times))
            # The last time matters too: the process may have executed another program, with other code at the address.
            pids, addresses, times = _distinct(frames.pids, frames.addresses, ~frames.times)
            self._parts.append((pids, addresses, ~times))

    @property
    def processes(self) -> int:
        """How many processes the stacks are of."""
        return len(np.unique(np.concatenate([pids for pids, _, _ in self._parts]))) if self._parts else 0

    def modules(self, spaces: AddressSpaces) -> Iterator[tuple[Module, NDArray[np.uint64], NDArray[np.uint64]]]:
        """Yields each module, its distinct addresses, sorted, uint64[n], and when each was first seen, uint64[n]."""
        if not self._parts:
            return
        pids, addresses, times = (np.concatenate(columns) for columns in zip(*self._parts, strict=True))
        modules, inside = spaces.locate(pids, addresses, times)
        yield from by_module(spaces.modules, modules, inside, times)


@dataclass(frozen=True, eq=False)
class Places:
    """The distinct places of frames."""

    of_frame: NDArray[np.int32]  # [frames] indices into the other columns
    modules: NDArray[np.int64]  # [places] their numbers
    addresses: NDArray[np.uint64]  # [places] in the module
    times: NDArray[np.uint64]  # [places] when the place was first seen

    @classmethod
    def of(cls, numbers: NDArray[np.int32], addresses: NDArray[np.uint64], times: NDArray[np.uint64]) -> Places:
        """Takes the module's number, the address in the module, and the time of each frame."""
        distinct = pa.array(addresses).dictionary_encode()
        width = max(len(distinct.dictionary), 1)
        places = pa.array(numbers * np.int64(width) + distinct.indices.to_numpy()).dictionary_encode()
        of_frame, keys = places.indices.to_numpy(), places.dictionary.to_numpy()
        first = np.full(len(keys), np.iinfo(np.uint64).max, np.uint64)
        np.minimum.at(first, of_frame, times)
        return cls(of_frame, keys // width, distinct.dictionary.to_numpy()[keys % width], first)

    @classmethod
    def joined(cls, pieces: Sequence[Places]) -> Places:
        """Returns the places of the frames of all."""
        empty = np.empty(0, np.uint64)
        columns = ((empty, empty, empty), *((piece.modules, piece.addresses, piece.times) for piece in pieces))
        modules, addresses, times = (np.concatenate(column) for column in zip(*columns, strict=True))
        whole = cls.of(modules.astype(np.int32), addresses, times)
        firsts = np.cumsum([0, *(len(piece.modules) for piece in pieces)])
        of_frame = [whole.of_frame[first + piece.of_frame] for first, piece in zip(firsts, pieces, strict=False)]
        return replace(whole, of_frame=np.concatenate([np.empty(0, np.int32), *of_frame]))


def identities(modules: list[Module]) -> NDArray[np.uint32]:
    """Returns for each module the number of the first one with its identity: uint32[modules]."""
    first: dict[tuple[object, ...], int] = {}
    return np.array([first.setdefault(module.identity, i) for i, module in enumerate(modules)], np.uint32)


def by_module(
    modules: list[Module], numbers: NDArray[np.int32], addresses: NDArray[np.uint64], times: NDArray[np.uint64]
) -> Iterator[tuple[Module, NDArray[np.uint64], NDArray[np.uint64]]]:
    """Groups addresses by the identity of their modules.

    Args:
        modules: may have several entries of one identity.
        numbers: int32[n], indices into `modules`.
        addresses: uint64[n], in the module.
        times: uint64[n], when each was seen.

    Yields:
        Each module, its addresses, sorted and distinct, and the earliest time of each.
    """
    distinct_modules, distinct_addresses, earliest = _distinct(identities(modules)[numbers], addresses, times)
    for number in np.unique(distinct_modules).tolist():
        low, high = np.searchsorted(distinct_modules, [number, number + 1])
        yield modules[number], distinct_addresses[low:high], earliest[low:high]


def _distinct(
    keys: NDArray[np.uint32], addresses: NDArray[np.uint64], times: NDArray[np.uint64]
) -> tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint64]]:
    """Returns each pair of key and address once, sorted, with the earliest of its times."""
    order = np.lexsort((times, addresses, keys))
    keys, addresses, times = keys[order], addresses[order], times[order]
    new = np.ones(len(keys), bool)
    new[1:] = (keys[1:] != keys[:-1]) | (addresses[1:] != addresses[:-1])
    return keys[new], addresses[new], times[new]
