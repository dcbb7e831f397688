"""The learner: a process that finishes the stacks that BPF could not walk, and writes the rules that were missing.

It reads the ring buffer of copies, and sends finished stacks to the recorder, as records of `stack_dtype` like those of
BPF; a finished one has the id of the one that BPF sent unfinished. A stack that it cannot finish stays as BPF sent it.
What could hang or be attacked is done by its children: one opens files (record/kernels/collector_child.py), one reads
their call frame information (symbols/unwind/reader.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import struct
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.bpf.ringbuffer import RingBuffer
from iaprof.bpf.rule_table import MappingState, RuleTable, Spaces
from iaprof.formats.wire.launches import COPY
from iaprof.formats.wire.unwind_rules import HARD, Rule, RuleFlags, RuleKind, RuleScope, Walked
from iaprof.record.symbolize.opener import Opener
from iaprof.record.unwinding.budget import Budget
from iaprof.record.unwinding.interpreters import Interpreters
from iaprof.record.unwinding.mappings import ImageGone, Images, Memory, executable, rights_of
from iaprof.record.unwinding.misses import MOST_FAILURES, Miss, Waiting
from iaprof.symbols.unwind.code import Mapping
from iaprof.symbols.unwind.finishing import Finished, Finishing

MOST_WAITING = 256  # copies of launches' stacks that wait for their turn; 64 KiB each
MOST_SAMPLES = 64  # and of CPU samples', which wait until no launch's does
MOST_SEARCHED = 1 << 16  # addresses of code without call frame information, of which it is remembered what was found
MOST_PROCESSES = 512  # that are remembered with their mappings
MOST_SPACES = (1 << 13) - 1  # numbers of one learner, of 15 bits; another one that takes its place has others
MOST_FAILURES_OF_A_USER = 8  # of the children, over the stacks of all of a user's processes
FORGIVEN_S = 60.0  # after which failures, those of one process too, count no more
# Of the time, for CPU samples' stacks: on a busy machine most come from new processes.
SAMPLES_SHARE, SAMPLES_MOST_S = 0.2, 1.0
LOOKS_SHARE, LOOKS_MOST_S = 0.2, 2.0  # of the time, for looking into processes for interpreters
ENDING_S = 2.0  # when the recording ends, for what waits; launches' copies that wait longer are given back
STALE_S = 1.0  # after which a copy is as whole as it gets
STAYS_NS = 1_000_000_000  # for how long launches of a path that has no rules get the stack of its last copy
READY = b"r"  # a message: stacks can be finished
MISFIT = b"m"  # a message: a copy had another length than COPY and was not read
LOOK = struct.Struct("<I")  # the request to look for an interpreter in a process
SYNC = b"s"  # the question whether all that were copied before are finished, and the answer that they are
_TICKS_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass
class Process:
    """What is known of a process, as long as its mappings stay as they are."""

    generation: MappingState
    mappings: tuple[Mapping, ...]
    space: int


class Learner:
    """All of it but the waiting."""

    def __init__(self, table: RuleTable, spaces: Spaces, depth: int, first_space: int, pythons: int) -> None:
        """Begins with nothing learnt.

        Args:
            table: the rules; it stays the caller's.
            spaces: of processes; likewise.
            depth: addresses that a stack can have at most.
            first_space: from which number on it numbers spaces.
            pythons: the descriptor of the map of interpreters; likewise.
        """
        self._table, self._spaces, self._depth = table, spaces, depth
        self._opener = Opener()
        self._images = Images(self._opener)
        self._finishing = Finishing(self._images.open)
        self._interpreters = Interpreters(self._finishing, self._images, pythons)
        self._found: list[bytes] = []  # messages about interpreters
        self._to_look: OrderedDict[int, None] = OrderedDict()  # processes, in which one may be
        self._for_looks = Budget(LOOKS_SHARE, LOOKS_MOST_S)
        self._coming: OrderedDict[int, Miss] = OrderedDict()  # by id
        self._launches, self._samples = Waiting(MOST_WAITING), Waiting(MOST_SAMPLES)
        self._for_samples = Budget(SAMPLES_SHARE, SAMPLES_MOST_S)
        self.is_ending = False  # nothing more comes, and what waits is finished without regard to the time
        self._left_out: list[bytes] = []  # COPY records of launches' stacks for which there is no time
        self._processes: OrderedDict[int, Process] = OrderedDict()
        self._first_space = self._next_space = first_space
        self._numbers: OrderedDict[tuple[Mapping, ...], int] = OrderedDict()  # of spaces
        # What searches of the stack found, by space, address and scope.
        self._searched: OrderedDict[tuple[int, int, RuleScope], Rule] = OrderedDict()
        self._failures: Counter[int] = Counter()  # by process
        self._failures_of: Counter[int] = Counter()  # by user
        self._forgiven = time.monotonic()

    def close(self) -> None:
        """Ends the children."""
        self._finishing.close()
        self._opener.close()

    def start(self) -> None:
        """Starts what the first stack would have to wait for."""
        with contextlib.suppress(IaprofError):
            self._finishing.start()

    @property
    def patience_ms(self) -> float | None:
        """For how long nothing has to be done if nothing comes; None for ever."""
        if self.waits:
            return 0.0
        waits_s = [self._for_samples.wait_s] if self._samples else []
        waits_s += [self._for_looks.wait_s] if self._to_look else []
        waits_s += [STALE_S] if self._coming else []
        return 1000 * min(waits_s) if waits_s else None

    @property
    def waits(self) -> bool:
        """Whether there is something to do now."""
        if self._left_out or self._found or self._launches:
            return True
        return self._may_look or (bool(self._samples) and (self.is_ending or not self._for_samples.wait_s))

    @property
    def _may_look(self) -> bool:
        """Whether it is time to look for an interpreter."""
        return bool(self._to_look) and not self.is_ending and not self._for_looks.wait_s

    def is_done_with(self, until: float) -> bool:
        """Whether nothing waits that came until then, time.monotonic()."""
        return min(self._launches.oldest(), self._samples.oldest()) > until

    def take(self, records: NDArray[np.void]) -> None:
        """Takes COPY[n]."""
        for record in records:  # a path has some 17 of them, and comes but once
            number = int(record["id"])
            if number not in self._coming:
                self._coming[number] = Miss(record.copy())
            if self._coming[number].add(record):
                self._queue(self._coming.pop(number))
        # The end of a copy for which there was no room never comes.
        while self._coming and (
            len(self._coming) > MOST_WAITING or next(iter(self._coming.values())).since < time.monotonic() - STALE_S
        ):
            self._queue(self._coming.popitem(last=False)[1])

    def _queue(self, miss: Miss) -> None:
        left_out = (self._samples if miss.is_sample else self._launches).add(miss)
        if left_out is not None and not left_out.is_sample:
            self._left_out += left_out.records()

    def next(self) -> list[bytes]:
        """Finishes one stack.

        Returns:
            A record of stack_dtype; or copies, as COPY records, for the recording's end to finish; or nothing.
        """
        if self._found:
            found, self._found = self._found, []
            return found
        if self._left_out:
            left_out, self._left_out = self._left_out, []
            return left_out
        if self._launches:
            return self._answer(self._launches.take())
        if self._may_look:
            with self._for_looks.spent():
                pid, _ = self._to_look.popitem(last=False)
                self._look(pid, executable(pid, self._images))
            return []
        with self._for_samples.spent():
            return self._answer(self._samples.take())

    def rest(self) -> list[bytes]:
        """Gives back the copies of unfinished stacks of launches, as COPY records, also those without their end."""
        records, self._left_out = self._left_out, []
        unfinished = [miss for miss in self._coming.values() if not miss.is_sample]
        self._coming.clear()
        while self._launches:
            unfinished.append(self._launches.take())
        return records + [record for miss in unfinished for record in miss.records()]

    def _answer(self, miss: Miss) -> list[bytes]:
        pid = miss.pid
        if time.monotonic() > self._forgiven + FORGIVEN_S:
            self._failures.clear()
            self._failures_of.clear()
            self._opener.forgive()
            self._forgiven = time.monotonic()
        uid = _user_of(pid)
        if self._has_failed(pid, uid):
            return self._left(miss)
        try:
            return miss.finished(self._finish(pid, miss), self._depth)
        except ImageGone:
            return miss.records()
        except IaprofError:
            self._failed(pid, uid)
            return self._left(miss)

    def _has_failed(self, pid: int, uid: int) -> bool:
        """Whether nothing more is done for a process, as what it has breaks the children."""
        return self._failures[pid] >= MOST_FAILURES or self._failures_of[uid] >= MOST_FAILURES_OF_A_USER

    def _failed(self, pid: int, uid: int, times: int = 1) -> None:
        self._failures[pid] += times
        self._failures_of[uid] += times

    def _left(self, miss: Miss) -> list[bytes]:
        """What could not be finished now: a child that hardly gets to run looks as if it was broken."""
        return [] if miss.is_sample else miss.records()

    def look_for_python(self, pid: int) -> None:
        """Has one looked for in a process that has not launched anything yet, when no launch's stack waits."""
        if len(self._to_look) < MOST_PROCESSES:
            self._to_look[pid] = None

    def _look(self, pid: int, mappings: tuple[Mapping, ...]) -> None:
        uid, failures = _user_of(pid), self._interpreters.failures
        if not self._has_failed(pid, uid):
            self._found += self._interpreters.look(pid, _born(pid) // _TICKS_NS, mappings)
            self._failed(pid, uid, self._interpreters.failures - failures)

    def _finish(self, pid: int, miss: Miss) -> Finished:
        """Raises ImageGone if the process is not any more what it was, other errors if something failed."""
        generation = MappingState(*miss.record["of"].tolist())
        process = self._process(pid, generation)
        finished = self._walk(process, pid, miss)
        if finished.met_unknown:
            # A JIT maps more memory for its code. What can be written, too, the kernel does not count as code.
            mappings = executable(pid, self._images)
            if mappings and mappings != process.mappings:
                process = self._processes[pid] = Process(generation, mappings, self._number(mappings))
                finished = self._walk(process, pid, miss)
        # Other code may have been at these addresses, or another program.
        if self._spaces.loads(pid) != generation.loads or finished.ending is Walked.NOWHERE:
            raise ImageGone
        self._teach(pid, process, miss, finished)
        return finished

    def _walk(self, process: Process, pid: int, miss: Miss) -> Finished:
        limit, read_page = miss.limit(self._depth), Memory(pid).page
        return self._finishing.finish(process.space, process.mappings, miss.copy(), limit, read_page)

    def _process(self, pid: int, generation: MappingState) -> Process:
        known = self._processes.get(pid)
        if known is not None and known.generation == generation:
            self._processes.move_to_end(pid)
            return known
        mappings = executable(pid, self._images)
        if not mappings or abs(_born(pid) - generation.born) > _TICKS_NS:
            raise ImageGone
        process = self._processes[pid] = Process(generation, mappings, self._number(mappings))
        self._look(pid, mappings)
        if len(self._processes) > MOST_PROCESSES:
            self._spaces.forget(self._processes.popitem(last=False)[0])
        return process

    def _number(self, mappings: tuple[Mapping, ...]) -> int:
        """The number of a space: processes with the same mappings share one."""
        if mappings not in self._numbers:
            if self._next_space == self._first_space + MOST_SPACES:
                self._begin_anew()
            self._numbers[mappings] = self._next_space
            self._next_space += 1
            if len(self._numbers) > MOST_PROCESSES:
                self._numbers.popitem(last=False)
        return self._numbers[mappings]

    def _begin_anew(self) -> None:
        """All numbers of spaces were used: no process keeps one."""
        for pid in self._processes:
            self._spaces.forget(pid)
        self._processes.clear()
        self._numbers.clear()
        self._searched.clear()
        self._table.clear()
        self._finishing.close()
        self._next_space = self._first_space

    def _grow(self) -> None:
        for pid in self._processes:
            self._spaces.forget(pid)
        self._table.grow()
        for pid, process in self._processes.items():
            self._spaces.set(pid, process.generation, process.space, self._table.bits)

    def _teach(self, pid: int, process: Process, miss: Miss, finished: Finished) -> None:
        judged = {of: self._sure(process.space, *of, rule) for of, rule in finished.rules.items()}
        rules = {of: rule for of, rule in judged.items() if rule is not None}
        for (address, scope), rule in rules.items():
            self._table.write(process.space, address, scope, rule)
        if self._table.is_crowded:
            self._grow()
        self._spaces.set(pid, process.generation, process.space, self._table.bits)
        path = int(miss.record["missed_path"])
        leads = all(rule.kind is not RuleKind.HARD for rule in rules.values()) and (
            # What leads to another stack, which was not copied, does so in BPF from now on.
            finished.ending in (Walked.WHOLE, Walked.DEEP)
            or any(RuleFlags.OTHER_STACK in rule.flags for rule in rules.values())
        )
        if leads:
            self._spaces.walk_again(path)
        else:
            self._spaces.keep_stack(path, int(miss.record["id"]), time.monotonic_ns() + STAYS_NS)

    def _sure(self, space: int, address: int, scope: RuleScope, rule: Rule) -> Rule | None:
        """The rule; HARD, or none for a block, if it is a guess that was not made twice alike.

        That is what the stack was searched for, and what was found elsewhere in the same code.
        """
        is_of_block = scope is RuleScope.BLOCK
        if RuleFlags.GUESS not in rule.flags or (rule.kind is not RuleKind.BY_RSP and not is_of_block):
            return rule
        of = space, address, scope
        known = self._searched.get(of)
        if known is None and len(self._searched) >= MOST_SEARCHED:
            self._searched.popitem(last=False)
        self._searched[of] = rule if known in (None, rule) else HARD  # frames there are not always of one size
        return rule if known == rule else None if is_of_block else HARD


def _user_of(pid: int) -> int:
    """Whose a process is; -1 if it has ended."""
    rights = rights_of(pid)
    return rights.uid if rights is not None else -1


def _born(pid: int) -> int:
    """When a process began, CLOCK_BOOTTIME ns; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return 0
    return int(stat[stat.rindex(b")") + 2 :].split()[19]) * _TICKS_NS


def main(settings: str) -> None:
    """Serves until the recorder shuts its end of the socket, and then until nothing is left."""
    given = json.loads(settings)
    channel = socket.socket(fileno=0)
    ring = RingBuffer(given["copies"], given["copies_bytes"], COPY)
    table = RuleTable(given["rules"], given["bits"])
    spaces = Spaces(given["spaces"], given["loads"], given["missed_paths"])
    learner = Learner(table, spaces, given["depth"], 1 + given["starts"] * MOST_SPACES, given["pythons"])
    learner.start()
    with contextlib.suppress(ConnectionError):  # the recorder ended without waiting for what it had asked for
        _serve(learner, ring, channel)
    learner.close()


def _serve(learner: Learner, ring: RingBuffer, channel: socket.socket) -> None:
    channel.send(READY)
    poll = select.poll()
    poll.register(ring.fileno(), select.POLLIN)
    poll.register(channel, select.POLLIN)
    is_asked = is_over = False
    asked, deadline = 0.0, math.inf
    while (learner.waits or not is_over) and time.monotonic() < deadline:
        ready = dict(poll.poll(0 if is_over else learner.patience_ms))
        is_told = channel.fileno() in ready and not is_over
        if is_told:
            message = channel.recv(LOOK.size)
            if len(message) == LOOK.size:
                learner.look_for_python(*LOOK.unpack(message))
            is_asked = is_asked or message == SYNC
            is_over = learner.is_ending = not message
            if is_over:
                deadline = time.monotonic() + ENDING_S
        misfits = ring.misfits
        learner.take(ring.read())
        for _ in range(ring.misfits - misfits):
            channel.send(MISFIT)
        if is_told and message == SYNC:
            asked = time.monotonic()
        if learner.waits:
            for message in learner.next():
                channel.send(message)
        if is_asked and learner.is_done_with(asked):
            is_asked = False
            channel.send(SYNC)
    for message in learner.rest():
        channel.send(message)
