"""Descriptors of tracks in Perfetto's format, as whole columns: a trace may have a million threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import BinaryArray as Bytes

from iaprof.formats.distinct import groups
from iaprof.formats.perfetto import columns, packets
from iaprof.formats.perfetto.columns import MOST_ROWS
from iaprof.formats.perfetto.packets import MOST_PID, PacketWriter
from iaprof.timelines.trace import HOST_PIDS
from iaprof.timelines.tracks import EVERYWHERE

_MOST_TID = (1 << 47) - 1  # larger numbers stand for texts


@dataclass(frozen=True)
class Names:
    """What metadata events say."""

    processes: Mapping[int, str]
    labels: Mapping[int, str]
    threads: Mapping[tuple[int, int], str]


class _Tracks(Protocol):
    """Tracks of one kind."""

    @property
    def pids(self) -> NDArray[np.int64]: ...

    def messages(self, part: slice, parents: NDArray[np.int64]) -> Bytes:
        """Returns the descriptors of some of them, without their numbers. A parent of 0 is none."""


@dataclass(frozen=True)
class Processes:
    """How processes are called."""

    named: Names
    device_pids: NDArray[np.int64]

    def messages(self, pids: NDArray[np.int64]) -> Bytes:
        """Returns the descriptors of some, without their numbers."""
        is_rank = np.isin(pids, self.device_pids)
        is_host = np.isin(pids - HOST_PIDS, self.device_pids) & ~is_rank
        starts = pa.array(["process ", "rank ", "host of rank "]).take(pa.array(is_rank + 2 * is_host))
        made = _joined(starts, _decimal(np.where(is_host, pids - HOST_PIDS, pids)))
        name = pc.coalesce(pa.array(map(self.named.processes.get, pids.tolist()), pa.string()), made)
        label = pa.array(map(self.named.labels.get, pids.tolist()), pa.string())
        name = pc.coalesce(_joined(name, " (", label, ")"), name)
        has_number = pa.array((pids >= 0) & (pids <= MOST_PID))
        return pc.if_else(has_number, packets.process(pids, name), packets.named(name))


@dataclass(frozen=True)
class Threads:
    """Threads, and further rows of these, whose slices would overlap."""

    pids: NDArray[np.int64]
    tids: NDArray[np.int64]
    levels: NDArray[np.int64]  # 0 for the thread itself
    of_device: NDArray[np.bool_]
    named: Names

    def messages(self, part: slice, parents: NDArray[np.int64]) -> Bytes:
        """Returns the descriptors of some of them, without their numbers. A parent of 0 is none."""
        pids, tids, levels = self.pids[part], self.tids[part], self.levels[part]
        starts = pa.array(["thread ", "device "]).take(pa.array(self.of_device[part].astype(np.int8)))
        keys = zip(pids.tolist(), tids.tolist(), strict=True)
        name = pc.coalesce(pa.array(map(self.named.threads.get, keys), pa.string()), _joined(starts, _decimal(tids)))
        row = pc.if_else(pa.array(levels > 0), _joined(" (row ", _decimal(levels + 1), ")"), "")
        name = _joined(name, row)
        has_number = (levels == 0) & (pids >= 0) & (pids <= MOST_PID) & (tids >= 0) & (tids <= _MOST_TID)
        what = pc.if_else(pa.array(has_number), packets.thread(pids, tids, name), packets.named(name))
        return columns.message([what, packets.below(parents)], len(name))


@dataclass(frozen=True)
class Counters:
    """Counters."""

    pids: NDArray[np.int64]
    names: pa.StringArray
    units: pa.StringArray

    def messages(self, part: slice, parents: NDArray[np.int64]) -> Bytes:
        """Returns the descriptors of some of them, without their numbers. A parent of 0 is none."""
        fields = [packets.named(self.names[part]), packets.below(parents), packets.counter(self.units[part])]
        return columns.message(fields, len(parents))


def write(threads: Threads, counters: Counters, processes: Processes, out: PacketWriter) -> NDArray[np.int64]:
    """Writes tracks, and before the first one of each process that of the process.

    Returns:
        int64[n], the numbers of the threads and then of the counters.
    """
    pids = np.concatenate([threads.pids, counters.pids])
    process, first = groups(pids)
    is_first = np.zeros(len(pids), bool)
    is_first[first] = pids[first] != EVERYWHERE
    place = np.arange(len(pids)) + np.cumsum(is_first)  # among all tracks
    numbers = out.number_tracks(len(pids) + int(is_first.sum()))
    parents = np.where(pids == EVERYWHERE, 0, numbers[place[first] - 1][process])
    kinds: tuple[_Tracks, ...] = (threads, counters)
    begin = 0
    for kind in kinds:
        for at in range(0, len(kind.pids), MOST_ROWS):
            part = slice(at, min(at + MOST_ROWS, len(kind.pids)))
            all_ = slice(begin + part.start, begin + part.stop)
            new = np.flatnonzero(is_first[all_])
            messages = [processes.messages(pids[all_][new]), kind.messages(part, parents[all_])]
            order = np.insert(len(new) + np.arange(part.stop - part.start), new, np.arange(len(new)))
            last = place[all_.stop - 1] + 1
            out.tracks(numbers[last - len(order) : last], [pa.concat_arrays(messages).take(pa.array(order))])
        begin += len(kind.pids)
    return np.asarray(numbers[place], np.int64)


def _decimal(numbers: NDArray[np.int64]) -> pa.StringArray:
    return pa.array(numbers).cast(pa.string())


def _joined(*parts: pa.StringArray | str) -> pa.StringArray:
    return pc.binary_join_element_wise(*parts, "")
