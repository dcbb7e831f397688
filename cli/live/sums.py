"""Running sums of a recording's stalls and launches: memory that does not grow with its length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.launches import LaunchFlags
from iaprof.gpu.code import ADDRESS_MASK
from iaprof.report.join.streams import Stream

MOST_ADDRESSES = 200_000  # of instructions with stalls
MOST_LAUNCHES = 50_000  # distinct (kernel address, process)
_ADDRESS = np.uint64(ADDRESS_MASK)


class StallSums:
    """Samples by instruction address and reason."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        """Args: the reasons of all streams, in the order of the columns."""
        self.reasons = reasons
        self.address = np.empty(0, np.uint64)  # [n], ascending, as many bits as records hold
        self.counts = np.empty((0, len(reasons)), np.int64)  # [n, reasons]
        self.others = np.zeros(len(reasons), np.int64)  # samples of addresses that there is no room for
        self.records = 0  # stall records that were added
        self._new: list[tuple[NDArray[np.uint64], NDArray[np.int64]]] = []

    def add(self, stream: Stream, words: list[NDArray[np.uint64]]) -> None:
        """Adds records: columns of words, as SampleLayout takes them."""
        ips, number = np.unique(stream.layout.ips(words), return_inverse=True)
        counts = np.empty((len(ips), len(self.reasons)), np.int64)
        for at, reason in enumerate(self.reasons):
            counts[:, at] = np.bincount(number, stream.layout.counts(words, reason), len(ips))
        self._new.append((ips, counts * stream.subsample))
        self.records += len(number)

    def merge(self) -> None:
        """Adds up what came since the last call."""
        if not self._new:
            return
        addresses = np.concatenate([self.address, *(ips for ips, _ in self._new)])
        rows = np.concatenate([self.counts, *(counts for _, counts in self._new)])
        self._new = []
        self.address, number = np.unique(addresses, return_inverse=True)
        self.counts = np.stack(
            [np.bincount(number, rows[:, at], len(self.address)) for at in range(rows.shape[1])], axis=1
        ).astype(np.int64)
        if len(self.address) > MOST_ADDRESSES:
            kept = np.sort(np.argsort(-self.counts.sum(axis=1), kind="stable")[: MOST_ADDRESSES // 2])
            self.others += self.counts.sum(axis=0) - self.counts[kept].sum(axis=0)
            self.address, self.counts = self.address[kept], self.counts[kept]

    def clear(self) -> None:
        """Begins to count anew."""
        self.address, self.counts, self._new = self.address[:0], self.counts[:0], []
        self.others[:] = 0


@dataclass(slots=True)
class Launched:
    """A kernel that a process launches."""

    address: int  # canonical
    pid: int
    comm: str
    name: str  # as far as a launch record holds it; "" if unknown
    size: int  # bytes of code
    count: int = 0  # launches since the start
    recent: int = 0  # launches since the last refresh


class LaunchSums:
    """Launches by kernel and process."""

    def __init__(self) -> None:
        self.all: dict[tuple[int, int], Launched] = {}  # by address and pid, those launched last at the end

    def refresh(self) -> None:
        """Begins another refresh period."""
        for launched in self.all.values():
            launched.recent = 0

    def add(self, launches: NDArray[np.void]) -> None:
        """Adds LAUNCH[n]."""
        unwanted = LaunchFlags.BAD_ARGS | LaunchFlags.TRANSFER | LaunchFlags.CARRIED
        launches = launches[(launches["flags"] & unwanted) == 0]
        address = launches["address"] & _ADDRESS
        order = np.lexsort((launches["pid"], address))
        address, pid = address[order], launches["pid"][order]
        first = np.flatnonzero(np.r_[True, (address[1:] != address[:-1]) | (pid[1:] != pid[:-1])][: len(order)])
        times = 1 + launches["more"][order].astype(np.int64)
        counts = np.add.reduceat(times, first) if len(first) else times
        for row, count in zip(launches[order[first]], counts.tolist(), strict=True):  # few distinct ones
            key = int(row["address"]) & int(_ADDRESS), int(row["pid"])
            launched = self.all.pop(key, None)
            if launched is None or launched.size != int(row["size"]):
                launched = Launched(*key, _text(row["comm"]), _text(row["name"]), int(row["size"]))
            launched.count += count
            launched.recent += count
            self.all[key] = launched
        while len(self.all) > MOST_LAUNCHES:
            del self.all[next(iter(self.all))]


def _text(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")
