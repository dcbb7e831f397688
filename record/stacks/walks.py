"""Stacks that were walked by frame pointers, cut before the first address that can be no return address.

In code without frame pointers such a walk follows other data. An address counts as a return address if the side-band
says that it lies in executable memory of its process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.ranges import ranges
from iaprof.symbols.names.address_space import NOWHERE, AddressSpaces
from iaprof.symbols.names.modules import Module

UNKNOWN = 255
_SNAPSHOT_NS = 1_000_000_000  # the mappings of processes that ran before are read within this time


@dataclass(frozen=True, eq=False)
class Walked:
    """n stacks, one after the other."""

    pids: NDArray[np.uint32]  # [n]
    times: NDArray[np.uint64]  # [n] CLOCK_MONOTONIC ns
    depths: NDArray[np.int64]  # [n] addresses
    ips: NDArray[np.uint64]  # [sum of depths], each stack's innermost first

    def of(self, chosen: NDArray[np.int64]) -> Walked:
        """Some of the stacks, given by their numbers."""
        starts, depths = (np.cumsum(self.depths) - self.depths)[chosen], self.depths[chosen]
        return Walked(self.pids[chosen], self.times[chosen], depths, self.ips[ranges(starts, depths)])

    def lists(self) -> pa.Array:
        """The addresses as the column `ips` of `stack` rows."""
        offsets = np.concatenate([[0], np.cumsum(self.depths)])
        type_ = KINDS["stack"].field("ips").type
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(self.ips, pa.uint64()), type=type_)


@dataclass(frozen=True, eq=False)
class Ends:
    """The last frames of n stacks."""

    modules: NDArray[np.int32]  # [n] indices into the modules of the address spaces; -1 for a stack of no frame
    addresses: NDArray[np.uint64]  # [n] in those modules, of the call; see ModuleKind
    walked: NDArray[np.uint8]  # [n] formats.unwind_rules.Walked, UNKNOWN if the walk did not tell

    def of(self, chosen: NDArray[Any]) -> Ends:
        """Those of some of the stacks."""
        return Ends(self.modules[chosen], self.addresses[chosen], self.walked[chosen])


class Walks:
    """Cuts the stacks of one recording."""

    def __init__(self, spaces: AddressSpaces, all_mappings: bool) -> None:
        """Takes what is known of processes.

        Args:
            spaces: its processes.
            all_mappings: False if mappings were lost, so that an address without a mapping may still be code.
        """
        self._spaces, self._all_mappings = spaces, all_mappings
        self._nowhere = np.empty(0, bool)  # of each of the modules of the address spaces, whether it is none

    @property
    def modules(self) -> list[Module]:
        """The modules that `Ends.modules` are indices into."""
        return self._spaces.modules

    def cut(self, walked: Walked) -> tuple[Walked, Ends]:
        """The stacks up to the first address that can be no return address, and their last frames."""
        starts = np.cumsum(walked.depths) - walked.depths
        rows = np.repeat(np.arange(len(walked.depths)), walked.depths)
        within = ranges(0, walked.depths)
        is_return = within > 0
        # Where a call is: see symbols.calls.
        places = walked.ips - is_return.astype(np.uint64)
        modules, addresses, is_mapped = self._locate(walked.pids[rows], places, walked.times[rows])
        # If no mapping of a process is known, all of its addresses count.
        is_mapped |= ~np.bincount(rows, is_mapped, len(walked.depths)).astype(bool)[rows]
        good = is_mapped
        if not self._all_mappings:
            # Code that is in no mapping has callers that are in one; what lies behind the last of those is no code.
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
        return cut, _ends(depths, modules, addresses, unknown)

    def ends(self, walked: Walked, how: NDArray[np.uint8]) -> Ends:
        """The last frames of stacks that need no cut; `how` is Ends.walked."""
        last = np.maximum(np.cumsum(walked.depths) - 1, 0)
        places = walked.ips[last] - (walked.depths > 1).astype(np.uint64) if len(walked.ips) else walked.ips[:0]
        if not len(places):
            return _ends(walked.depths, np.zeros(0, np.int32), np.zeros(0, np.uint64), how)
        modules, addresses, _ = self._locate(walked.pids, places, walked.times)
        return _ends(walked.depths, modules, addresses, how)

    def modules_of(
        self, pids: NDArray[np.uint32], places: NDArray[np.uint64], times: NDArray[np.uint64]
    ) -> NDArray[np.int32]:
        """The module of each place in the memory of a process, as an index into `modules`."""
        return self._locate(pids, places, times)[0]

    def _locate(
        self, pids: NDArray[np.uint32], places: NDArray[np.uint64], times: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.bool_]]:
        """The module of each place, the address in it, and whether it is in executable memory at all."""
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


def _ends(
    depths: NDArray[np.int64], modules: NDArray[np.int32], addresses: NDArray[np.uint64], how: NDArray[np.uint8]
) -> Ends:
    """With no place for stacks of no frame."""
    if not len(modules):
        return Ends(np.full(len(depths), -1, np.int32), np.zeros(len(depths), np.uint64), how)
    has = depths > 0
    return Ends(np.where(has, modules, np.int32(-1)), np.where(has, addresses, np.uint64(0)), how)
