"""Stacks that BPF could not walk to their end, made of the copies that it sent, and the records of finished ones."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.wire.launches import COPIED, KEPT_SHIFT, MAX_DEPTH, PYTHON_STACK, stack_dtype
from iaprof.formats.wire.unwind_rules import RuleScope
from iaprof.symbols.unwind.cfi import RBP, RETURN_ADDRESS, RSP
from iaprof.symbols.unwind.finishing import PAGE, Finished, HowFound, StackCopy

MOST_FAILURES = 2  # of the child that finishes stacks, for one process


@dataclass
class UnfinishedStack:
    """A stack whose memory BPF has copied for the learner to walk."""

    record: np.void  # COPIED: the first record that came, without its page
    pages: dict[int, bytes | memoryview] = field(default_factory=dict)  # by address
    since: float = field(default_factory=time.monotonic)  # time.monotonic() when it came
    is_complete: bool = False  # whether all of the copy came; BPF counts copies for which the ring buffer had no room

    @property
    def pid(self) -> int:
        """The stack's process."""
        return int(self.record["pid"])

    @property
    def is_sample(self) -> bool:
        """Whether the stack is of a CPU sample."""
        return bool(self.record["is_sample"])

    def add(self, records: NDArray[np.void]) -> bool:
        """Adds COPY[n] of the stack, in order; returns whether the last one was the stack's last."""
        addresses, content = records["address"].tolist(), memoryview(records["page"].tobytes())
        for number, address in enumerate(addresses):
            if address:
                self.pages[address] = content[PAGE * number : PAGE * (number + 1)]
        self.is_complete = not addresses[-1]
        return self.is_complete

    @classmethod
    def of(cls, records: NDArray[np.void]) -> UnfinishedStack:
        """Begins a stack with the first of COPY[n]."""
        return cls(np.frombuffer(records[:1].tobytes(), COPIED, 1)[0])

    @property
    def unloads(self) -> int:
        """How often the process had unmapped libraries; see MAPPING_STATE."""
        return int(self.record["of"]["unloads"])

    @property
    def copies_key(self) -> int:
        """For which processes and stacks BPF counts copies: see copies_key in bpf/c/misses.c."""
        return self.pid | self.is_sample << 31

    @property
    def missed(self) -> tuple[int, int]:
        """The address for which BPF had no rule, and its RuleScope."""
        return int(self.record["ip"]), RuleScope.INSTRUCTION if self.record["is_exact"] else RuleScope.RETURN

    @property
    def begins_at_probe(self) -> bool:
        """Whether the copied memory begins at the probe, and not where BPF's walk ended."""
        return int(self.record["depth"]) == 1 or (int(self.record["start"]["sp"]) & -PAGE) in self.pages

    def limit(self, depth: int) -> int:
        """Returns how many addresses to find, of a stack of at most `depth`."""
        return depth if self.begins_at_probe else depth - int(self.record["depth"]) + 1

    def copy(self) -> StackCopy:
        """Returns the registers and memory to start the walk with."""
        record = self.record
        if self.begins_at_probe:
            registers = dict(enumerate(record["start"].tolist()))
            return StackCopy(registers, HowFound.INTERRUPTED, self.pages)
        ip, sp, bp = (int(record[name]) for name in ("ip", "sp", "bp"))
        found = HowFound.INTERRUPTED if record["is_exact"] else HowFound.BY_RULE
        return StackCopy({RETURN_ADDRESS: ip, RSP: sp, RBP: bp}, found, self.pages)

    def finished_records(self, finished: Finished, depth: int) -> list[bytes]:
        """Returns a record of stack_dtype(depth) for the finished stack, after a PYTHON_STACK if it has Python."""
        record = np.zeros((), stack_dtype(depth))
        for name in ("id", "time", "pid"):
            record[name] = self.record[name]
        record["depth"] = len(finished.ips)
        record["walked"] = finished.ending
        if not self.begins_at_probe:
            record["walked"] |= np.uint64(int(self.record["depth"]) - 1 << KEPT_SHIFT)
        record["ips"][: len(finished.ips)] = finished.ips
        record["guessed"] = _bits(finished, HowFound.BY_GUESS)
        record["interrupted"] = _bits(finished, HowFound.INTERRUPTED)
        if not self.record["has_python"]:
            return [record.tobytes()]
        frames = np.zeros((), PYTHON_STACK)
        for name in ("id", "time", "pid"):
            frames[name] = self.record[name]
        frames["depth"] = len(finished.ips)
        frames["kept"] = 0 if self.begins_at_probe else int(self.record["depth"]) - 1
        frames["sp"] = self.record["start"]["sp"]
        frames["cfas"][: len(finished.cfas)] = finished.cfas
        return [frames.tobytes(), record.tobytes()]

    def copies(self) -> list[bytes]:
        """Returns the stack's COPY records; none if some are missing, because then it would end where one is."""
        if not self.is_complete:
            return []
        records = np.repeat(self.record, len(self.pages))
        records["address"] = list(self.pages)
        return [record.tobytes() + page for record, page in zip(records, self.pages.values(), strict=True)]


class StackQueue:
    """Unfinished stacks that wait for their turn; processes take turns."""

    def __init__(self, most: int) -> None:
        """Args: the most stacks; past it, the oldest stack of the process with most stacks is dropped."""
        self._most = most
        self._queues: dict[int, deque[UnfinishedStack]] = {}  # by process, in order
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, stack: UnfinishedStack) -> UnfinishedStack | None:
        """Adds a stack after the others of its process; returns the stack that is dropped for it."""
        self._queues.setdefault(stack.pid, deque()).append(stack)
        self._count += 1
        if self._count <= self._most:
            return None
        self._count -= 1
        pid = max(self._queues, key=lambda pid: len(self._queues[pid]))
        dropped = self._queues[pid].popleft()
        if not self._queues[pid]:
            del self._queues[pid]
        return dropped

    def take(self, most: int) -> list[UnfinishedStack]:
        """Removes and returns the next stacks, at most so many, all of one process; there must be one."""
        pid = next(iter(self._queues))
        queue = self._queues.pop(pid)
        stacks = [queue.popleft() for _ in range(min(most, len(queue)))]
        self._count -= len(stacks)
        if queue:
            self._queues[pid] = queue  # after the other processes
        return stacks

    def oldest(self) -> float:
        """Returns when the oldest stack came, time.monotonic(); inf without stacks."""
        return min((queue[0].since for queue in self._queues.values()), default=math.inf)


def _bits(finished: Finished, how: HowFound) -> NDArray[np.uint64]:
    is_so = finished.how_found == how
    if not is_so.any():
        return np.zeros(MAX_DEPTH // 64, np.uint64)
    is_found_so = np.zeros(MAX_DEPTH, bool)
    is_found_so[: len(is_so)] = is_so
    return np.packbits(is_found_so, bitorder="little").view(np.uint64)


def grouped(records: NDArray[np.void]) -> list[NDArray[np.void]]:
    """Divides COPY[n] where the stack changes; copies that CPUs send at once come in turns."""
    ids = records["id"]
    return np.split(records, np.flatnonzero(ids[1:] != ids[:-1]) + 1) if len(records) else []
