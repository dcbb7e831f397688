"""The learner: a process that finishes the stacks BPF could not walk, and writes the missing rules.

It reads the ring buffer of copies, and sends finished stacks to the recorder: records of `stack_dtype` like BPF's, with
the ids of the unfinished stacks that BPF sent. A stack that it cannot finish stays as BPF sent it. Its children do
what can hang or be attacked: one opens files (record/kernels/collector_child.py), one reads their call frame
information (symbols/unwind/reader.py).

Rules come first: while a rule is missing, BPF copies the stack of each launch that needs it, so whatever delays the
learner costs the programs. It gives copies back to the recorder only when no stack is waiting, and only so many.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import select
import socket
import struct
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.basics.heap import take_in_advance
from iaprof.bpf.maps import MOST_RECORDS, RingBuffer
from iaprof.bpf.processes import TICK_NS, beginning, born_ns
from iaprof.bpf.rule_table import MappingState, RuleTable, Spaces
from iaprof.formats.wire.launches import COPY, COPY_PAGES
from iaprof.formats.wire.unwind_rules import HARD, Rule, RuleFlags, RuleKind, RuleScope, Walked
from iaprof.record.symbolize.opener import Opener
from iaprof.record.unwinding.interpreters import Interpreters
from iaprof.record.unwinding.mappings import ImageGone, Images, Memory, executable, rights_of
from iaprof.record.unwinding.unfinished import (
    MOST_FAILURES,
    Copied,
    StackQueue,
    UnfinishedStack,
    copied_runs,
    finished_records,
)
from iaprof.sandbox.deadline import patient_clock
from iaprof.sandbox.worker import Closing
from iaprof.symbols.unwind.finishing import PAGE, Finished, Finishing, Mapping


class Budget:
    """What may be used of something, such as time: so much each second; what is not used adds up to at most `most`."""

    def __init__(self, rate: float, most: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins with `most`."""
        self._rate, self._most, self._clock = rate, most, clock
        self._left, self._at = most, clock()

    @property
    def wait_s(self) -> float:
        """Seconds until something is left; 0 if it is now."""
        now = self._clock()
        self._left = min(self._left + self._rate * (now - self._at), self._most)
        self._at = now
        return max(0.0, -self._left / self._rate)

    def spend(self, amount: float) -> None:
        """Counts an amount as spent; it may be more than is left."""
        self._left -= amount

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """Counts the time of the `with` block as spent."""
        began = self._clock()
        try:
            yield
        finally:
            self.spend(self._clock() - began)


MOST_WAITING = 8192  # copies of launches' stacks in a queue, and pages of those in all before no more are read
MOST_INCOMPLETE = 1024  # copies of which records are missing; at most 64 KiB each
MOST_AT_ONCE = 16  # stacks of a process that are finished together
SAMPLES_WAIT_S = 0.25  # for further ones of CPU samples, as each message to the child takes longer than a stack
SAMPLES_POLL_S = 0.25  # BPF wakes the learner for one of 16 of their copies
MOST_READ = 8 * (COPY_PAGES + 1)  # COPY records that are read at once: of at least 8 copies, 4 of CPU samples
KEPT_BYTES = 16 << 20  # of memory, for copies
MOST_GIVEN_BACK_BYTES = 8 << 20  # of copies for the recording's end, of one process, of launches or of CPU samples
# Of those of CPU samples, in all: of a process that ended before its mappings were read, they are few pages each.
SAMPLES_BYTES_A_SECOND, SAMPLES_MOST_BYTES = 1 << 20, 16 << 20
MOST_UNSENT_BYTES = 32 << 20  # of copies to be given back, as long as launches' stacks wait
MOST_SAMPLES = 256  # copies of CPU samples' stacks in the queue, of at most 128 KiB; they wait for those of launches
MOST_GUESSES = 1 << 16  # guessed rules, for code without call frame information, that are kept
MOST_PROCESSES = 512  # whose mappings are remembered
MOST_EARLIER = 64  # earlier mappings of processes that have unmapped code since
MOST_WRITTEN = 1 << 17  # rules of one space that are remembered, so that none is written again and again
MOST_ANSWERS = 1 << 11  # of the child, whose rules were all written; a few KiB each
_HARD = HARD.pack()
_FLAGS, _GUESS = 56, int(RuleFlags.GUESS)  # where a packed rule has its flags, and one of them
MOST_SPACES = (1 << 13) - 1  # space numbers of one learner, of 15 bits; a learner that replaces it has others
MOST_FAILURES_OF_A_USER = 8  # of the children, for all processes of one user
FORGET_FAILURES_S = 60.0  # after which failures, also of single processes, are forgotten
# The share of time for CPU samples' stacks: on a busy machine most come from new processes.
SAMPLES_SHARE, SAMPLES_MOST_S = 0.2, 1.0
LOOK_SHARE, LOOK_MOST_S = 0.1, 0.5  # the share of time for reading the mappings of processes that may end soon
SEARCH_SHARE, SEARCH_MOST_S = 0.2, 2.0  # the share of time for searching processes for interpreters
ENDING_S = 2.0  # for the queues, when the recording ends; copies that are left are given back
STALE_S = 10.0  # after which the rest of a copy is not awaited any longer; its thread may be stopped in between
PRESUMED_NS = 1_000_000_000  # how long launches by a path without rules are presumed to have its last copied stack
READY = b"r"  # message: stacks can be finished
MISFIT = b"m"  # message: a copy had another length than COPY and was not read
DROPPED = struct.Struct("<cI")  # message: DROPPED_MARK, and how many copies were neither finished nor given back
DROPPED_MARK = b"d"
_NO_SPACE = 0  # of a process that has ended
_NO_COPIES = 1 << 63  # in place of the number of answered records: BPF sends no more
PREPARE_REQUEST = struct.Struct("<I?")  # request: search a process for an interpreter, and open all its files or not
_LONGEST_SETTINGS, _MOST_MAPS = 1 << 12, 16  # of the recorder's first message: JSON, and descriptors of BPF maps
SYNC = b"s"  # request: report when all stacks copied before are finished; and the answer


@dataclass
class Process:
    """What is known of a process while it unmaps no code."""

    state: MappingState
    mappings: tuple[Mapping, ...]
    number: int  # of these mappings, for the child that finishes stacks
    space: int  # of its rules; _NO_SPACE for none

    def is_as(self, state: MappingState) -> bool:
        """Whether it has unmapped no code since a state, or before it."""
        return state._replace(exec_vm=0) == self.state._replace(exec_vm=0)


class Readers(Closing):
    """The learner's children; also a context manager."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self.opener = Opener()
        self.images = Images(self.opener)
        self.finishing = Finishing(self.images.open)

    def start(self) -> None:
        """Starts the children, so that the first stack does not wait for them."""
        with contextlib.suppress(IaprofError, OSError):
            self.opener.start()
            self.finishing.start()

    def close(self) -> None:
        """Ends the children."""
        self.finishing.close()
        self.opener.close()


class Learner:
    """Finishes stacks and writes rules; `_serve` waits for work."""

    def __init__(self, table: RuleTable, spaces: Spaces, depth: int, first_space: int, readers: Readers) -> None:
        """Begins without rules.

        Args:
            table: the rules in BPF; it stays the caller's.
            spaces: the processes in BPF; it stays the caller's.
            depth: the most addresses of a stack.
            first_space: the first number for spaces.
            readers: the children; they stay the caller's.
        """
        self._table, self._spaces, self._depth = table, spaces, depth
        self._opener, self._images, self._finishing = readers.opener, readers.images, readers.finishing
        self._interpreters = Interpreters(self._finishing, self._images, spaces)
        self._messages: list[bytes] = []  # about interpreters
        # Processes that may have an interpreter, and whether they will launch.
        self._to_search: OrderedDict[int, bool] = OrderedDict()
        # Images of processes that will launch, and those of which more is to be read ahead, each with its process.
        self._to_open: OrderedDict[int, int] = OrderedDict()
        self._to_read: OrderedDict[int, int] = OrderedDict()
        self._search_budget = Budget(SEARCH_SHARE, SEARCH_MOST_S)
        self._incomplete: OrderedDict[int, UnfinishedStack] = OrderedDict()  # by id
        # Launches' stacks from which rules are to be learnt, all others, and those of CPU samples.
        self._urgent, self._launches = StackQueue(MOST_WAITING), StackQueue(MOST_WAITING)
        self._samples = StackQueue(MOST_SAMPLES)
        self._has_samples = False
        # Processes of CPU samples that may end before these have their turn; what they had mapped; and images that the
        # child is to be given of that, each with its process.
        self._to_look_at: OrderedDict[int, Copied] = OrderedDict()
        self._looked_at: OrderedDict[int, tuple[MappingState, tuple[Mapping, ...]]] = OrderedDict()
        self._to_give: OrderedDict[int, int] = OrderedDict()
        self._look_budget = Budget(LOOK_SHARE, LOOK_MOST_S)
        # Rules that stacks in `_urgent` lack: process, its `unloads`, address, scope.
        self._asked: set[tuple[int, int, int, int]] = set()
        self._sample_budget = Budget(SAMPLES_SHARE, SAMPLES_MOST_S)
        self.is_ending = False  # nothing more comes, and the rest is finished without limits of time
        self._given_back: deque[UnfinishedStack] = deque()  # for the recording's end
        self._given_back_bytes = Counter[int]()  # by UnfinishedStack.copies_key
        self._unsent_bytes = 0
        self._samples_bytes = Budget(SAMPLES_BYTES_A_SECOND, SAMPLES_MOST_BYTES)
        self._dropped = 0  # copies that are neither finished nor given back
        self._processes: OrderedDict[int, Process] = OrderedDict()
        # By process and `unloads` of the state: what processes were before they unmapped code. Copies of then may wait.
        self._earlier: OrderedDict[tuple[int, int], Process] = OrderedDict()
        self._first_space = self._next_space = first_space
        self._next_number = 1
        # By mappings: their number, and the space of processes that have just these.
        self._known: OrderedDict[tuple[Mapping, ...], tuple[int, int]] = OrderedDict()
        self._done: Counter[int] = Counter()  # records of copies that were answered, by UnfinishedStack.copies_key
        self._told: dict[int, int] = {}  # what BPF knows of that
        self._refused: set[int] = set()  # copies_key of stacks that BPF sends no copies of
        # Guessed rules, by space, address and scope.
        self._guesses: OrderedDict[tuple[int, int, RuleScope], Rule] = OrderedDict()
        self._written: dict[int, dict[tuple[int, int], int]] = {}  # rules by space, then address and scope
        # By space and learnt rules, without guesses, that were all written: whether one is HARD.
        self._answers: OrderedDict[tuple[int, bytes], bool] = OrderedDict()
        self._failures: Counter[int] = Counter()  # by process
        self._user_failures: Counter[str] = Counter()  # by account
        self._failures_forgotten = patient_clock()

    @property
    def poll_timeout_ms(self) -> float | None:
        """Milliseconds until there is work even if nothing comes; None if there is none."""
        if self.has_work:
            return 0.0
        waits_s = [self._samples_wait_s] if self._samples else []
        waits_s += [self._look_budget.wait_s] if self._to_look_at or self._to_give else []
        waits_s += [self._search_budget.wait_s] if self._has_to_prepare else []
        waits_s += [STALE_S] if self._incomplete else []
        waits_s += [FORGET_FAILURES_S] if self._refused else []
        waits_s += [SAMPLES_POLL_S] if self._has_samples else []
        return 1000 * min(waits_s) if waits_s else None

    @property
    def has_work(self) -> bool:
        """Whether there is work now."""
        if self._messages or self._urgent or self._launches or self._given_back or self._dropped or self._may_forget:
            return True
        return self._may_look or self._may_search or (bool(self._samples) and not self._samples_wait_s)

    @property
    def _may_look(self) -> bool:
        """Whether a process of CPU samples is to be looked at now."""
        return bool(self._to_look_at or self._to_give) and not self.is_ending and not self._look_budget.wait_s

    @property
    def _samples_wait_s(self) -> float:
        """Seconds until stacks of CPU samples are to be finished."""
        if self.is_ending:
            return 0.0
        wait_s = self._samples.oldest() + SAMPLES_WAIT_S - time.monotonic()
        return max(self._sample_budget.wait_s, 0.0 if len(self._samples) >= MOST_AT_ONCE else wait_s, 0.0)

    @property
    def _may_forget(self) -> bool:
        """Whether failures are to be forgotten now, so that BPF sends copies of all processes again."""
        return bool(self._refused) and patient_clock() > self._failures_forgotten + FORGET_FAILURES_S

    @property
    def _has_to_prepare(self) -> bool:
        """Whether anything is left of what `prepare` asked for."""
        return bool(self._to_search or self._to_open or self._to_read)

    @property
    def _may_search(self) -> bool:
        """Whether a piece of that is to be done now."""
        return self._has_to_prepare and not self.is_ending and not self._search_budget.wait_s

    def has_finished(self, until: float) -> bool:
        """Whether no stack is waiting that came until then, time.monotonic(), and all that are given back are sent."""
        queues = self._urgent, self._launches, self._samples
        return not (self._given_back or self._dropped) and min(queue.oldest() for queue in queues) > until

    @property
    def room(self) -> int:
        """How many COPY records may be read now."""
        pages = self._urgent.pages + self._launches.pages
        return MOST_READ if len(self._launches) < MOST_WAITING // 2 and pages < MOST_WAITING else 0

    @property
    def can_wait(self) -> bool:
        """Whether no rules are to be learnt now, and there is room for further copies."""
        return not self._urgent and bool(self.room) and not self.is_ending

    def take(self, records: NDArray[np.void]) -> None:
        """Adds COPY[n]."""
        runs = copied_runs(records)
        if runs:
            self._look_at_latest(runs[-1].head)
        for run in runs:
            number = run.head.id
            stack = self._incomplete.get(number)
            if stack is None:
                stack = self._incomplete[number] = UnfinishedStack(run.head)
            stack.add(run)
            if run.is_last:
                self._queue(self._incomplete.pop(number))
        # A copy's end that had no room in the ring buffer never comes.
        while self._incomplete and (
            len(self._incomplete) > MOST_INCOMPLETE
            or next(iter(self._incomplete.values())).since < time.monotonic() - STALE_S
        ):
            self._queue(self._incomplete.popitem(last=False)[1])

    def _look_at_latest(self, head: Copied) -> None:
        """Has BPF use the rules of a process again, before its stacks are finished, after it has unmapped code.

        Until then BPF copies the stack of each of its launches, so that there may be more than can be finished in the
        time until it does so again.
        """
        known, state = self._processes.get(head.pid), head.of
        if known is None or known.is_as(state):
            return
        with contextlib.suppress(IaprofError):  # it has ended, or gone on
            process = self._remember(head.pid, state, self._mappings(head))
            self._spaces.set(head.pid, state, process.space, self._table.bits)

    def _queue(self, stack: UnfinishedStack) -> None:
        """Adds a stack to a queue: of those that lack the same rule the first one is urgent, as BPF waits for it."""
        queue = self._samples
        self._has_samples |= stack.is_sample
        process = self._processes.get(stack.pid)
        if stack.is_sample:
            if process is None or process.state != stack.head.of:
                self._to_look_at[stack.pid] = stack.head
                if len(self._to_look_at) > MOST_PROCESSES:
                    self._to_look_at.popitem(last=False)
        else:
            missed = stack.missed
            lacks = stack.pid, stack.head.of.unloads, *missed
            is_known = (
                process is not None
                and process.state.unloads == stack.head.of.unloads
                and missed in self._written.get(process.space, ())
            )
            queue = self._launches
            if not is_known and lacks not in self._asked:
                self._asked.add(lacks)
                queue = self._urgent
        if queue is not self._urgent:
            self._note_done(stack)
        dropped = queue.add(stack)
        if dropped is not None:
            if queue is self._urgent:
                self._forget_question(dropped)
            self._give_back(dropped)

    def _forget_question(self, stack: UnfinishedStack) -> None:
        """Notes that the rule that a stack lacks was found, or that it cannot be."""
        lacks = stack.pid, stack.head.of.unloads, *stack.missed
        if lacks in self._asked:
            self._asked.discard(lacks)
            self._note_done(stack)

    def step(self) -> list[bytes]:
        """Does a piece of work, such as finishing one stack.

        Returns:
            Messages for the recorder: finished stacks; copies for it to finish at its end; interpreters; or nothing.
        """
        if self._messages:
            messages, self._messages = self._messages, []
            return messages
        if self._may_forget:
            self._forget_failures()
        for queue in (self._urgent, self._launches):
            if queue:
                return self._finish_together(queue.take(MOST_AT_ONCE))
        if self._given_back:
            stack = self._given_back.popleft()
            self._unsent_bytes -= PAGE * len(stack.pages)
            return stack.copies()
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            return [DROPPED.pack(DROPPED_MARK, dropped)]
        if self._may_look:
            with self._look_budget.spent():
                self._look()
            return []
        if self._may_search:
            with self._search_budget.spent():
                self._prepare()
            return []
        if not self._samples or self._samples_wait_s:
            return []
        with self._sample_budget.spent():
            return self._finish_together(self._samples.take(MOST_AT_ONCE))

    def _look(self) -> None:
        """Reads the mappings of the latest process, as it may end before its CPU samples' turn; or opens its files."""
        if not self._to_give:
            self._look_at(self._to_look_at.popitem()[1])
            return
        self._open_ahead(*self._to_give.popitem(), self._finishing.prepare)

    def _look_at(self, head: Copied) -> None:
        pid, state = head.pid, head.of
        if pid in self._looked_at and self._looked_at[pid][0] == state:
            return
        with contextlib.suppress(ImageGone):
            mappings = self._mappings(head)
            # If it has mapped or unmapped code since, it has another number of pages of it.
            if sum(each.end - each.start for each in mappings if each.start >> 63 == 0) != state.exec_vm * PAGE:
                return
            self._looked_at[pid] = state, mappings
            if len(self._looked_at) > MOST_PROCESSES:
                self._looked_at.popitem(last=False)
            for each in mappings:
                if len(self._to_give) < MOST_PROCESSES and not self._finishing.has(each.image):
                    self._to_give[each.image] = pid

    def rest(self) -> list[bytes]:
        """Returns the copies that are left, as COPY records."""
        for queue in (self._urgent, self._launches, self._samples):
            while queue:
                self._give_back(*queue.take(MOST_WAITING))
        records = [record for stack in self._given_back for record in stack.copies()]
        self._given_back.clear()
        if self._dropped:
            records.append(DROPPED.pack(DROPPED_MARK, self._dropped))
        return records

    def _finish_together(self, stacks: Sequence[UnfinishedStack]) -> list[bytes]:
        """Finishes stacks of one process; returns records of those that could be finished."""
        pid = stacks[0].pid
        if patient_clock() > self._failures_forgotten + FORGET_FAILURES_S:
            self._forget_failures()
        account = _account_of(pid)
        records: list[bytes] = []
        for _, of_state in groupby(stacks, key=lambda stack: stack.head.of):
            group = list(of_state)
            try:
                if self._has_failed(pid, account):
                    raise ImageGone
                records += self._finish(group)
            except IaprofError as error:
                if not isinstance(error, ImageGone):
                    self._add_failures(pid, account)
                self._give_back(*group)
                if not self._has_failed(pid, account):
                    self._copy_again(*group)
        for stack in stacks:
            self._forget_question(stack)
        key = stacks[0].copies_key
        if self._has_failed(pid, account):
            self._refused.add(key)
        self._tell_done(key)
        return records

    def _note_done(self, stack: UnfinishedStack) -> None:
        """Notes that a stack was answered. BPF does not count copies that it could not send to their end."""
        if stack.is_complete:
            self._done[stack.copies_key] += stack.records

    def _tell_done(self, key: int) -> None:
        """Tells BPF how much of a process's copies was answered, or to send none."""
        done = _NO_COPIES if key in self._refused else self._done[key]
        if self._told.get(key) != done:
            self._spaces.set_copies_done(key, done)
            self._told[key] = done

    def _forget_failures(self) -> None:
        self._failures.clear()
        self._user_failures.clear()
        self._opener.forget_hangs()
        self._failures_forgotten = patient_clock()
        refused, self._refused = self._refused, set()
        for key in refused:
            self._tell_done(key)

    def _has_failed(self, pid: int, account: str) -> bool:
        """Whether a process is given up on: its files break the children."""
        return self._failures[pid] >= MOST_FAILURES or self._user_failures[account] >= MOST_FAILURES_OF_A_USER

    def _add_failures(self, pid: int, account: str, times: int = 1) -> None:
        self._failures[pid] += times
        self._user_failures[account] += times

    def _copy_again(self, *stacks: UnfinishedStack) -> None:
        """Has BPF copy other stacks that end where these do, though it may have sent the most copies of those."""
        for head in (stack.head for stack in stacks):
            self._spaces.copy_again(head.ip, head.depth, head.tid)

    def _copy_few(self, stack: UnfinishedStack) -> None:
        """Has BPF copy few other stacks that end where this one does, as it cannot be walked from there by rules."""
        self._spaces.copy_few(stack.head.ip, stack.head.depth, stack.head.tid)

    def _give_back(self, *stacks: UnfinishedStack) -> None:
        """Leaves stacks to the recording's end: their process has ended, or on a busy machine a child was too slow."""
        for stack in stacks:
            size = PAGE * len(stack.pages)
            if not stack.is_complete:
                continue
            is_beyond = self._unsent_bytes + size > MOST_UNSENT_BYTES
            is_beyond |= self._given_back_bytes[stack.copies_key] + size > MOST_GIVEN_BACK_BYTES
            if is_beyond or (stack.is_sample and self._samples_bytes.wait_s > 0):
                self._dropped += 1
                continue
            self._given_back_bytes[stack.copies_key] += size
            self._unsent_bytes += size
            if stack.is_sample:
                self._samples_bytes.spend(size)
            # The pages are of many stacks that were read together.
            stack.pages = {address: memoryview(bytes(page)) for address, page in stack.pages.items()}
            self._given_back.append(stack)

    def prepare(self, pid: int, will_launch: bool) -> None:
        """Has a process prepared for when no launch's stack is waiting.

        Args:
            pid: the process, which is searched for an interpreter.
            will_launch: whether all its files are opened, too, so that its first stacks do not wait for that.
        """
        if len(self._to_search) < MOST_PROCESSES:
            self._to_search[pid] = will_launch or self._to_search.get(pid, False)

    def _prepare(self) -> None:
        """Does a piece of what `prepare` asked for."""
        if self._to_search:
            pid, will_launch = self._to_search.popitem(last=False)
            mappings = executable(pid, self._images)
            self._search_process(pid, mappings)
            if will_launch and not self._has_failed(pid, _account_of(pid)):
                self._to_open |= dict.fromkeys((each.image for each in mappings if each.image >= 0), pid)
            return
        queue, prepare = self._to_open, self._finishing.prepare
        if not queue:
            queue, prepare = self._to_read, self._finishing.read_ahead
        image, pid = queue.popitem(last=False)
        if self._open_ahead(image, pid, prepare):
            self._to_read[image] = pid

    def _open_ahead(self, image: int, pid: int, prepare: Callable[[int], bool]) -> bool:
        """Prepares an image of a process in the child; returns whether to read more of it ahead."""
        account = _account_of(pid)
        if self._has_failed(pid, account):
            return False
        try:
            return prepare(image)
        except ImageGone:
            pass
        except IaprofError:  # perhaps it is slow on purpose: all others wait meanwhile
            self._add_failures(pid, account)
        return False

    def _search_process(self, pid: int, mappings: tuple[Mapping, ...]) -> None:
        account, failures = _account_of(pid), self._interpreters.failures
        if not self._has_failed(pid, account):
            self._messages += self._interpreters.search(pid, born_ns(pid) // TICK_NS, mappings)
            self._add_failures(pid, account, self._interpreters.failures - failures)

    def _finish(self, stacks: Sequence[UnfinishedStack]) -> list[bytes]:
        """Finishes stacks that were copied in one state of a process, and writes their rules; returns their records.

        Raises:
            ImageGone: the process is not what it was when the stacks were copied.
            IaprofError: a child failed.
        """
        head = stacks[0].head
        pid, state = head.pid, head.of
        process = self._process(head)
        all_finished = self._walk(process, pid, stacks)
        if any(finished.met_unknown for finished in all_finished):
            # A JIT maps more memory for its code, which the kernel does not count as code if it is writable, too.
            with contextlib.suppress(ImageGone):
                mappings = self._mappings(head)
                if mappings != process.mappings:
                    process = self._remember(pid, state, mappings)
                    all_finished = self._walk(process, pid, stacks)
        answered: list[tuple[UnfinishedStack, Finished]] = []
        needs_rules = process.space != _NO_SPACE and abs(born_ns(pid) - state.born) <= TICK_NS
        for stack, finished in zip(stacks, all_finished, strict=True):
            if finished.ending is Walked.NOWHERE:
                self._give_back(stack)
                self._copy_few(stack)
                continue
            if needs_rules:
                self._write_rules(process, stack, finished)
            if finished.ending is not Walked.MEMORY or stack.is_complete:
                answered.append((stack, finished))
        if self._table.is_crowded:
            self._grow()
        if needs_rules and self._processes.get(pid) is process:
            self._spaces.set(pid, process.state, process.space, self._table.bits)
        return finished_records(answered, self._depth)

    def _walk(self, process: Process, pid: int, stacks: Sequence[UnfinishedStack]) -> list[Finished]:
        copies, limits = [stack.copy() for stack in stacks], [stack.limit(self._depth) for stack in stacks]
        return self._finishing.finish_all(process.number, process.mappings, copies, limits, Memory(pid).page)

    def _mappings(self, head: Copied) -> tuple[Mapping, ...]:
        """Returns a process's executable mappings, which have all code that it had mapped when a stack was copied.

        Raises:
            ImageGone: it has unmapped code since, executed another program, or ended.
        """
        pid, state = head.pid, head.of
        if self._spaces.unloads(pid) != state.unloads:
            raise ImageGone
        mappings = executable(pid, self._images)
        began_ns, start_stack = beginning(pid)
        is_same = abs(began_ns - state.born) <= TICK_NS and start_stack == head.start_stack
        if not mappings or not is_same or self._spaces.unloads(pid) != state.unloads:
            raise ImageGone
        return mappings

    def _process(self, head: Copied) -> Process:
        pid, state = head.pid, head.of
        known = self._processes.get(pid)
        if known is not None and known.state == state:
            self._processes.move_to_end(pid)
            return known
        try:
            mappings = self._mappings(head)
        except ImageGone:
            for earlier in (known, self._earlier.get((pid, state.unloads))):
                if earlier is not None and earlier.is_as(state):
                    return earlier
            if pid in self._looked_at:
                ended = Process(*self._looked_at[pid], self._next_number, _NO_SPACE)
                if ended.is_as(state):
                    self._next_number += 1
                    return ended
            raise
        process = self._remember(pid, state, mappings)
        self._search_process(pid, mappings)
        if len(self._processes) > MOST_PROCESSES:
            forgotten, _ = self._processes.popitem(last=False)
            self._spaces.forget(forgotten)
        return process

    def _remember(self, pid: int, state: MappingState, mappings: tuple[Mapping, ...]) -> Process:
        """Notes a process's mappings; its rules for code that is still there stay valid."""
        before = self._processes.get(pid)
        if before is not None and before.state.unloads != state.unloads:
            self._earlier[pid, before.state.unloads] = before
            if len(self._earlier) > MOST_EARLIER:
                self._earlier.popitem(last=False)
        if mappings not in self._known:
            space, kept = self._space_for(before, mappings)
            self._known[mappings] = self._next_number, space
            self._next_number += 1
            if len(self._known) > MOST_PROCESSES:
                self._known.popitem(last=False)
            if before is not None and kept:
                self._table.copy(before.space, space, kept)
        number, space = self._known[mappings]
        self._processes[pid] = process = Process(state, mappings, number, space)
        return process

    def _space_for(self, before: Process | None, mappings: tuple[Mapping, ...]) -> tuple[int, list[tuple[int, int]]]:
        """Returns a space for new mappings, and for which addresses to copy the rules of the process's space to it.

        A process that only mapped more code keeps its space, unless other processes use it, which did not map it.
        """
        kept: list[tuple[int, int]] = []
        if before is not None:
            kept = [(each.start, each.end) for each in before.mappings if _is_covered(each, mappings)]
            users = sum(process.space == before.space for process in self._processes.values())
            if len(kept) == len(before.mappings) and users == 1:
                self._known.pop(before.mappings, None)
                return before.space, []
        if self._next_space == self._first_space + MOST_SPACES:
            self._forget_spaces()
            kept = []
        self._next_space += 1
        return self._next_space - 1, kept

    def _forget_spaces(self) -> None:
        """Forgets all spaces, as all their numbers are used."""
        for pid in self._processes:
            self._spaces.forget(pid)
        self._processes.clear()
        self._earlier.clear()
        self._known.clear()
        self._guesses.clear()
        self._written.clear()
        self._answers.clear()
        self._table.clear()
        self._finishing.close()
        self._next_space = self._first_space

    def _grow(self) -> None:
        self._table.grow()
        for pid, process in self._processes.items():
            self._spaces.set(pid, process.state, process.space, self._table.bits)

    def _write_rules(self, process: Process, stack: UnfinishedStack, finished: Finished) -> None:
        written = self._written.setdefault(process.space, {})
        missed = stack.missed  # its rule may have been written, and evicted
        key = process.space, finished.learnt.tobytes()
        is_new = leaves = False
        if key in self._answers and missed in written:
            has_hard = self._answers[key]
            self._table.write(process.space, *missed, written[missed])
        else:
            has_hard = has_guess = False
            for address, scope, packed in finished.learnt.tolist():
                if packed >> _FLAGS & _GUESS:
                    has_guess = True
                    confirmed = self._confirmed(process.space, address, RuleScope(scope), Rule.unpack(packed))
                    if confirmed is None:
                        continue
                    packed = confirmed.pack()
                    leaves |= RuleFlags.OTHER_STACK in confirmed.flags
                has_hard |= packed == _HARD
                is_other = written.get((address, scope)) != packed
                if is_other or (address, scope) == missed:
                    self._table.write(process.space, address, scope, packed)
                    written[address, scope] = packed
                    is_new |= is_other
            if not has_guess:
                self._answers[key] = has_hard
                if len(self._answers) > MOST_ANSWERS:
                    self._answers.popitem(last=False)
        if len(written) > MOST_WRITTEN:
            self._answers.clear()
            del self._written[process.space]
        path = stack.head.missed_path
        # Rules that switch to another stack, which was not copied, work in BPF from now on; so do those of frames whose
        # callers are above the copy.
        leads = not has_hard and (
            finished.ending in (Walked.WHOLE, Walked.DEEP) or leaves or (finished.ending is Walked.MEMORY and is_new)
        )
        if leads:
            self._spaces.walk_again(path)
            self._copy_again(stack)  # if the rule is replaced by another one later
        else:
            self._spaces.keep_stack(path, stack.head.id, time.monotonic_ns() + PRESUMED_NS)
            self._copy_few(stack)

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


def _is_covered(mapping: Mapping, by: tuple[Mapping, ...]) -> bool:
    """Whether the same code is at a mapping's addresses in other mappings, which are sorted."""
    at = bisect.bisect_right(by, mapping.start, key=lambda each: each.start) - 1
    if at < 0 or by[at].image != mapping.image or by[at].end < mapping.end:
        return False
    return mapping.image < 0 or by[at].start - by[at].offset == mapping.start - mapping.offset


def _account_of(pid: int) -> str:
    """Returns who is answerable for a process; an empty string if it has ended."""
    rights = rights_of(pid)
    return rights.answerable if rights is not None else ""


def main() -> None:
    """Serves until the recorder shuts down its end of the socket, and then until nothing is left."""
    take_in_advance(KEPT_BYTES)
    channel = socket.socket(fileno=0)
    with Readers() as readers:
        # The recorder loads its BPF programs meanwhile, and has no maps before.
        readers.start()
        message, files, _, _ = socket.recv_fds(channel, _LONGEST_SETTINGS, _MOST_MAPS, socket.MSG_CMSG_CLOEXEC)
        if not message:  # the recorder has ended
            return
        options = json.loads(message)
        maps = dict(zip(options["maps"], files, strict=True))
        ring = RingBuffer(maps["copies"], options["copies_bytes"], COPY)
        table = RuleTable(maps["rules"], options["bits"])
        spaces = Spaces(maps)
        first_space = 1 + options["starts"] * MOST_SPACES
        learner = Learner(table, spaces, options["depth"], first_space, readers)
        with contextlib.suppress(ConnectionError):  # the recorder has ended without waiting for answers
            _serve(learner, ring, channel)


def _serve(learner: Learner, ring: RingBuffer, channel: socket.socket) -> None:
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
            message = channel.recv(PREPARE_REQUEST.size)
            if len(message) == PREPARE_REQUEST.size:
                learner.prepare(*PREPARE_REQUEST.unpack(message))
            is_asked_to_report = is_asked_to_report or message == SYNC
            is_closed = learner.is_ending = not message
            if is_closed:
                deadline = time.monotonic() + ENDING_S
        misfits = ring.misfits
        # Rules that many launches wait for come first: other copies stay in the ring buffer, and BPF sends no more.
        copies = ring.read(MOST_RECORDS if is_closed or (has_request and message == SYNC) else learner.room)
        learner.take(copies)
        for _ in range(ring.misfits - misfits):
            channel.send(MISFIT)
        if has_request and message == SYNC:
            asked_at = time.monotonic()
        # Further copies may lack rules that nobody has asked for yet: all others wait until these are read.
        if learner.has_work and not (len(copies) and learner.can_wait):
            for message in learner.step():
                channel.send(message)
        if is_asked_to_report and learner.has_finished(asked_at):
            is_asked_to_report = False
            channel.send(SYNC)
    for message in learner.rest():
        channel.send(message)
