"""Stacks as arrays: where their addresses are, where stacks that were walked by frame pointers are cut, and their ids.

Stacks that were walked by frame pointers are cut before the first address that can be no return address. In code
without frame pointers such a walk follows other data. An address can be a return address if the side-band has
executable memory of the process there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.ranges import ranges
from iaprof.symbols.names.address_space import NOWHERE, AddressSpaces
from iaprof.symbols.names.names import Module

UNKNOWN = 255
_SNAPSHOT_NS = 1_000_000_000  # within this time, the mappings of processes that ran before are read


@dataclass(frozen=True, eq=False)
class WalkedStacks:
    """n stacks, one after the other."""

    pids: NDArray[np.uint32]  # [n]
    times: NDArray[np.uint64]  # [n] CLOCK_MONOTONIC ns
    depths: NDArray[np.int64]  # [n] numbers of addresses
    ips: NDArray[np.uint64]  # [sum of depths], each stack from its innermost address on

    def take(self, chosen: NDArray[np.int64]) -> WalkedStacks:
        """Returns the chosen stacks, given by their indices."""
        starts, depths = (np.cumsum(self.depths) - self.depths)[chosen], self.depths[chosen]
        return WalkedStacks(self.pids[chosen], self.times[chosen], depths, self.ips[ranges(starts, depths)])

    def lists(self) -> pa.Array:
        """Returns the addresses as column `ips` of `stack` rows."""
        offsets = np.concatenate([[0], np.cumsum(self.depths)])
        type_ = KINDS["stack"].field("ips").type
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(self.ips, pa.uint64()), type=type_)


@dataclass(frozen=True, eq=False)
class LastFrames:
    """The last frames of n stacks."""

    modules: NDArray[np.int32]  # [n] indices into the modules of the address spaces; -1 for a stack without frames
    addresses: NDArray[np.uint64]  # [n] of the calls, in those modules; see ModuleKind
    walked: NDArray[np.uint8]  # [n] formats.wire.unwind_rules.Walked; UNKNOWN if the walk did not tell how it ended

    def take(self, chosen: NDArray[Any]) -> LastFrames:
        """Returns the last frames of the chosen stacks."""
        return LastFrames(self.modules[chosen], self.addresses[chosen], self.walked[chosen])


class Walks:
    """Locates the addresses of a recording's stacks, and cuts stacks."""

    def __init__(self, spaces: AddressSpaces, all_mappings: bool) -> None:
        """Takes the address spaces.

        Args:
            spaces: of the recording's processes.
            all_mappings: False if mappings were lost: then an address in no mapping may be code.
        """
        self._spaces, self._all_mappings = spaces, all_mappings
        self._nowhere = np.empty(0, bool)  # for each module of the address spaces: whether it stands for no module

    @property
    def modules(self) -> list[Module]:
        """The modules that `LastFrames.modules` are indices into."""
        return self._spaces.modules

    def cut(self, walked: WalkedStacks) -> tuple[WalkedStacks, LastFrames]:
        """Returns the stacks up to the first address that can be no return address, and their last frames."""
        starts = np.cumsum(walked.depths) - walked.depths
        rows = np.repeat(np.arange(len(walked.depths)), walked.depths)
        within = ranges(0, walked.depths)
        is_return = within > 0
        # Return addresses become addresses of calls: see symbols.names.calls.
        places = walked.ips - is_return.astype(np.uint64)
        modules, addresses, is_mapped = self._locate(walked.pids[rows], places, walked.times[rows])
        # If no mapping of a process is known, all its addresses count as mapped.
        is_mapped |= ~np.bincount(rows, is_mapped, len(walked.depths)).astype(bool)[rows]
        good = is_mapped
        if not self._all_mappings:
            # Code in a lost mapping has callers in a known one; what comes after the last mapped address is not code.
            last_mapped = np.zeros(len(walked.depths), np.int64)
            np.maximum.at(last_mapped, rows[is_mapped], within[is_mapped])
            good = within <= last_mapped[rows]
        good = good | ~is_return
        bad = np.flatnonzero(~good)
        depths = walked.depths.copy()
        np.minimum.at(depths, rows[bad], within[bad])
        kept = within < depths[rows]
        cut = replace(walked, depths=depths, ips=walked.ips[kept])
        unknown = np.full(len(depths), UNKNOWN, np.uint8)
        if len(modules):
            last = np.maximum(starts + depths - 1, 0)
            modules, addresses = modules[last], addresses[last]
        return cut, _last_frames(depths, modules, addresses, unknown)

    def last_frames(self, walked: WalkedStacks, how: NDArray[np.uint8]) -> LastFrames:
        """Returns the last frames of stacks that need no cut; `how` becomes LastFrames.walked."""
        last = np.maximum(np.cumsum(walked.depths) - 1, 0)
        places = walked.ips[last] - (walked.depths > 1).astype(np.uint64) if len(walked.ips) else walked.ips[:0]
        if not len(places):
            return _last_frames(walked.depths, np.zeros(0, np.int32), np.zeros(0, np.uint64), how)
        modules, addresses, _ = self._locate(walked.pids, places, walked.times)
        return _last_frames(walked.depths, modules, addresses, how)

    def modules_of(
        self, pids: NDArray[np.uint32], places: NDArray[np.uint64], times: NDArray[np.uint64]
    ) -> NDArray[np.int32]:
        """Returns the module of each place in the memory of a process, as an index into `modules`."""
        return self._locate(pids, places, times)[0]

    def _locate(
        self, pids: NDArray[np.uint32], places: NDArray[np.uint64], times: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.bool_]]:
        """Returns the module of each place, the address in it, and whether it is in executable memory at all."""
        modules, addresses = self._spaces.locate(pids, places, times)
        missing = np.flatnonzero(self._is_nowhere(modules))
        if len(missing):
            later = times[missing] + np.uint64(_SNAPSHOT_NS)
            modules[missing], addresses[missing] = self._spaces.locate(pids[missing], places[missing], later)
        return modules, addresses, ~self._is_nowhere(modules)

    def _is_nowhere(self, modules: NDArray[np.int32]) -> NDArray[np.bool_]:
        new = self._spaces.modules[len(self._nowhere) :]
        self._nowhere = np.append(self._nowhere, np.array([module.path == NOWHERE for module in new], bool))
        return self._nowhere[modules]


def _last_frames(
    depths: NDArray[np.int64], modules: NDArray[np.int32], addresses: NDArray[np.uint64], how: NDArray[np.uint8]
) -> LastFrames:
    """Makes LastFrames, without place for stacks without frames."""
    if not len(modules):
        return LastFrames(np.full(len(depths), -1, np.int32), np.zeros(len(depths), np.uint64), how)
    has_frames = depths > 0
    return LastFrames(np.where(has_frames, modules, np.int32(-1)), np.where(has_frames, addresses, np.uint64(0)), how)


_ODD = np.uint64(0x9E3779B97F4A7C15)
_OTHER_ODD = np.uint64(0xC4CEB9FE1A85EC53)


class StackIds:
    """Ids of stacks by their content, hashed with a random secret: equal stacks of a process have the same id."""

    def __init__(self) -> None:
        # Processes control the addresses of their stacks: without a secret, they could choose the id of another stack.
        self._secret = np.frombuffer(os.urandom(8), np.uint64)[0]

    def hashes(
        self, depths: NDArray[np.int64], ips: NDArray[np.uint64], owners: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """Hashes each stack's addresses, in their order, and its owner: uint64[n], 0 for a stack without addresses.

        Args:
            depths: int64[n], the number of addresses of each stack.
            ips: uint64[sum of depths], one stack after the other.
            owners: uint64[n], distinguishes stacks with the same addresses.
        """
        starts = np.cumsum(depths) - depths
        mixed = _mixed(ips ^ _mixed(ranges(0, depths).astype(np.uint64) + self._secret))
        sums = np.zeros(len(depths), np.uint64)
        has = depths > 0
        if has.any():
            sums[has] = np.add.reduceat(mixed, starts[has])
        ids = _mixed(sums ^ _mixed(owners ^ self._secret))
        ids[~has] = 0
        return ids


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ values >> np.uint64(32)) * _ODD
    values = (values ^ values >> np.uint64(29)) * _OTHER_ODD
    return values ^ values >> np.uint64(32)
