"""Stacks that BPF could not walk to their end: what it sent of each, and the record of one that was finished."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.launches import KEPT_SHIFT, MAX_DEPTH, PYTHON_STACK, stack_dtype
from iaprof.symbols.unwind.cfi import R12, R13, R14, R15, RBP, RBX, RETURN_ADDRESS, RSP
from iaprof.symbols.unwind.finishing import Finished, StackCopy
from iaprof.symbols.unwind.walk import PAGE, HowFound

MOST_FAILURES = 2  # of the child that finishes stacks, over those of one process

_START = (RETURN_ADDRESS, RSP, RBP, RBX, R12, R13, R14, R15)  # of COPY


@dataclass
class Miss:
    """A stack that is to be finished."""

    record: np.void  # COPY, the first that came
    pages: dict[int, bytes] = field(default_factory=dict)  # by address
    since: float = field(default_factory=time.monotonic)  # when it came

    @property
    def pid(self) -> int:
        """Whose it is."""
        return int(self.record["pid"])

    @property
    def is_sample(self) -> bool:
        """Whether it is of a CPU sample."""
        return bool(self.record["is_sample"])

    def add(self, record: np.void) -> bool:
        """Takes a COPY record of it; gives whether it was the last."""
        address = int(record["address"])
        if address:
            self.pages[address] = record["page"].tobytes()
        return not address

    @property
    def is_from_the_top(self) -> bool:
        """Whether what was copied begins where the probe was, not where BPF's walk ended, far above."""
        return int(self.record["depth"]) == 1 or (int(self.record["start"]["sp"]) & -PAGE) in self.pages

    def limit(self, depth: int) -> int:
        """How many addresses are wanted, of `depth` in all."""
        return depth if self.is_from_the_top else depth - int(self.record["depth"]) + 1

    def copy(self) -> StackCopy:
        """What the walk goes on from."""
        record = self.record
        if self.is_from_the_top:
            registers = dict(zip(_START, record["start"].tolist(), strict=True))
            return StackCopy(registers, HowFound.INTERRUPTED, self.pages)
        ip, sp, bp = (int(record[name]) for name in ("ip", "sp", "bp"))
        found = HowFound.INTERRUPTED if record["is_exact"] else HowFound.BY_RULE
        return StackCopy({RETURN_ADDRESS: ip, RSP: sp, RBP: bp}, found, self.pages)

    def finished(self, finished: Finished, depth: int) -> list[bytes]:
        """This stack when it is finished: a record of stack_dtype(depth), and before it PYTHON_STACK if that helps."""
        record = np.zeros((), stack_dtype(depth))
        for name in ("id", "time", "pid"):
            record[name] = self.record[name]
        record["depth"] = len(finished.ips)
        record["walked"] = finished.ending
        if not self.is_from_the_top:
            record["walked"] |= np.uint64(int(self.record["depth"]) - 1 << KEPT_SHIFT)
        record["ips"][: len(finished.ips)] = np.array(finished.ips, np.uint64)
        record["guessed"] = _bits(finished, HowFound.BY_GUESS)
        record["interrupted"] = _bits(finished, HowFound.INTERRUPTED)
        if not self.record["has_python"]:
            return [record.tobytes()]
        frames = np.zeros((), PYTHON_STACK)
        for name in ("id", "time", "pid"):
            frames[name] = self.record[name]
        frames["depth"] = len(finished.ips)
        frames["kept"] = 0 if self.is_from_the_top else int(self.record["depth"]) - 1
        frames["sp"] = self.record["start"]["sp"]
        frames["cfas"][: len(finished.cfas)] = np.array(finished.cfas, np.uint64)
        return [frames.tobytes(), record.tobytes()]

    def records(self) -> list[bytes]:
        """The COPY records of it."""
        records = np.repeat(self.record, len(self.pages))
        for record, (address, page) in zip(records, self.pages.items(), strict=True):
            record["address"], record["page"] = address, np.void(page)
        return [record.tobytes() for record in records]


class Waiting:
    """Misses that wait for their turn; processes take turns."""

    def __init__(self, most: int) -> None:
        """Args: how many; of more, the oldest one of the process with the most is left out."""
        self._most = most
        self._of: dict[int, deque[Miss]] = {}  # by process, the next one first

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, miss: Miss) -> Miss | None:
        """Puts it behind the others of its process; gives the one that is left out for it."""
        self._of.setdefault(miss.pid, deque()).append(miss)
        if sum(map(len, self._of.values())) <= self._most:
            return None
        pid = max(self._of, key=lambda pid: len(self._of[pid]))
        left_out = self._of[pid].popleft()
        if not self._of[pid]:
            del self._of[pid]
        return left_out

    def take(self) -> Miss:
        """Takes out the next one; there must be one."""
        pid = next(iter(self._of))
        queue = self._of.pop(pid)
        miss = queue.popleft()
        if queue:
            self._of[pid] = queue  # behind the other processes
        return miss

    def oldest(self) -> float:
        """When the one came that waits longest, time.monotonic(); inf if none waits."""
        return min((miss.since for queue in self._of.values() for miss in queue), default=math.inf)


def _bits(finished: Finished, wanted: HowFound) -> NDArray[np.uint64]:
    marked = np.zeros(MAX_DEPTH, bool)
    marked[: len(finished.how_found)] = np.array(finished.how_found) == wanted
    return np.packbits(marked, bitorder="little").view(np.uint64)
