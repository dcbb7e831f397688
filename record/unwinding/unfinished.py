"""Stacks that BPF could not walk to their end, made of the copies that it sent, and the records of finished ones."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from iaprof.bpf.rule_table import MappingState
from iaprof.formats.wire.launches import COPIED, COPY, KEPT_SHIFT, MAX_DEPTH, PYTHON_STACK, stack_dtype
from iaprof.formats.wire.unwind_rules import RuleScope
from iaprof.symbols.unwind.cfi import RBP, RETURN_ADDRESS, RSP
from iaprof.symbols.unwind.finishing import PAGE, Finished, HowFound, StackCopy

MOST_FAILURES = 2  # of the child that finishes stacks, for one process


class Copied(NamedTuple):
    """The members of a COPIED record."""

    id: int
    time: int
    pid: int
    tid: int
    of: MappingState
    missed_path: int
    start: tuple[int, ...]  # registers
    ip: int
    sp: int
    bp: int
    start_stack: int
    depth: int
    is_exact: int
    is_sample: int
    has_python: int
    address: int

    @classmethod
    def from_record(cls, record: tuple[Any, ...]) -> Copied:
        """Takes COPIED's members as numpy's tolist() has them."""
        head = cls(*record)
        return head._replace(of=MappingState(*head.of))


@dataclass(slots=True)
class UnfinishedStack:
    """A stack whose memory BPF has copied for the learner to walk."""

    head: Copied  # the first record that came
    pages: dict[int, memoryview] = field(default_factory=dict)  # by address
    records: int = 0  # of its copy, that came
    since: float = field(default_factory=time.monotonic)  # time.monotonic() when it came
    is_complete: bool = False  # whether all of the copy came; BPF counts copies for which the ring buffer had no room

    @property
    def pid(self) -> int:
        """The stack's process."""
        return self.head.pid

    @property
    def is_sample(self) -> bool:
        """Whether the stack is of a CPU sample."""
        return bool(self.head.is_sample)

    def add(self, run: CopiedRun) -> None:
        """Adds records of its copy."""
        self.pages.update(run.pages)
        self.records += run.records
        self.is_complete = run.is_last

    @property
    def copies_key(self) -> int:
        """For which processes and stacks BPF counts copies: see copies_key in bpf/c/misses.c."""
        return self.head.pid | self.head.is_sample << 31

    @property
    def missed(self) -> tuple[int, int]:
        """The address for which BPF had no rule, and its RuleScope."""
        return self.head.ip, RuleScope.INSTRUCTION if self.head.is_exact else RuleScope.RETURN

    @property
    def begins_at_probe(self) -> bool:
        """Whether the copied memory begins at the probe, and not where BPF's walk ended."""
        return self.head.depth == 1 or (self.head.start[RSP] & -PAGE) in self.pages

    def limit(self, depth: int) -> int:
        """Returns how many addresses to find, of a stack of at most `depth`."""
        return depth if self.begins_at_probe else depth - self.head.depth + 1

    def copy(self) -> StackCopy:
        """Returns the registers and memory to start the walk with."""
        head = self.head
        if self.begins_at_probe:
            return StackCopy(dict(enumerate(head.start)), HowFound.INTERRUPTED, self.pages)
        found = HowFound.INTERRUPTED if head.is_exact else HowFound.BY_RULE
        return StackCopy({RETURN_ADDRESS: head.ip, RSP: head.sp, RBP: head.bp}, found, self.pages)

    def copies(self) -> list[bytes]:
        """Returns the stack's COPY records; none if some are missing, because then it would end where one is."""
        if not self.is_complete:
            return []
        records = np.repeat(np.array([self.head], COPIED), len(self.pages))
        records["address"] = list(self.pages)
        return [record.tobytes() + page for record, page in zip(records, self.pages.values(), strict=True)]


def finished_records(answered: Sequence[tuple[UnfinishedStack, Finished]], depth: int) -> list[bytes]:
    """Returns a record of stack_dtype(depth) for each finished stack, after a PYTHON_STACK if it has Python."""
    stacks, all_finished = [stack for stack, _ in answered], [finished for _, finished in answered]
    records = np.zeros(len(stacks), stack_dtype(depth))
    frames = np.zeros(len(stacks), PYTHON_STACK)
    kept = [0 if stack.begins_at_probe else stack.head.depth - 1 for stack in stacks]
    for columns in (records, frames):
        for name in ("id", "time", "pid"):
            columns[name] = [getattr(stack.head, name) for stack in stacks]
        columns["depth"] = [len(finished.ips) for finished in all_finished]
    records["walked"] = [of << KEPT_SHIFT | finished.ending for of, finished in zip(kept, all_finished, strict=True)]
    frames["kept"] = kept
    frames["sp"] = [stack.head.start[RSP] for stack in stacks]
    is_found_so = np.zeros((2, len(stacks), MAX_DEPTH), bool)
    for row, finished in enumerate(all_finished):
        count = len(finished.ips)
        records["ips"][row, :count] = finished.ips
        frames["cfas"][row, :count] = finished.cfas
        is_found_so[0, row, :count] = finished.how_found == HowFound.BY_GUESS
        is_found_so[1, row, :count] = finished.how_found == HowFound.INTERRUPTED
    records["guessed"], records["interrupted"] = np.packbits(is_found_so, axis=-1, bitorder="little").view(np.uint64)
    written: list[bytes] = []
    for row, stack in enumerate(stacks):
        written += [frames[row].tobytes()] if stack.head.has_python else []
        written.append(records[row].tobytes())
    return written


class StackQueue:
    """Unfinished stacks that wait for their turn; processes take turns."""

    def __init__(self, most: int) -> None:
        """Args: the most stacks; past it, the oldest stack of the process with most stacks is dropped."""
        self._most = most
        self._queues: dict[int, deque[UnfinishedStack]] = {}  # by process, in order
        self._count = 0
        self.pages = 0  # of all its stacks

    def __len__(self) -> int:
        return self._count

    def add(self, stack: UnfinishedStack) -> UnfinishedStack | None:
        """Adds a stack after the others of its process; returns the stack that is dropped for it."""
        self._queues.setdefault(stack.pid, deque()).append(stack)
        self._count += 1
        self.pages += len(stack.pages)
        if self._count <= self._most:
            return None
        pid = max(self._queues, key=lambda pid: len(self._queues[pid]))
        dropped = self._queues[pid].popleft()
        if not self._queues[pid]:
            del self._queues[pid]
        self._note_removed(dropped)
        return dropped

    def take(self, most: int) -> list[UnfinishedStack]:
        """Removes and returns the next stacks, at most so many, all of one process; there must be one."""
        pid = next(iter(self._queues))
        queue = self._queues.pop(pid)
        stacks = [queue.popleft() for _ in range(min(most, len(queue)))]
        self._note_removed(*stacks)
        if queue:
            self._queues[pid] = queue  # after the other processes
        return stacks

    def _note_removed(self, *stacks: UnfinishedStack) -> None:
        self._count -= len(stacks)
        self.pages -= sum(len(stack.pages) for stack in stacks)

    def oldest(self) -> float:
        """Returns when the oldest stack came, time.monotonic(); inf without stacks."""
        return min((queue[0].since for queue in self._queues.values()), default=math.inf)


@dataclass(frozen=True, slots=True)
class CopiedRun:
    """Successive COPY records of one stack."""

    head: Copied  # the first record
    records: int  # how many
    pages: dict[int, memoryview]  # by address
    is_last: bool  # whether the stack's copy ends with it


def copied_runs(records: NDArray[np.void]) -> list[CopiedRun]:
    """Divides COPY[n] where the stack changes; copies that CPUs send at once come in turns. Pages stay in `records`."""
    if not len(records):
        return []
    content = np.ascontiguousarray(records).view(np.uint8).data
    heads: NDArray[np.void] = np.ndarray(len(records), COPIED, content, 0, (COPY.itemsize,))
    ids, addresses = heads["id"], heads["address"].tolist()
    starts = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(records)]
    runs = []
    for (start, end), head in zip(pairwise(starts), heads[starts[:-1]].tolist(), strict=True):
        at = range(start * COPY.itemsize + COPIED.itemsize, end * COPY.itemsize, COPY.itemsize)
        pages = {
            address: content[page : page + PAGE]
            for address, page in zip(addresses[start:end], at, strict=True)
            if address
        }
        runs.append(CopiedRun(Copied.from_record(head), end - start, pages, not addresses[end - 1]))
    return runs
