"""Where the stacks of a recording end, counted by launches and by CPU samples for the capture's header."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.unwind_rules import Walked
from iaprof.formats.whole_stacks import ProcessEnd, WholeStacks
from iaprof.record.walks import UNKNOWN, Ends
from iaprof.symbols.modules import Module
from iaprof.symbols.names import Named
from iaprof.symbols.stack_ends import End, code_of, end_of, has_no_beginning

_AT_ONCE = 1 << 20  # rows of counts that wait to be added up


class _Counts:
    """Counts of ids."""

    def __init__(self) -> None:
        self._ids, self._counts = np.empty(0, np.uint64), np.empty(0, np.int64)
        self._waiting: list[tuple[NDArray[np.uint64], NDArray[np.int64]]] = []

    def add(self, ids: NDArray[np.uint64], counts: NDArray[np.int64]) -> None:
        self._waiting.append((ids, counts))
        if sum(len(each) for each, _ in self._waiting) > max(_AT_ONCE, len(self._ids)):
            self.total()

    def total(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """The distinct ids, sorted, and the count of each."""
        ids = np.concatenate([self._ids, *(ids for ids, _ in self._waiting)])
        counts = np.concatenate([self._counts, *(counts for _, counts in self._waiting)])
        self._waiting.clear()
        self._ids, which = np.unique(ids, return_inverse=True)
        self._counts = np.bincount(which, counts, len(self._ids)).astype(np.int64)
        return self._ids, self._counts


_PLACE = np.dtype([("module", "<i4"), ("address", "<u8"), ("truncated", "?"), ("walked", "u1"), ("guessed", "?")])
"""Where and how a stack ends: of the modules that `Ends` means, see there."""


@dataclass(frozen=True, eq=False)
class _Stacks:
    """n distinct stacks."""

    ids: NDArray[np.uint64]  # [n]
    pids: NDArray[np.uint32]  # [n]
    places: NDArray[np.void]  # _PLACE[n]
    late: NDArray[np.bool_]  # [n] whether each was finished when the recording had ended


class StackEnds:
    """Collects where stacks end, and then what the files say about these places."""

    def __init__(self) -> None:
        self._stacks: list[_Stacks] = []
        self._launches, self._samples = _Counts(), _Counts()
        self._presumed = {"launches": 0, "cpu_samples": 0}
        self._named: dict[tuple[object, ...], Named] = {}
        self._outermost: dict[tuple[object, ...], frozenset[int]] = {}  # of those

    def stacks(
        self,
        ids: NDArray[np.uint64],
        pids: NDArray[np.uint32],
        ends: Ends,
        truncated: NDArray[np.bool_],
        guessed: NDArray[np.bool_],
        late: bool,
    ) -> None:
        """Adds the ends of distinct stacks.

        Args:
            ids: of the stacks.
            pids: whose they are.
            ends: where they end.
            truncated: whether each is as deep as the limit.
            guessed: whether each has a caller that was guessed.
            late: whether they were finished when the recording had ended.
        """
        places = np.empty(len(ids), _PLACE)
        columns = (ends.modules, ends.addresses, truncated, ends.walked, guessed)
        for name, column in zip(_PLACE.names or (), columns, strict=True):
            places[name] = column
        self._stacks.append(_Stacks(ids, pids, places, np.full(len(ids), late)))

    def launches(self, stacks: NDArray[np.uint64], presumed: int = 0) -> None:
        """Counts launches by the ids of their stacks; so many of them have that of another one."""
        self._launches.add(stacks, np.ones(len(stacks), np.int64))
        self._presumed["launches"] += presumed

    def samples(self, stacks: NDArray[np.uint64], presumed: int = 0) -> None:
        """Counts CPU samples by the ids of their stacks; so many of them have that of another one."""
        self._samples.add(stacks, np.ones(len(stacks), np.int64))
        self._presumed["cpu_samples"] += presumed

    def places(self, modules: list[Module]) -> Iterator[tuple[Module, NDArray[np.uint64]]]:
        """Each module in which stacks end, and the distinct addresses where they do, sorted.

        Args:
            modules: those that `Ends` means.
        """
        found: dict[tuple[object, ...], tuple[Module, list[NDArray[np.uint64]]]] = {}
        for each in self._stacks:
            numbers, addresses = each.places["module"], each.places["address"]
            for number in np.unique(numbers[numbers >= 0]).tolist():
                module = modules[number]
                found.setdefault(module.identity, (module, []))[1].append(addresses[numbers == number])
        for module, parts in found.values():
            yield module, np.unique(np.concatenate(parts))

    def completed(self, module: Module, named: Named) -> Named:
        """Keeps what was found of a module, and gives it."""
        self._named[module.identity] = named
        self._outermost[module.identity] = frozenset(() if named.outermost is None else named.outermost.tolist())
        return named

    def header(self, modules: list[Module]) -> dict[str, Any]:
        """For the capture's header: `launches` and `cpu_samples`, see WholeStacks.to_json.

        Args:
            modules: those that `Ends` means.
        """
        ids = np.concatenate([np.empty(0, np.uint64), *(stacks.ids for stacks in self._stacks)])
        pids = np.concatenate([np.empty(0, np.uint32), *(stacks.pids for stacks in self._stacks)])
        late = np.concatenate([np.empty(0, bool), *(stacks.late for stacks in self._stacks)])
        places = np.concatenate([np.empty(0, _PLACE), *(stacks.places for stacks in self._stacks)])
        distinct, which = np.unique(places, return_inverse=True)
        kinds = [
            (*self._kind(modules, number, address, truncated, walked), truncated, guessed)
            for number, address, truncated, walked, guessed in distinct.tolist()
        ]
        is_whole = np.array([end is End.WHOLE for end, *_ in kinds], bool)[which]
        order = np.argsort(ids, kind="stable")
        found = {}
        for name, counts in (("launches", self._launches), ("cpu_samples", self._samples)):
            met, times = counts.total()
            at = np.searchsorted(ids[order], met)
            there = at < len(ids)
            there[there] = ids[order[at[there]]] == met[there]
            rows, times = order[at[there]], times[there]
            by_place = np.bincount(which[rows], times, len(distinct)).astype(np.int64)
            processes = _by_process(pids[rows], times, is_whole[rows])
            of_late = int(times[late[rows]].sum())
            added_up = _added_up(kinds, by_place.tolist(), processes, of_late, self._presumed[name])
            found[name] = added_up.to_json()
        return found

    def _kind(self, modules: list[Module], number: int, address: int, truncated: bool, walked: int) -> tuple[End, str]:
        """How a stack ends whose last frame is there, and in what."""
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


def _by_process(
    pids: NDArray[np.uint32], times: NDArray[np.int64], is_whole: NDArray[np.bool_]
) -> Iterator[ProcessEnd]:
    """Those that have stacks which are not whole."""
    distinct, which = np.unique(pids, return_inverse=True)
    stacks = np.bincount(which, times, len(distinct)).astype(np.int64)
    counts = np.bincount(which, times * ~is_whole, len(distinct)).astype(np.int64)
    some = counts > 0
    return map(ProcessEnd, distinct[some].tolist(), stacks[some].tolist(), counts[some].tolist())


def _added_up(
    kinds: list[tuple[End, str, bool, bool]],
    counts: list[int],
    processes: Iterator[ProcessEnd],
    late: int,
    presumed: int,
) -> WholeStacks:
    whole = unknown = deep = guesses = 0
    ends: Counter[str] = Counter()
    for (end, library, truncated, guessed), count in zip(kinds, counts, strict=True):
        guesses += count * guessed
        deep += count * (truncated and end is End.CUT)
        if end is End.WHOLE:
            whole += count
        elif count:
            unknown += count * (end is End.UNKNOWN)
            ends[library] += count
    return WholeStacks.of(whole, unknown, ends, processes, deep=deep, guessed=guesses, late=late, presumed=presumed)
