"""The learner: a process that finishes the stacks BPF could not walk, and writes the missing rules.

It reads the ring buffer of copies, and sends finished stacks to the recorder: records of `stack_dtype` like BPF's, with
the ids of the unfinished stacks that BPF sent. A stack that it cannot finish stays as BPF sent it. Its children do
what can hang or be attacked: one opens files (record/kernels/collector_child.py), one reads their call frame
information (symbols/unwind/reader.py).
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
from iaprof.record.unwinding.copy_reader import CopyReader
from iaprof.record.unwinding.interpreters import Interpreters
from iaprof.record.unwinding.mappings import ImageGone, Images, Memory, executable, rights_of
from iaprof.record.unwinding.unfinished import MOST_FAILURES, StackQueue, UnfinishedStack
from iaprof.sandbox.deadline import patient_clock
from iaprof.symbols.unwind.code import Mapping
from iaprof.symbols.unwind.finishing import Finished, Finishing

MOST_WAITING = 256  # copies of launches' stacks in the queue; 64 KiB each
MOST_SAMPLES = 64  # copies of CPU samples' stacks in the queue; they wait until no launch's stack does
MOST_GUESSES = 1 << 16  # guessed rules, for code without call frame information, that are kept
MOST_PROCESSES = 512  # whose mappings are remembered
MOST_SPACES = (1 << 13) - 1  # space numbers of one learner, of 15 bits; a learner that replaces it has others
MOST_FAILURES_OF_A_USER = 8  # of the children, for all processes of one user
FORGET_FAILURES_S = 60.0  # after which failures, also of single processes, are forgotten
# The share of time for CPU samples' stacks: on a busy machine most come from new processes.
SAMPLES_SHARE, SAMPLES_MOST_S = 0.2, 1.0
SEARCH_SHARE, SEARCH_MOST_S = 0.2, 2.0  # the share of time for searching processes for interpreters
ENDING_S = 2.0  # for the queues, when the recording ends; copies of launches' stacks that are left are given back
STALE_S = 10.0  # after which the rest of a copy is not awaited any longer; its thread may be stopped in between
PRESUMED_NS = 1_000_000_000  # how long launches by a path without rules are presumed to have its last copied stack
READY = b"r"  # message: stacks can be finished
MISFIT = b"m"  # message: a copy had another length than COPY and was not read
SEARCH_REQUEST = struct.Struct("<I")  # request: search a process for an interpreter
SYNC = b"s"  # request: report when all stacks copied before are finished; and the answer
_TICKS_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass
class Process:
    """What is known of a process while its mappings are the same."""

    state: MappingState
    mappings: tuple[Mapping, ...]
    space: int


class Learner:
    """Finishes stacks and writes rules; `_serve` waits for work."""

    def __init__(self, table: RuleTable, spaces: Spaces, depth: int, first_space: int, pythons: int) -> None:
        """Begins without rules.

        Args:
            table: the rules in BPF; it stays the caller's.
            spaces: the processes in BPF; it stays the caller's.
            depth: the most addresses of a stack.
            first_space: the first number for spaces.
            pythons: descriptor of BPF's map of interpreters; it stays the caller's.
        """
        self._table, self._spaces, self._depth = table, spaces, depth
        self._opener = Opener()
        self._images = Images(self._opener)
        self._finishing = Finishing(self._images.open)
        self._interpreters = Interpreters(self._finishing, self._images, pythons)
        self._messages: list[bytes] = []  # about interpreters
        self._to_search: OrderedDict[int, None] = OrderedDict()  # processes that may have an interpreter
        self._search_budget = Budget(SEARCH_SHARE, SEARCH_MOST_S)
        self._incomplete: OrderedDict[int, UnfinishedStack] = OrderedDict()  # by id
        self._launches, self._samples = StackQueue(MOST_WAITING), StackQueue(MOST_SAMPLES)
        self._sample_budget = Budget(SAMPLES_SHARE, SAMPLES_MOST_S)
        self.is_ending = False  # nothing more comes, and the rest is finished without limits of time
        self._dropped: list[bytes] = []  # COPY records of launches' stacks for which there is no time
        self._processes: OrderedDict[int, Process] = OrderedDict()
        self._first_space = self._next_space = first_space
        self._numbers: OrderedDict[tuple[Mapping, ...], int] = OrderedDict()  # of spaces
        # Guessed rules, by space, address and scope.
        self._guesses: OrderedDict[tuple[int, int, RuleScope], Rule] = OrderedDict()
        self._failures: Counter[int] = Counter()  # by process
        self._user_failures: Counter[str] = Counter()  # by account
        self._failures_forgotten = patient_clock()

    def close(self) -> None:
        """Ends the children."""
        self._finishing.close()
        self._opener.close()

    def start(self) -> None:
        """Starts the child that finishes stacks, so that the first stack does not wait for it."""
        with contextlib.suppress(IaprofError):
            self._finishing.start()

    @property
    def poll_timeout_ms(self) -> float | None:
        """Milliseconds until there is work even if nothing comes; None if there is none."""
        if self.has_work:
            return 0.0
        waits_s = [self._sample_budget.wait_s] if self._samples else []
        waits_s += [self._search_budget.wait_s] if self._to_search else []
        waits_s += [STALE_S] if self._incomplete else []
        return 1000 * min(waits_s) if waits_s else None

    @property
    def has_work(self) -> bool:
        """Whether there is work now."""
        if self._dropped or self._messages or self._launches:
            return True
        return self._may_search or (bool(self._samples) and (self.is_ending or not self._sample_budget.wait_s))

    @property
    def _may_search(self) -> bool:
        """Whether a process is to be searched for an interpreter now."""
        return bool(self._to_search) and not self.is_ending and not self._search_budget.wait_s

    def has_finished(self, until: float) -> bool:
        """Whether no stack is waiting that came until then, time.monotonic()."""
        return min(self._launches.oldest(), self._samples.oldest()) > until

    def take(self, records: NDArray[np.void]) -> None:
        """Adds COPY[n]."""
        for record in records:  # some 17 for each path, which is copied once
            number = int(record["id"])
            if number not in self._incomplete:
                self._incomplete[number] = UnfinishedStack(record.copy())
            if self._incomplete[number].add(record):
                self._queue(self._incomplete.pop(number))
        # A copy's end that had no room in the ring buffer never comes.
        while self._incomplete and (
            len(self._incomplete) > MOST_WAITING
            or next(iter(self._incomplete.values())).since < time.monotonic() - STALE_S
        ):
            self._queue(self._incomplete.popitem(last=False)[1])

    def _queue(self, stack: UnfinishedStack) -> None:
        dropped = (self._samples if stack.is_sample else self._launches).add(stack)
        if dropped is not None and not dropped.is_sample:
            self._dropped += dropped.copies()

    def step(self) -> list[bytes]:
        """Does a piece of work, such as finishing one stack.

        Returns:
            Messages for the recorder: finished stacks; copies for it to finish at its end; interpreters; or nothing.
        """
        if self._messages:
            messages, self._messages = self._messages, []
            return messages
        if self._dropped:
            dropped, self._dropped = self._dropped, []
            return dropped
        if self._launches:
            return self._finish_or_give_back(self._launches.take())
        if self._may_search:
            with self._search_budget.spent():
                pid, _ = self._to_search.popitem(last=False)
                self._search_process(pid, executable(pid, self._images))
            return []
        with self._sample_budget.spent():
            return self._finish_or_give_back(self._samples.take())

    def rest(self) -> list[bytes]:
        """Returns the copies of launches' stacks that are left, as COPY records."""
        records, self._dropped = self._dropped, []
        while self._launches:
            records += self._launches.take().copies()
        return records

    def _finish_or_give_back(self, stack: UnfinishedStack) -> list[bytes]:
        pid = stack.pid
        if patient_clock() > self._failures_forgotten + FORGET_FAILURES_S:
            self._failures.clear()
            self._user_failures.clear()
            self._opener.forget_hangs()
            self._failures_forgotten = patient_clock()
        account = _account_of(pid)
        if self._has_failed(pid, account):
            return self._give_back(stack)
        try:
            finished = self._finish(pid, stack)
            is_cut = finished.ending is Walked.MEMORY and not stack.is_complete
            return [] if is_cut else stack.finished_records(finished, self._depth)
        except ImageGone:
            return stack.copies()
        except IaprofError:
            self._add_failures(pid, account)
            return self._give_back(stack)

    def _has_failed(self, pid: int, account: str) -> bool:
        """Whether a process is given up on: its files break the children."""
        return self._failures[pid] >= MOST_FAILURES or self._user_failures[account] >= MOST_FAILURES_OF_A_USER

    def _add_failures(self, pid: int, account: str, times: int = 1) -> None:
        self._failures[pid] += times
        self._user_failures[account] += times

    def _give_back(self, stack: UnfinishedStack) -> list[bytes]:
        """Returns the copies of a stack that failed: on a busy machine, a sound child may have been too slow."""
        return [] if stack.is_sample else stack.copies()

    def look_for_python(self, pid: int) -> None:
        """Has a process searched for an interpreter before its first launch, when no launch's stack is waiting."""
        if len(self._to_search) < MOST_PROCESSES:
            self._to_search[pid] = None

    def _search_process(self, pid: int, mappings: tuple[Mapping, ...]) -> None:
        account, failures = _account_of(pid), self._interpreters.failures
        if not self._has_failed(pid, account):
            self._messages += self._interpreters.search(pid, _born(pid) // _TICKS_NS, mappings)
            self._add_failures(pid, account, self._interpreters.failures - failures)

    def _finish(self, pid: int, stack: UnfinishedStack) -> Finished:
        """Finishes a stack, and writes its rules.

        Raises:
            ImageGone: the process is not what it was when the stack was copied.
            IaprofError: a child failed.
        """
        state = MappingState(*stack.record["of"].tolist())
        process = self._process(pid, state)
        finished = self._walk(process, pid, stack)
        if finished.met_unknown:
            # A JIT maps more memory for its code, which the kernel does not count as code if it is writable, too.
            mappings = executable(pid, self._images)
            if mappings and mappings != process.mappings:
                process = self._processes[pid] = Process(state, mappings, self._number(mappings))
                finished = self._walk(process, pid, stack)
        # Other code, or another program, may have been at these addresses.
        if self._spaces.loads(pid) != state.loads or finished.ending is Walked.NOWHERE:
            raise ImageGone
        self._write_rules(pid, process, stack, finished)
        return finished

    def _walk(self, process: Process, pid: int, stack: UnfinishedStack) -> Finished:
        limit, read_page = stack.limit(self._depth), Memory(pid).page
        return self._finishing.finish(process.space, process.mappings, stack.copy(), limit, read_page)

    def _process(self, pid: int, state: MappingState) -> Process:
        known = self._processes.get(pid)
        if known is not None and known.state == state:
            self._processes.move_to_end(pid)
            return known
        mappings = executable(pid, self._images)
        if not mappings or abs(_born(pid) - state.born) > _TICKS_NS:
            raise ImageGone
        process = self._processes[pid] = Process(state, mappings, self._number(mappings))
        self._search_process(pid, mappings)
        if len(self._processes) > MOST_PROCESSES:
            self._spaces.forget(self._processes.popitem(last=False)[0])
        return process

    def _number(self, mappings: tuple[Mapping, ...]) -> int:
        """Returns the number of a space: processes with equal mappings share one."""
        if mappings not in self._numbers:
            if self._next_space == self._first_space + MOST_SPACES:
                self._forget_spaces()
            self._numbers[mappings] = self._next_space
            self._next_space += 1
            if len(self._numbers) > MOST_PROCESSES:
                self._numbers.popitem(last=False)
        return self._numbers[mappings]

    def _forget_spaces(self) -> None:
        """Forgets all spaces, as all their numbers are used."""
        for pid in self._processes:
            self._spaces.forget(pid)
        self._processes.clear()
        self._numbers.clear()
        self._guesses.clear()
        self._table.clear()
        self._finishing.close()
        self._next_space = self._first_space

    def _grow(self) -> None:
        for pid in self._processes:
            self._spaces.forget(pid)
        self._table.grow()
        for pid, process in self._processes.items():
            self._spaces.set(pid, process.state, process.space, self._table.bits)

    def _write_rules(self, pid: int, process: Process, stack: UnfinishedStack, finished: Finished) -> None:
        confirmed = {place: self._confirmed(process.space, *place, rule) for place, rule in finished.rules.items()}
        rules = {place: rule for place, rule in confirmed.items() if rule is not None}
        for (address, scope), rule in rules.items():
            self._table.write(process.space, address, scope, rule)
        if self._table.is_crowded:
            self._grow()
        self._spaces.set(pid, process.state, process.space, self._table.bits)
        path = int(stack.record["missed_path"])
        leads = all(rule.kind is not RuleKind.HARD for rule in rules.values()) and (
            # Rules that switch to another stack, which was not copied, work in BPF from now on.
            finished.ending in (Walked.WHOLE, Walked.DEEP)
            or any(RuleFlags.OTHER_STACK in rule.flags for rule in rules.values())
        )
        if leads:
            self._spaces.walk_again(path)
        else:
            self._spaces.keep_stack(path, int(stack.record["id"]), time.monotonic_ns() + PRESUMED_NS)

    def _confirmed(self, space: int, address: int, scope: RuleScope, rule: Rule) -> Rule | None:
        """Returns a rule; in place of a guess that was not made twice alike, HARD, or None for a block.

        Guesses are rules found by searching the stack, and rules taken from other places in the same code.
        """
        is_of_block = scope is RuleScope.BLOCK
        if RuleFlags.GUESS not in rule.flags or (rule.kind is not RuleKind.BY_RSP and not is_of_block):
            return rule
        key = space, address, scope
        known = self._guesses.get(key)
        if known is None and len(self._guesses) >= MOST_GUESSES:
            self._guesses.popitem(last=False)
        self._guesses[key] = rule if known in (None, rule) else HARD  # frames there differ in size
        return rule if known == rule else None if is_of_block else HARD


def _account_of(pid: int) -> str:
    """Returns who is answerable for a process; an empty string if it has ended."""
    rights = rights_of(pid)
    return rights.answerable if rights is not None else ""


def _born(pid: int) -> int:
    """Returns when a process began, CLOCK_BOOTTIME ns; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return 0
    return int(stat[stat.rindex(b")") + 2 :].split()[19]) * _TICKS_NS


def main(settings: str) -> None:
    """Serves until the recorder shuts down its end of the socket, and then until nothing is left."""
    options = json.loads(settings)
    channel = socket.socket(fileno=0)
    ring = CopyReader(RingBuffer(options["copies"], options["copies_bytes"], COPY))
    table = RuleTable(options["rules"], options["bits"])
    spaces = Spaces(options["spaces"], options["loads"], options["missed_paths"])
    learner = Learner(table, spaces, options["depth"], 1 + options["starts"] * MOST_SPACES, options["pythons"])
    learner.start()
    with contextlib.suppress(ConnectionError):  # the recorder has ended without waiting for answers
        _serve(learner, ring, channel)
    learner.close()


def _serve(learner: Learner, ring: CopyReader, channel: socket.socket) -> None:
    channel.send(READY)
    poll = select.poll()
    poll.register(ring.fileno(), select.POLLIN)
    poll.register(channel, select.POLLIN)
    is_asked_to_report = is_closed = False
    asked_at, deadline = 0.0, math.inf
    while (learner.has_work or not is_closed) and time.monotonic() < deadline:
        ready = dict(poll.poll(0 if is_closed else learner.poll_timeout_ms))
        has_request = channel.fileno() in ready and not is_closed
        if has_request:
            message = channel.recv(SEARCH_REQUEST.size)
            if len(message) == SEARCH_REQUEST.size:
                learner.look_for_python(*SEARCH_REQUEST.unpack(message))
            is_asked_to_report = is_asked_to_report or message == SYNC
            is_closed = learner.is_ending = not message
            if is_closed:
                deadline = time.monotonic() + ENDING_S
        misfits = ring.misfits
        learner.take(ring.read())
        for _ in range(ring.misfits - misfits):
            channel.send(MISFIT)
        if has_request and message == SYNC:
            asked_at = time.monotonic()
        if learner.has_work:
            for message in learner.step():
                channel.send(message)
        if is_asked_to_report and learner.has_finished(asked_at):
            is_asked_to_report = False
            channel.send(SYNC)
    for message in learner.rest():
        channel.send(message)
