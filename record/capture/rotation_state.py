"""Rotation state: what the next output file needs from the one before, when a recording changes its output.

A file must be readable by itself. Mappings and names are read from /proc again, and stacks are sent again. The rest is
here: the modules of running processes; the last launch of each kernel, as the GPU may still run it; and the mappings
of processes that launched it and have ended.
"""

from __future__ import annotations

import json
from functools import partial

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.launches import LAUNCH, LIST_EVENT, stack_dtype
from iaprof.formats.wire.sideband import process_events, process_records
from iaprof.record.capture.rotation_lists import KeptLists, marked_carried
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
            about = json.loads(frame.payload[: frame.part])
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
                    records = np.frombuffer(frame.payload, stack_dtype(frame.part))
                    records = records[np.isin(records["id"], stacks)].copy()
                    records["time"] = self._now  # the next file gets the mappings of this time
                    if len(records):
                        file.writelines(frame_of(frame.kind, records.tobytes(), time=frame.time, part=frame.part))
                elif frame.kind is FrameKind.PIECE:
                    if self._lives(chunk_head(frame).pid):
                        file.writelines(frame_of(frame.kind, frame.payload, time=frame.time))
                elif any(map(self._lives, self._users[json.loads(frame.payload[: frame.part])["digest"]])):
                    file.writelines(frame_of(frame.kind, frame.payload, time=frame.time, part=frame.part))
            if launches or len(held):
                all_ = marked_carried(np.concatenate([np.array(launches, LAUNCH), held]))
                file.writelines(frame_of(FrameKind.LAUNCHES, all_.tobytes(), time=self._now))
            if len(events):
                file.writelines(frame_of(FrameKind.LISTS, marked_carried(events).tobytes(), time=self._now))
            if self._forgotten:
                row = {"source": "launches", "what": "not carried", "count": self._forgotten, "detail": _FORGOTTEN}
                file.writelines(frame_of(FrameKind.LOSS, json.dumps(row).encode(), time=self._now, begin=self._now))
            if self._lists.dropped:
                row = {"source": "launches", "what": "not carried", "count": self._lists.dropped, "detail": _DROPPED}
                file.writelines(frame_of(FrameKind.LOSS, json.dumps(row).encode(), time=self._now, begin=self._now))

    def _of_living(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        living = [pid for pid in np.unique(rows["pid"]).tolist() if self._lives(pid)]
        return rows[np.isin(rows["pid"], living)]
