"""Stacks as they were walked, cut before the first address that can be no return address.

In code without frame pointers a walk follows other data. An address counts as a return address if the side-band says
that it lies in executable memory of its process, and, if the bytes before it are known, these are a call instruction.
Generated code needs no call: Java's interpreter pushes the addresses that it wants to be returned to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture import KINDS
from iaprof.symbols.address_space import NOWHERE, AddressSpaces
from iaprof.symbols.modules import Module, ModuleKind
from iaprof.symbols.return_addresses import begins_goroutine, can_be_returned_to, is_known

_SNAPSHOT_NS = 1_000_000_000  # the mappings of processes that ran before are read within this time


@dataclass(frozen=True, eq=False)
class Walked:
    """n stacks, one after the other."""

    pids: NDArray[np.uint32]  # [n]
    times: NDArray[np.uint64]  # [n] CLOCK_MONOTONIC ns
    depths: NDArray[np.int64]  # [n] addresses
    ips: NDArray[np.uint64]  # [sum of depths], each stack's innermost first
    codes: NDArray[np.uint64] | None = None  # [sum of depths], see symbols.return_addresses; None if not read

    def of(self, chosen: NDArray[np.int64]) -> Walked:
        """Some of the stacks, given by their numbers."""
        starts, depths = (np.cumsum(self.depths) - self.depths)[chosen], self.depths[chosen]
        which = np.repeat(starts - (np.cumsum(depths) - depths), depths) + np.arange(depths.sum())
        codes = None if self.codes is None else self.codes[which]
        return Walked(self.pids[chosen], self.times[chosen], depths, self.ips[which], codes)

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
    begin: NDArray[np.bool_]  # [n] whether a goroutine is known to begin there

    def of(self, chosen: NDArray[Any]) -> Ends:
        """Those of some of the stacks."""
        return Ends(self.modules[chosen], self.addresses[chosen], self.begin[chosen])


class Walks:
    """Cuts the stacks of one recording."""

    def __init__(self, spaces: AddressSpaces, all_mappings: bool) -> None:
        """Takes what is known of processes.

        Args:
            spaces: its processes.
            all_mappings: False if mappings were lost, so that an address without a mapping may still be code.
        """
        self._spaces, self._all_mappings = spaces, all_mappings
        # Of each of the modules of the address spaces, whether it is none, and whether it is generated code.
        self._nowhere, self._generated = np.empty(0, bool), np.empty(0, bool)

    @property
    def modules(self) -> list[Module]:
        """The modules that `Ends.modules` are indices into."""
        return self._spaces.modules

    def cut(self, walked: Walked) -> tuple[Walked, Ends]:
        """The stacks up to the first address that can be no return address, and their last frames."""
        starts = np.cumsum(walked.depths) - walked.depths
        rows = np.repeat(np.arange(len(walked.depths)), walked.depths)
        within = np.arange(len(walked.ips)) - starts[rows]
        is_return = within > 0
        # Where a call is: see symbols.calls.
        places = walked.ips - is_return.astype(np.uint64)
        modules, addresses, is_mapped = self._locate(walked.pids[rows], places, walked.times[rows])
        is_generated = self._generated[modules]
        # If no mapping of a process is known, only the call instructions count.
        is_mapped |= ~np.bincount(rows, is_mapped, len(walked.depths)).astype(bool)[rows]
        begins = np.zeros(len(rows), bool)
        good = is_mapped
        if walked.codes is not None:
            can_be = can_be_returned_to(walked.codes)
            begins = begins_goroutine(walked.codes)
            good = is_mapped & (can_be | is_generated | ~is_known(walked.codes))
            good |= can_be & (not self._all_mappings)
        elif not self._all_mappings:
            # Code that is in no mapping has callers that are in one; what lies behind the last of those is no code.
            last_mapped = np.zeros(len(walked.depths), np.int64)
            np.maximum.at(last_mapped, rows[is_mapped], within[is_mapped])
            good = within <= last_mapped[rows]
        good = good | ~is_return
        bad = np.flatnonzero(~good)
        depths = walked.depths.copy()
        np.minimum.at(depths, rows[bad], within[bad])
        kept = within < depths[rows]
        codes = None if walked.codes is None else walked.codes[kept]
        last = np.maximum(starts + depths - 1, 0)
        has = depths > 0
        ends = Ends(np.full(len(depths), -1, np.int32), np.zeros(len(depths), np.uint64), np.zeros(len(depths), bool))
        ends.modules[has], ends.addresses[has] = modules[last[has]], addresses[last[has]]
        ends.begin[has] = begins[last[has]] & (depths[has] > 1)
        return replace(walked, depths=depths, ips=walked.ips[kept], codes=codes), ends

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
        is_none = np.array([module.path == NOWHERE for module in new], bool)
        is_generated = np.array([module.kind is ModuleKind.GENERATED for module in new], bool) & ~is_none
        self._nowhere = np.append(self._nowhere, is_none)
        self._generated = np.append(self._generated, is_generated)
        return self._nowhere[modules]
