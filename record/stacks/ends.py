"""Where stacks end: counts of launches and CPU samples, for the capture's header."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import distinct_rows, numbered
from iaprof.formats.header.stack_counts import COUNTED, ProcessEnd, WholeStacks
from iaprof.formats.wire.unwind_rules import Walked
from iaprof.record.stacks.id_map import IdMap
from iaprof.record.stacks.walks import UNKNOWN, LastFrames
from iaprof.symbols.names.names import Module, Symbolized
from iaprof.symbols.unwind.stack_ends import End, code_of, end_of, has_no_beginning

_AT_ONCE = 1 << 20  # added rows that are summed up together


class _IdCounts:
    """Sums up counts by id."""

    def __init__(self) -> None:
        self._ids, self._counts = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._waiting: list[tuple[NDArray[np.uint64], NDArray[np.int64]]] = []

    def add(self, ids: NDArray[np.uint64], counts: NDArray[np.int64]) -> None:
        self._waiting.append((ids, counts))
        if sum(len(added) for added, _ in self._waiting) > max(_AT_ONCE, len(self._ids)):
            self.total()

    def total(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Returns the distinct ids, sorted, and the count of each."""
        ids = np.concatenate([self._ids, *(ids for ids, _ in self._waiting)])
        counts = np.concatenate([self._counts, *(counts for _, counts in self._waiting)])
        self._waiting.clear()
        self._ids, which = numbered(ids)
        self._counts = np.bincount(which, counts, len(self._ids)).astype(np.int64)
        return self._ids, self._counts


NO_GUESS = -2
"""Stands for no module: no caller of the stack was guessed."""
_Place: TypeAlias = tuple[int, int, bool, int, int]
"""Where and how stacks end: module, address, whether truncated, walked (see LastFrames), and guessed_in."""


class StackCounts:
    """Counts launches, or CPU samples: by stack; and by process those with a presumed stack, or a late one."""

    def __init__(self) -> None:
        self.stacks, self.presumed, self.late = _IdCounts(), _IdCounts(), _IdCounts()  # by stack, process and process

    def add(
        self,
        stacks: NDArray[np.uint64],
        pids: NDArray[np.uint32],
        presumed: NDArray[np.bool_],
        late: NDArray[np.bool_],
    ) -> None:
        """Counts n launches, or n samples.

        Args:
            stacks: uint64[n], the ids of their stacks.
            pids: uint32[n], their processes.
            presumed: bool[n], whether each has another launch's stack, as its own was not walked.
            late: bool[n], whether its stack was finished after the recording had ended.
        """
        self.stacks.add(stacks, np.ones(len(stacks), np.int64))
        for counts, chosen in ((self.presumed, presumed), (self.late, late)):
            chosen_pids = pids[chosen].astype(np.uint64)
            counts.add(chosen_pids, np.ones(len(chosen_pids), np.int64))


@dataclass(frozen=True, eq=False)
class _Stacks:
    """n distinct stacks."""

    ids: NDArray[np.uint64]  # [n]
    pids: NDArray[np.uint32]  # [n]
    places: NDArray[np.int32]  # [n]; few for all stacks


@dataclass(frozen=True)
class _EndKind:
    """What all stacks with the same end have in common."""

    end: End
    library: str  # whose code they end in
    truncated: bool
    guessed_in: str | None  # in whose code a caller was guessed first

    @property
    def is_deep(self) -> bool:
        return self.truncated and self.end is End.CUT


class StackEnds:
    """Collects where stacks end, and what the files say about these places.

    Attributes:
        launches: counts of launches.
        cpu_samples: counts of CPU samples.
    """

    def __init__(self) -> None:
        self.launches, self.cpu_samples = StackCounts(), StackCounts()
        self._stacks: list[_Stacks] = []
        self._places: dict[_Place, int] = {}  # numbered
        self._named: dict[tuple[object, ...], Symbolized] = {}
        self._outermost: dict[tuple[object, ...], frozenset[int]] = {}  # addresses in `_named` that are outermost

    def add(
        self,
        ids: NDArray[np.uint64],
        pids: NDArray[np.uint32],
        ends: LastFrames,
        truncated: NDArray[np.bool_],
        guessed_in: NDArray[np.int32],
    ) -> None:
        """Adds the ends of n distinct stacks.

        Args:
            ids: uint64[n], of the stacks.
            pids: uint32[n], their processes.
            ends: their last frames.
            truncated: bool[n], whether each is as deep as the limit.
            guessed_in: int32[n], the module in whose code a caller was guessed first; NO_GUESS if none was.
        """
        high, low = (ends.addresses >> np.uint64(32)).astype(np.uint32), ends.addresses.astype(np.uint32)
        first, which = distinct_rows(ends.modules, high, low, truncated, ends.walked, guessed_in)
        columns = (ends.modules, ends.addresses, truncated, ends.walked, guessed_in)
        distinct = zip(*(column[first].tolist() for column in columns), strict=True)
        numbers = [self._places.setdefault(place, len(self._places)) for place in distinct]
        self._stacks.append(_Stacks(ids, pids, np.array(numbers, np.int32)[which]))

    def places(self, modules: list[Module]) -> Iterator[tuple[Module, NDArray[np.uint64]]]:
        """Yields each module in which stacks end, and the distinct addresses of their ends, sorted.

        Args:
            modules: those that LastFrames.modules are indices into.
        """
        by_module: dict[tuple[object, ...], tuple[Module, set[int]]] = {}
        for number, address, *_ in self._places:
            if number >= 0:
                by_module.setdefault(modules[number].identity, (modules[number], set()))[1].add(address)
        for module, addresses in by_module.values():
            yield module, np.array(sorted(addresses), np.uint64)

    def add_names(self, module: Module, named: Symbolized) -> Symbolized:
        """Keeps the names that were found in a module; returns them."""
        self._named[module.identity] = named
        self._outermost[module.identity] = frozenset(() if named.outermost is None else named.outermost.tolist())
        return named

    def header(self, modules: list[Module]) -> dict[str, Any]:
        """Returns the capture's members `launches` and `cpu_samples`: see WholeStacks.to_json.

        Args:
            modules: those that LastFrames.modules are indices into.
        """
        ids = np.concatenate([np.empty(0, np.uint64), *(stacks.ids for stacks in self._stacks)])
        pids = np.concatenate([np.empty(0, np.uint32), *(stacks.pids for stacks in self._stacks)])
        which = np.concatenate([np.empty(0, np.int32), *(stacks.places for stacks in self._stacks)])
        kinds = [
            _EndKind(
                *self._end_of(modules, number, address, truncated, walked), truncated, _guesser(modules, guessed_in)
            )
            for number, address, truncated, walked, guessed_in in self._places
        ]
        rows_by_id = IdMap()
        rows_by_id.add(ids, np.arange(len(ids), dtype=np.uint64))
        members = {}
        for name, counted in zip(COUNTED, (self.launches, self.cpu_samples), strict=True):
            stack_ids, times = counted.stacks.total()
            is_known = rows_by_id.has(stack_ids)
            stack_ids, times = stack_ids[is_known], times[is_known]
            rows = rows_by_id.get(stack_ids, stack_ids).astype(np.int64)
            by_place = np.bincount(which[rows], times, len(kinds)).astype(np.int64)
            processes = [*_by_process(kinds, pids[rows], which[rows], times), *_by_finishing(counted)]
            members[name] = _added_up(kinds, by_place.tolist(), processes).to_json()
        return members

    def _end_of(
        self, modules: list[Module], number: int, address: int, truncated: bool, walked: int
    ) -> tuple[End, str]:
        """Returns how a stack ends with this last frame, and the name of the code that it is in."""
        if walked != UNKNOWN:
            end = End.WHOLE if walked == Walked.WHOLE else End.CUT
            return end, code_of(modules[number] if number >= 0 else None)
        if number < 0:
            return End.UNKNOWN, code_of(None)
        module = modules[number]
        named = self._named.get(module.identity)
        name = ""
        is_outermost = False if has_no_beginning(module) else None
        if named is not None:
            row = int(named.names.find(np.array([address], np.uint64))[0])
            name = named.names.frames(row)[0].function if row >= 0 else ""
            is_outermost = is_outermost if named.outermost is None else address in self._outermost[module.identity]
        end = end_of(name, module, is_outermost, named.frame_pointers if named else None)
        return End.CUT if truncated and end is not End.WHOLE else end, code_of(module)


def _guesser(modules: list[Module], number: int) -> str | None:
    """Returns the name of the code in which a caller was guessed; None if none was."""
    return None if number == NO_GUESS else code_of(modules[number] if number >= 0 else None)


def _by_process(
    kinds: list[_EndKind], pids: NDArray[np.uint32], which: NDArray[np.int32], times: NDArray[np.int64]
) -> Iterator[ProcessEnd]:
    """Yields each process once. Rows are of stacks: process, kind of end, and count of launches or samples."""
    early, deep, guessed = (
        np.array(flags, bool)[which]
        for flags in (
            [kind.end is not End.WHOLE for kind in kinds],
            [kind.is_deep for kind in kinds],
            [kind.guessed_in is not None for kind in kinds],
        )
    )
    distinct, process = np.unique(pids, return_inverse=True)
    counts = (
        np.bincount(process, times * flags, len(distinct)).astype(np.int64).tolist()
        for flags in (1, early, deep, guessed)
    )
    return map(ProcessEnd, distinct.tolist(), *counts)


def _by_finishing(counted: StackCounts) -> Iterator[ProcessEnd]:
    """Yields, by process, how many launches or samples have a presumed stack, and how many a late one."""
    for pid, count in zip(*(column.tolist() for column in counted.presumed.total()), strict=True):
        yield ProcessEnd(pid, 0, 0, presumed=count)
    for pid, count in zip(*(column.tolist() for column in counted.late.total()), strict=True):
        yield ProcessEnd(pid, 0, 0, late=count)


def _added_up(kinds: list[_EndKind], counts: list[int], processes: list[ProcessEnd]) -> WholeStacks:
    whole = unknown = deep = guessed_early = 0
    ends: Counter[str] = Counter()
    deep_in: Counter[str] = Counter()
    guesses: Counter[str] = Counter()
    for kind, count in zip(kinds, counts, strict=True):
        is_early = kind.end is not End.WHOLE
        if kind.guessed_in is not None:
            guesses[kind.guessed_in] += count
            guessed_early += count * is_early
        elif is_early:
            deep += count * kind.is_deep
            unknown += count * (kind.end is End.UNKNOWN)
        else:
            whole += count
        if is_early and count:
            ends[kind.library] += count
            deep_in[kind.library] += count * kind.is_deep
    late, presumed = (sum(getattr(process, name) for process in processes) for name in ("late", "presumed"))
    sums = {"deep": deep, "late": late, "presumed": presumed}
    sums |= {"guessed": guesses.total(), "guessed_early": guessed_early}
    return WholeStacks.from_counts(whole, unknown, ends, processes, deep_in=deep_in, guesses=guesses, **sums)
