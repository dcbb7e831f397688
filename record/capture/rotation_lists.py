"""Rotation state of command lists: what each list holds, and which lists are executed.

A list filled in one file may be executed in the next. Its launches are kept until it is reset or destroyed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.launches import LAUNCH, LIST_EVENT, LISTS_A_RECORD, LaunchFlags, ListEvent

MOST_APPENDED = 1 << 17  # launches in lists that are known to be executed
MOST_OTHERS = 1 << 14  # launches in other lists: those may be immediate, and immediate lists are not executed
_Ints = NDArray[np.int64]


class KeptLists:
    """Collects launches and events of command lists, and drops those that no longer matter."""

    def __init__(self) -> None:
        self._launches: list[NDArray[np.void]] = []  # LAUNCH, appended to lists
        self._events: list[NDArray[np.void]] = []  # LIST_EVENT, of one list each
        self._rows = 0
        self.dropped = 0
        """Launches in executed lists that were dropped for lack of room."""

    def add_launches(self, launches: NDArray[np.void]) -> None:
        """Adds those of LAUNCH[n] that were appended to a list."""
        self._keep(self._launches, launches[launches["list"] != 0])

    def add_events(self, events: NDArray[np.void]) -> None:
        """Adds LIST_EVENT[n]."""
        count = np.minimum(events["count"], LISTS_A_RECORD)
        single = np.repeat(events, count)
        single["lists"][:, 0] = events["lists"][np.arange(LISTS_A_RECORD) < count[:, None]]
        single["lists"][:, 1:] = 0
        single["count"] = 1
        self._keep(self._events, single)

    def _keep(self, rows_list: list[NDArray[np.void]], rows: NDArray[np.void]) -> None:
        if len(rows):
            rows_list.append(rows.copy())
            self._rows += len(rows)
        if self._rows > 4 * MOST_APPENDED:
            self.current()

    def current(self) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Returns the launches that lists hold, LAUNCH[n], and lists' latest events, LIST_EVENT[m]; both by time."""
        launches = np.concatenate([np.empty(0, LAUNCH), *self._launches])
        events = np.concatenate([np.empty(0, LIST_EVENT), *self._events])
        lists = np.concatenate([launches["list"], events["lists"][:, 0]])
        numbers = _numbers(np.concatenate([launches["pid"], events["pid"]]), lists)
        of_launch, of_event = numbers[: len(launches)], numbers[len(launches) :]
        count = int(numbers.max()) + 1 if len(numbers) else 0
        destroyed, emptied = (
            _last(events, of_event, kinds, count)
            for kinds in ((ListEvent.DESTROY,), (ListEvent.DESTROY, ListEvent.RESET))
        )
        events, of_event = _only(events["time"] > destroyed[of_event], events, of_event)
        # Of each list the last event of each kind is enough.
        order = np.lexsort((events["time"], events["event"], of_event))
        same = (np.diff(of_event[order]) == 0) & (np.diff(events["event"][order].astype(np.int64)) == 0)
        kept = np.sort(order[np.append(~same, True)]) if len(order) else order
        events, of_event = events[kept], of_event[kept]
        is_executed = np.zeros(count, bool)
        is_executed[of_event[np.isin(events["event"], (ListEvent.EXECUTE, ListEvent.CLOSE))]] = True
        launches, of_launch = _only(launches["time"] > emptied[of_launch], launches, of_launch)
        executed, others = launches[is_executed[of_launch]], launches[~is_executed[of_launch]]
        self.dropped += max(len(executed) - MOST_APPENDED, 0)
        launches = np.concatenate([executed[-MOST_APPENDED:], others[-MOST_OTHERS:]])
        launches, events = launches[np.argsort(launches["time"])], events[np.argsort(events["time"])]
        self._launches, self._events, self._rows = [launches], [events], len(launches) + len(events)
        return launches, events


def marked_carried(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Returns a copy of LAUNCH[n] or LIST_EVENT[n], marked as rows of the previous file."""
    rows = rows.copy()
    rows["flags"] |= np.uint32(LaunchFlags.CARRIED)
    return rows


def _only(rows: NDArray[np.bool_], records: NDArray[np.void], numbers: _Ints) -> tuple[NDArray[np.void], _Ints]:
    return records[rows], numbers[rows]


def _last(events: NDArray[np.void], numbers: _Ints, kinds: tuple[ListEvent, ...], count: int) -> NDArray[np.uint64]:
    """Returns when one of these events happened to each list last: uint64[count], 0 for never."""
    times = np.zeros(count, np.uint64)
    is_of_kind = np.isin(events["event"], kinds)
    np.maximum.at(times, numbers[is_of_kind], events["time"][is_of_kind])
    return times


def _numbers(pids: NDArray[np.uint32], lists: NDArray[np.uint64]) -> _Ints:
    """Numbers the distinct lists, by process and handle: int64[n]."""
    _, known = np.unique(lists, return_inverse=True)
    number: _Ints = np.unique(known * (1 << 32) + pids, return_inverse=True)[1].astype(np.int64)
    return number
