"""Rotation state: what the next output file needs from the one before, when a recording changes its output.

A file must be readable by itself. Mappings and names are read from /proc again, and stacks are sent again. The rest is
here: the modules of running processes; the last launch of each kernel, as the GPU may still run it; and the mappings of
processes that launched it and have ended; and what command lists hold: one that is filled in one file may be executed
in the next, so its launches are kept until it is reset or destroyed.
"""

from __future__ import annotations

import json
from functools import partial

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.launches import LAUNCH, LIST_EVENT, LISTS_A_RECORD, LaunchFlags, ListEvent, stack_dtype
from iaprof.formats.wire.sideband import process_events, process_records
from iaprof.record.kernels.dumped import chunk_head
from iaprof.record.spool import Frame, FrameKind, SpoolReader, framed

LINGER_NS = 10_000_000_000  # after a process's end: on a busy machine the stalls of its last launches are read late
MAX_LAUNCHES = 1 << 16
_FORGOTTEN = "kernels last launched before this file, too many to carry over: their stalls have no launch"
_DROPPED = (
    "launches in command lists from before this file, too many to carry over: executions of these lists lack them"
)


class RotationState:
    """Looks at the frames of a spool while they are finished, then writes those that the next file needs."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], NDArray[np.void]] = {}  # by process and kernel, the latest last
        self._ended: dict[int, int] = {}  # times, by process
        self._parents: dict[int, int] = {}
        self._users: dict[str, set[int]] = {}  # processes that have a module, by its digest
        self._now = 0
        self._forgotten = 0  # last launches of kernels that are not carried over, as there are too many
        self._lists = KeptLists()

    def add(self, frame: Frame) -> None:
        """Takes note of launches, lists, modules, forks and exits in a frame."""
        self._now = max(self._now, frame.time)
        if frame.kind is FrameKind.LAUNCHES and len(frame.payload) % LAUNCH.itemsize == 0:
            self._add_launches(np.frombuffer(frame.payload, LAUNCH))
        elif frame.kind is FrameKind.LISTS and len(frame.payload) % LIST_EVENT.itemsize == 0:
            self._lists.add_events(np.frombuffer(frame.payload, LIST_EVENT))
        elif frame.kind is FrameKind.KERNEL:
            about = json.loads(frame.payload[: frame.shape])
            self._users.setdefault(about["digest"], set()).add(about["pid"])
        elif frame.kind is FrameKind.SIDEBAND:
            for time, pid, parent, begins in process_events(frame.payload):
                if begins:
                    self._ended.pop(pid, None)
                    self._parents[pid] = parent
                else:
                    self._ended[pid] = time

    def _add_launches(self, launches: NDArray[np.void]) -> None:
        self._lists.add_launches(launches)
        reverse = launches[::-1]
        which = reverse[["pid", "address"]].copy()
        for index in np.unique(which, return_index=True)[1]:
            launch = reverse[index]
            key = (int(launch["pid"]), int(launch["address"]))
            self._last.pop(key, None)
            self._last[key] = launch.copy()
        while len(self._last) > MAX_LAUNCHES:
            del self._last[next(iter(self._last))]
            self._forgotten += 1

    def _lives(self, pid: int) -> bool:
        return self._now - self._ended.get(pid, self._now) < LINGER_NS

    def write(self, spool: SpoolReader, out: int) -> None:
        """Writes the frames for the next file.

        Args:
            spool: the whole spool, whose frames `add` has seen.
            out: descriptor to write to.

        Raises:
            OSError: it cannot be written.
        """
        held, events = (self._of_living(rows) for rows in self._lists.current())
        in_lists = set(held[["pid", "list", "time"]].tolist())
        launches = [launch for (pid, _), launch in self._last.items() if self._lives(pid)]
        launches = [launch for launch in launches if launch[["pid", "list", "time"]].item() not in in_lists]
        for launch in launches:
            launch["list"] = 0  # reset or destroyed since
        # /proc no longer has the mappings of ended processes; those not mapped by a process itself are its parents'.
        ended: set[int] = set()
        pids = {int(launch["pid"]) for launch in launches} | set(held["pid"].tolist()) | set(events["pid"].tolist())
        for pid in pids & self._ended.keys():
            while pid in self._parents and pid not in ended:
                ended.add(pid)
                pid = self._parents[pid]
        stacks = np.array([launch["stack"] for launch in launches], np.uint64)
        stacks = np.concatenate([stacks, held["stack"], events["stack"]])
        frame_of = partial(framed, mark=spool.mark)
        with open(out, "wb", closefd=False) as file:
            kinds = {FrameKind.KERNEL, FrameKind.PIECE, FrameKind.STACKS, *([FrameKind.SIDEBAND] if ended else [])}
            for frame in spool.frames(kinds):
                if frame.kind is FrameKind.SIDEBAND:
                    if side_band := process_records(frame.payload, ended):
                        file.writelines(frame_of(frame.kind, side_band, time=frame.time))
                elif frame.kind is FrameKind.STACKS:
                    records = np.frombuffer(frame.payload, stack_dtype(frame.shape))
                    records = records[np.isin(records["id"], stacks)].copy()
                    records["time"] = self._now  # the next file gets the mappings of this time
                    if len(records):
                        file.writelines(frame_of(frame.kind, records.tobytes(), time=frame.time, shape=frame.shape))
                elif frame.kind is FrameKind.PIECE:
                    if self._lives(chunk_head(frame).pid):
                        file.writelines(frame_of(frame.kind, frame.payload, time=frame.time))
                elif any(map(self._lives, self._users[json.loads(frame.payload[: frame.shape])["digest"]])):
                    file.writelines(frame_of(frame.kind, frame.payload, time=frame.time, shape=frame.shape))
            if launches or len(held):
                all_ = marked_carried(np.concatenate([np.array(launches, LAUNCH), held]))
                file.writelines(frame_of(FrameKind.LAUNCHES, all_.tobytes(), time=self._now))
            if len(events):
                file.writelines(frame_of(FrameKind.LISTS, marked_carried(events).tobytes(), time=self._now))
            for count, detail in ((self._forgotten, _FORGOTTEN), (self._lists.dropped, _DROPPED)):
                if count:
                    row = {"source": "launches", "what": "not carried", "count": count, "detail": detail}
                    file.writelines(frame_of(FrameKind.LOSS, json.dumps(row).encode(), time=self._now, begin=self._now))

    def _of_living(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        living = [pid for pid in np.unique(rows["pid"]).tolist() if self._lives(pid)]
        return rows[np.isin(rows["pid"], living)]


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
        """Launches in executed lists, and lists in others, that were dropped for lack of room."""

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
        lists = np.concatenate([launches["list"], events["lists"][:, 0], events["queue"]])
        numbers = _numbers(np.concatenate([launches["pid"], events["pid"], events["pid"]]), lists)
        of_launch, of_event, of_outer = np.split(numbers, [len(launches), len(launches) + len(events)])
        count = int(numbers.max()) + 1 if len(numbers) else 0
        destroyed, emptied = (
            _last(events, of_event, kinds, count)
            for kinds in ((ListEvent.DESTROY,), (ListEvent.DESTROY, ListEvent.RESET))
        )
        is_over = (events["event"] == ListEvent.INCLUDE) & (events["time"] <= emptied[of_outer])
        events, of_event = _only((events["time"] > destroyed[of_event]) & ~is_over, events, of_event)
        # Of each list the last event of each kind is enough, and all lists that another one includes.
        order = np.lexsort((events["time"], events["event"], of_event))
        same = (np.diff(of_event[order]) == 0) & (np.diff(events["event"][order].astype(np.int64)) == 0)
        same &= events["event"][order][:-1] != ListEvent.INCLUDE
        kept = np.sort(order[np.append(~same, True)]) if len(order) else order
        included = kept[events["event"][kept] == ListEvent.INCLUDE]
        excess = included[: max(len(included) - MOST_APPENDED, 0)]
        self.dropped += len(excess)
        kept = np.setdiff1d(kept, excess)
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
