"""The learner's order of work: processes take turns, excess copies are dropped, and breaking its child has limits."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from iaprof.basics.errors import IaprofError
from iaprof.formats.wire.launches import COPY, stack_dtype
from iaprof.formats.wire.unwind_rules import HARD, Rule, RuleFlags, RuleKind, RuleScope, Walked
from iaprof.record.symbolize.opener import Rights
from iaprof.record.unwinding import learner as module
from iaprof.record.unwinding.learner import (
    DROPPED,
    DROPPED_MARK,
    MISFIT,
    MOST_AT_ONCE,
    MOST_FAILURES_OF_A_USER,
    MOST_SAMPLES,
    MOST_WAITING,
    READY,
    Budget,
    Learner,
    Readers,
)
from iaprof.record.unwinding.mappings import ImageGone
from iaprof.record.unwinding.unfinished import MOST_FAILURES, StackQueue
from iaprof.symbols.unwind.finishing import PAGE, RULE, Finished, HowFound, Mapping

DEPTH, TOP = 8, 0x7FFF_0000_1000
Rules = dict[tuple[int, RuleScope], Rule]


def finished(ending: Walked = Walked.WHOLE, rules: Rules | None = None, met_unknown: bool = False) -> Finished:
    """A finished stack of two frames."""
    learnt = [(address, scope, rule.pack()) for (address, scope), rule in (rules or {}).items()]
    how = np.array([HowFound.INTERRUPTED, HowFound.BY_RULE], np.uint64)
    ips = np.array([5, 6], np.uint64)
    return Finished(ips, how, np.zeros(2, np.uint64), ending, np.array(learnt, RULE), met_unknown)


WHOLE = finished()
GUESS, INSTRUCTION, BLOCK = Rule(RuleKind.BY_RBX, 8, 0, RuleFlags.GUESS), RuleScope.INSTRUCTION, RuleScope.BLOCK
MAPPED = (Mapping(0x1000, 0x2000, 0, 0),)
START_STACK = 0x7FF000


def copied(number: int, pid: int, is_sample: bool = False, missed: int = 0, pages: int = 1) -> np.ndarray:
    """COPY[pages + 1] of a stack that lacks the rule for an address."""
    records = np.zeros(pages + 1, COPY)
    records["ip"] = missed
    records["is_sample"] = is_sample
    records["id"], records["pid"], records["missed_path"], records["depth"] = number, pid, 100 + number, 1
    records["address"], records["start"]["sp"] = [*range(TOP, TOP + pages * PAGE, PAGE), 0], TOP + 8
    records["of"] = (0, 1, 2, 1)
    records["start_stack"] = START_STACK
    return records


class Table:
    """Stands for BPF's table of rules."""

    bits, is_crowded = 10, False

    def __init__(self) -> None:
        self.written: list[tuple[int, int, RuleKind]] = []
        self.copied: list[tuple[int, int, list[tuple[int, int]]]] = []

    def write(self, space: int, address: int, scope: int, packed: int) -> None:
        self.written.append((space, address, Rule.unpack(packed).kind))

    def copy(self, space: int, to: int, ranges: list[tuple[int, int]]) -> None:
        self.copied.append((space, to, ranges))


class Spaces:
    """Stands for BPF's maps of processes and paths."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.now = 1  # what `unloads` of a state is now
        self.done: dict[int, int] = {}
        self.copied_again: list[tuple[int, int, int]] = []

    def unloads(self, pid: int) -> int:
        return self.now

    def set_copies_done(self, pid: int, count: int) -> None:
        self.done[pid] = count

    def set(self, pid: int, state: object, space: int, bits: int) -> None:
        self.calls.append(("space", space))

    def walk_again(self, path: int) -> None:
        self.calls.append(("walk_again", path))

    def copy_again(self, ip: int, depth: int, tid: int) -> None:
        self.copied_again.append((ip, depth, tid))

    def copy_few(self, ip: int, depth: int, tid: int) -> None:
        self.calls.append(("copy_few", depth))

    def keep_stack(self, path: int, number: int, until: int) -> None:
        self.calls.append(("keep_stack", path))


class Finishing:
    """Stands for the child that finishes stacks."""

    def __init__(self) -> None:
        self.answer: Finished | Exception = WHOLE
        self.asked: list[int] = []  # how many stacks at once

    def has(self, image: int) -> bool:
        return True

    def prepare(self, image: int) -> bool:
        raise AssertionError

    def finish_all(self, _number: int, _mappings: object, copies: Sequence[object], *_: object) -> list[Finished]:
        self.asked.append(len(copies))
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * len(copies)


class LearnerUnderTest:
    """A learner without its children."""

    def __init__(self) -> None:
        self.table, self.spaces, self.finishing = Table(), Spaces(), Finishing()
        self.learner = Learner(self.table, self.spaces, DEPTH, 1, Readers())  # type: ignore[arg-type]
        self.learner._finishing = self.finishing  # type: ignore[assignment]
        self.learner._interpreters = SimpleNamespace(failures=0, search=lambda *_: [])  # type: ignore[assignment]

    def finish(self, *copies: np.ndarray) -> list[tuple[int, Walked] | int]:
        """Ids and ends of finished stacks, and ids of copies that were given back, in order."""
        self.learner.take(np.concatenate(copies))
        messages: list[bytes] = []
        while self.learner.has_work:
            messages += self.learner.step()
        return [_read(message) for message in messages if len(message) != DROPPED.size]


def _read(message: bytes) -> tuple[int, Walked] | int:
    if len(message) == COPY.itemsize:
        return int(np.frombuffer(message, COPY)["id"][0])
    (record,) = np.frombuffer(message, stack_dtype(DEPTH))
    return int(record["id"]), Walked(int(record["walked"]))


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> LearnerUnderTest:
    monkeypatch.setattr(module, "SAMPLES_WAIT_S", 0.0)
    monkeypatch.setattr(module, "SAMPLES_POLL_S", math.inf)
    monkeypatch.setattr(module, "executable", lambda pid, images: MAPPED)
    monkeypatch.setattr(module, "born_ns", lambda pid: 0)
    monkeypatch.setattr(module, "beginning", lambda pid: (0, START_STACK))
    monkeypatch.setattr(module, "rights_of", lambda pid: Rights(pid // 100, 0))
    return LearnerUnderTest()


def whole(numbers: Sequence[int]) -> list[tuple[int, Walked]]:
    return [(number, Walked.WHOLE) for number in numbers]


def test_processes_take_turns(tested: LearnerUnderTest) -> None:
    assert tested.finish(*(copied(number, 100) for number in (1, 2, 3)), copied(4, 200)) == whole([1, 4, 2, 3])


def test_cpu_samples_take_no_more_than_their_share_of_the_time(tested: LearnerUnderTest) -> None:
    # given that the time for samples is used up
    now = [0.0]
    tested.learner._sample_budget = Budget(0.1, 1.0, lambda: now[0])
    with tested.learner._sample_budget.spent():
        now[0] += 1.5
    # when both come, only the launch's stack is finished
    assert tested.finish(copied(1, 100, is_sample=True), copied(2, 100)) == whole([2])
    assert tested.learner.poll_timeout_ms == pytest.approx(1000 * (1.5 - 1 - 0.1 * 1.5) / 0.1)
    # but the samples' stacks are finished later, or when the recording ends
    now[0] += 10
    assert tested.finish(copied(3, 200)) == whole([3, 1])
    with tested.learner._sample_budget.spent():
        now[0] += 20
    assert tested.finish(copied(4, 100, is_sample=True)) == []
    tested.learner.is_ending = True
    assert tested.finish(copied(5, 200)) == whole([5, 4])


def test_cpu_samples_wait_until_no_launch_does(tested: LearnerUnderTest) -> None:
    copies = [copied(number, 100, is_sample=True) for number in range(1, MOST_SAMPLES + 2)]
    found = tested.finish(*copies, copied(1000, 100), copied(1001, 200))
    tested.learner.is_ending = True  # as the last ones wait for more
    found += tested.finish(copied(1002, 200)[:0])
    assert found == [*whole([1000, 1001]), 1, *whole(range(2, MOST_SAMPLES + 2))]  # for the first there is no room


def test_the_recorder_waits_only_for_what_came_before_it_asked(tested: LearnerUnderTest) -> None:
    tested.learner.take(np.concatenate([copied(1, 100), copied(2, 100)]))
    asked = time.monotonic()
    tested.learner.take(copied(3, 200))
    found = []
    while not tested.learner.has_finished(asked):
        found += [_read(message) for message in tested.learner.step()]
    assert found == whole([1, 3, 2])
    assert tested.learner.has_finished(asked)


def test_the_recorder_waits_for_what_is_given_back(tested: LearnerUnderTest) -> None:
    tested.finishing.answer = ImageGone("it is gone")
    tested.learner.take(copied(1, 100))
    asked = time.monotonic()
    messages = []
    while not tested.learner.has_finished(asked):
        messages += tested.learner.step()
    assert [_read(message) for message in messages] == [1]


def test_what_waits_to_be_given_back_is_limited(tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    # given processes that have ended, and a launch's stack that always waits
    monkeypatch.setattr(module, "MOST_UNSENT_BYTES", 2 * PAGE)
    tested.finishing.answer = ImageGone("it is gone")
    tested.learner.take(np.concatenate([copied(number, 100 + number) for number in range(1, 5)]))
    for _ in range(4):
        assert tested.learner.step() == []
    # when there is time to send some
    assert [_read(message) for message in tested.learner.step() + tested.learner.step()] == [1, 2]
    assert DROPPED.unpack(*tested.learner.step()) == (DROPPED_MARK, 2)
    # then there is room again
    assert tested.finish(copied(5, 100)) == [5]


def test_of_the_process_with_the_most_copies_the_oldest_are_left_out(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given room for fewer copies than come of one process, beside another one's
    tested.learner._launches = StackQueue(4)
    found = tested.finish(copied(0, 200), *(copied(number, 100) for number in range(1, 8)))
    # then each process's first one, which lacks a rule, and the latest are finished, before the others are given back
    assert found == [*whole([0, 1, 4, 5, 6, 7]), 2, 3]
    # and BPF knows that all were answered
    assert tested.spaces.done == {100: 14, 200: 2}  # records, two of each copy


def test_stacks_from_which_rules_are_learnt_come_first(tested: LearnerUnderTest) -> None:
    first = [copied(number, 100, missed=0x10) for number in range(3 * MOST_AT_ONCE)]
    found = tested.finish(*first, copied(1000, 100, missed=0x20), copied(1001, 100, missed=0x20))
    assert found[:2] == whole([0, 1000])
    assert sorted(found[2:], key=str) == sorted(whole([*range(1, 3 * MOST_AT_ONCE), 1001]), key=str)
    # and those of rules that are known do not
    tested.finishing.answer = finished(rules={(0x10, RuleScope.RETURN): Rule(RuleKind.END)})
    tested.finish(copied(2, 100, missed=0x10))
    assert tested.finish(copied(3, 100, missed=0x10), copied(4, 100, missed=0x30)) == whole([4, 3])


def test_other_stacks_wait_for_further_copies(tested: LearnerUnderTest) -> None:
    learner = tested.learner
    # a rule is to be learnt: now
    learner.take(np.concatenate([copied(1, 100, missed=0x10), copied(2, 100, missed=0x10)]))
    assert not learner.can_wait
    learner.step()
    # no other rule: when no copy comes, or no more have room, or the recording ends
    assert learner.has_work
    assert learner.can_wait
    learner.take(np.concatenate([copied(number, 100, missed=0x10) for number in range(3, 3 + MOST_WAITING // 2)]))
    learner.step()  # the rule is asked for again
    assert not learner.can_wait
    learner.step()
    assert learner.can_wait
    learner.is_ending = True
    assert not learner.can_wait


def test_few_copies_that_have_many_pages_fill_the_queue(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = tested.learner
    monkeypatch.setattr(module, "MOST_WAITING", 8)
    learner.take(copied(1, 100, pages=5))
    assert learner.room
    learner.take(np.concatenate([copied(number, 100, pages=5) for number in (2, 3)]))
    assert not learner.room
    learner.step()  # the first one, which is in a queue of its own
    assert not learner.room
    learner.step()
    assert learner.room


def test_only_so_many_copies_are_given_back_and_the_others_are_counted(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_GIVEN_BACK_BYTES", 3 * PAGE)
    tested.finishing.answer = ImageGone("it is gone")
    tested.learner.take(np.concatenate([copied(number, 100) for number in range(5)]))
    messages = []
    while tested.learner.has_work:
        messages += tested.learner.step()
    assert [_read(message) for message in messages[:-1]] == [0, 1, 2]
    assert DROPPED.unpack(messages[-1]) == (DROPPED_MARK, 2)


TWO_PAGES = (Mapping(0x1000, 0x2000, 0, 5), Mapping(0x9000, 0xA000, 0, -1), Mapping(1 << 63, (1 << 63) + PAGE, 0, -1))
"""As `copied` says of processes; the last one, which is the kernel's, does not count."""


@pytest.fixture
def looking(tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch) -> tuple[LearnerUnderTest, list[int]]:
    """A learner that has no time for CPU samples' stacks, and the images that it opens."""
    tested.learner._sample_budget = Budget(0.1, 1.0, lambda: 0.0)
    tested.learner._sample_budget.spend(2)
    opened: list[int] = []
    monkeypatch.setattr(tested.finishing, "prepare", opened.append)
    monkeypatch.setattr(tested.finishing, "has", lambda image: image in opened or image < 0)
    grown(
        monkeypatch, (Mapping(0x1000, 0x2000, 0, 5), Mapping(0x9000, 0xA000, 0, -1), Mapping(1 << 63, 1 << 64, 0, -1))
    )
    return tested, opened


def ended(tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes end, and then there is time for CPU samples' stacks."""
    grown(monkeypatch, ())
    monkeypatch.setattr(module, "born_ns", lambda _: 1 << 60)
    monkeypatch.setattr(module, "beginning", lambda _: (1 << 60, START_STACK))
    tested.learner._sample_budget = Budget(1.0, 1.0)


def looked(tested: LearnerUnderTest, *copies: np.ndarray) -> None:
    tested.learner.take(np.concatenate(copies))
    while tested.learner.has_work:
        assert tested.learner.step() == []


def test_a_process_may_end_before_the_stack_of_its_cpu_sample_has_its_turn(
    looking: tuple[LearnerUnderTest, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a process that was looked at while it ran
    tested, opened = looking
    looked(tested, copied(1, 100, is_sample=True))
    # when it has ended
    ended(tested, monkeypatch)
    tested.finishing.answer = finished(rules={(1, RuleScope.INSTRUCTION): Rule(RuleKind.END)})
    # then its mappings are known and its file is open, and nobody needs its rules any more
    assert tested.finish(copied(2, 100, is_sample=True)) == whole([1, 2])
    assert opened == [5]
    assert tested.table.written == []
    assert tested.spaces.calls == []


def test_a_program_that_was_executed_since_finishes_no_stack(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "beginning", lambda _: (0, START_STACK - 16))
    assert tested.finish(copied(1, 100), copied(2, 200, is_sample=True)) == [1, 2]
    assert tested.finishing.asked == []
    # nor is it taken for what the process was when it was looked at
    assert tested.learner._looked_at == {}


def test_what_a_process_executed_since_is_not_taken_for_what_it_was(
    looking: tuple[LearnerUnderTest, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tested, opened = looking
    looked(tested, changed(copied(1, 100, is_sample=True), exec_vm=7))  # it has two pages when it is looked at
    ended(tested, monkeypatch)
    assert tested.finish(copied(2, 200)[:0]) == [1]
    assert opened == []


def test_processes_are_looked_at_for_no_more_than_a_share_of_the_time_the_latest_first(
    looking: tuple[LearnerUnderTest, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tested, _ = looking
    now = [0.0]
    tested.learner._look_budget = Budget(0.1, 1.0, lambda: now[0])

    def executable(*_: object) -> tuple[Mapping, ...]:
        now[0] += 0.6
        return TWO_PAGES

    monkeypatch.setattr(module, "executable", executable)
    # when three come at once, and looking at each takes more than half of what there is
    looked(tested, *(copied(pid, pid, is_sample=True) for pid in (1, 2, 3)))
    ended(tested, monkeypatch)
    # then the first one has ended before its turn
    assert sorted(tested.finish(copied(4, 4)[:0]), key=str) == [*whole([2, 3]), 1]


def test_only_so_many_copies_of_cpu_samples_a_second_are_given_back(tested: LearnerUnderTest) -> None:
    # given processes that ended before their mappings were read, and room for two of their copies
    now = [0.0]
    tested.learner._samples_bytes = Budget(PAGE / 2, 1.5 * PAGE, lambda: now[0])
    tested.finishing.answer = ImageGone("it is gone")
    assert tested.finish(*(copied(number, number, is_sample=True) for number in range(1, 5))) == [1, 2]
    assert tested.finish(copied(5, 5)) == [5]  # of launches, there may be more
    # when time goes by, there is room again
    now[0] += 1.1
    assert tested.finish(*(copied(number, number, is_sample=True) for number in range(6, 9))) == [6]


def test_a_path_is_walked_in_bpf_from_then_on_only_if_its_rules_lead_to_its_end(tested: LearnerUnderTest) -> None:
    at = (1, RuleScope.INSTRUCTION)
    tested.finishing.answer = finished(rules={at: Rule(RuleKind.END)})
    tested.finish(copied(1, 100))
    assert tested.table.written == [(1, 1, RuleKind.END)]
    tested.finishing.answer = finished(rules={at: HARD})
    tested.finish(copied(2, 100))
    tested.finishing.answer = finished(Walked.STUCK)
    tested.finish(copied(3, 100))
    # nor where its end is above the copy, unless a rule leads there from now on
    tested.finishing.answer = finished(Walked.MEMORY)
    tested.finish(copied(4, 100))
    tested.finishing.answer = finished(Walked.MEMORY, {(2, RuleScope.RETURN): Rule(RuleKind.BY_RSP, 8)})
    tested.finish(copied(5, 100))
    assert [calls for calls in tested.spaces.calls if calls[0] != "space"] == [
        ("walk_again", 101),
        ("keep_stack", 102),
        ("copy_few", 1),
        ("keep_stack", 103),
        ("copy_few", 1),
        ("keep_stack", 104),
        ("copy_few", 1),
        ("walk_again", 105),
    ]


@pytest.mark.parametrize("ending", [Walked.STUCK, Walked.MEMORY, Walked.NOWHERE])
def test_few_stacks_are_copied_where_rules_lead_no_further(tested: LearnerUnderTest, ending: Walked) -> None:
    # given a stack with the rules that another one had, which led no further
    tested.finishing.answer = finished(ending, {(1, RuleScope.INSTRUCTION): Rule(RuleKind.BY_RSP, 8)})
    tested.finish(copied(1, 100))
    tested.spaces.calls.clear()
    # when it is finished
    tested.finish(copied(2, 100))
    # then
    assert ("copy_few", 1) in tested.spaces.calls
    assert ("walk_again", 102) not in tested.spaces.calls


def test_a_guess_for_a_block_becomes_a_rule_when_it_is_made_twice_alike(tested: LearnerUnderTest) -> None:
    other = GUESS._replace(cfa=24)
    for number, rules in enumerate(
        (
            {(1, INSTRUCTION): GUESS, (64, BLOCK): GUESS, (128, BLOCK): GUESS},
            {(2, INSTRUCTION): GUESS, (64, BLOCK): GUESS, (128, BLOCK): other},
            {(3, INSTRUCTION): GUESS, (128, BLOCK): GUESS},
        )
    ):
        tested.finishing.answer = finished(rules=rules)
        tested.finish(copied(number, 100))
    # a rule of an instruction holds at once; a guess for a block that was made otherwise before never does
    assert [address for _, address, _ in tested.table.written] == [1, 2, 64, 3]
    assert [calls for calls, _ in tested.spaces.calls if calls != "space"] == ["walk_again"] * 3


def grown(monkeypatch: pytest.MonkeyPatch, mapped: tuple[Mapping, ...]) -> None:
    """From now on processes have these mappings."""
    monkeypatch.setattr(module, "executable", lambda pid, images: mapped)


def changed(copies: np.ndarray, exec_vm: int = 2, unloads: int = 1) -> np.ndarray:
    """Copies of another state of a process's mappings."""
    copies["of"]["exec_vm"], copies["of"]["unloads"] = exec_vm, unloads
    return copies


MORE = (*MAPPED, Mapping(0x9000, 0xA000, 0, 1))


def spaces_of(tested: LearnerUnderTest) -> list[int]:
    return [space for call, space in tested.spaces.calls if call == "space"]


def test_mappings_are_read_again_where_a_stack_leads_to_none_of_them(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a process whose code grows without the kernel counting it
    tested.finish(copied(1, 100))
    grown(monkeypatch, (*MAPPED, Mapping(0x9000, 0xA000, 0, -1)))
    tested.finish(copied(2, 100))
    # when a stack leads to the new code
    tested.finishing.answer = finished(Walked.STUCK, met_unknown=True)
    before = len(tested.finishing.asked)
    tested.finish(copied(3, 100))
    # then it is walked again, and only once if nothing has changed
    assert len(tested.finishing.asked) == before + 2
    tested.finish(copied(4, 100))
    assert len(tested.finishing.asked) == before + 3
    # and what was found stays where the process has executed another program meanwhile
    monkeypatch.setattr(module, "beginning", lambda _: (0, START_STACK - 16))
    assert tested.finish(copied(5, 100)) == [(5, Walked.STUCK)]


def test_a_process_that_loads_a_library_keeps_its_rules(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested.finish(copied(1, 100))
    grown(monkeypatch, MORE)
    tested.finish(changed(copied(2, 100), exec_vm=3))
    assert spaces_of(tested) == [1, 1]
    # but another process, which has not loaded it, has another space, and vice versa
    grown(monkeypatch, MAPPED)
    tested.finish(copied(3, 200))
    grown(monkeypatch, MORE)
    tested.finish(changed(copied(4, 300), exec_vm=3))
    assert spaces_of(tested) == [1, 1, 2, 1]
    # so that one of two with the same code gets a space of its own, with their rules, when it loads more
    grown(monkeypatch, (*MORE, Mapping(0xB000, 0xC000, 0, 2)))
    tested.finish(changed(copied(5, 300), exec_vm=4))
    assert spaces_of(tested)[-1] == 3
    assert tested.table.copied == [(1, 3, [(0x1000, 0x2000), (0x9000, 0xA000)])]


def test_a_process_that_unloads_a_library_keeps_the_rules_of_the_others(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a process that has another library at the addresses of one that it had before
    grown(monkeypatch, MORE)
    tested.finish(copied(1, 100))
    grown(monkeypatch, (*MAPPED, Mapping(0x9000, 0xA000, 0, 7)))
    tested.spaces.now = 2
    # when
    tested.finish(changed(copied(2, 100), unloads=2))
    # then
    assert spaces_of(tested) == [1, 2, 2]  # before the stack is finished, and with its rules
    assert tested.table.copied == [(1, 2, [(0x1000, 0x2000)])]


def test_a_library_that_was_unloaded_meanwhile_teaches_nothing(tested: LearnerUnderTest) -> None:
    # given
    tested.spaces.now = 2  # and the copy says 1
    # then its copies are given back
    assert tested.finish(copied(1, 100)) == [1]
    assert tested.table.written == []
    assert tested.spaces.calls == []


def test_a_process_that_is_gone_leaves_its_copies_to_the_recording_s_end(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "executable", lambda pid, images: ())
    assert tested.finish(copied(1, 100), copied(2, 100)) == [1, 2]


def test_a_process_whose_files_break_the_reader_waits_and_others_do_not(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given
    tested.finishing.answer = IaprofError("the child died")
    numbers = range(MOST_FAILURES + 3)
    for number in numbers:
        assert tested.finish(copied(number, 100)) == [number]  # for the recording's end
    assert tested.finish(copied(49, 100, is_sample=True)) == [49]
    assert len(tested.finishing.asked) == MOST_FAILURES
    # then BPF sends no more of its copies
    assert tested.spaces.done[100] >> 63
    # when
    tested.finishing.answer = WHOLE
    # then
    assert sorted(map(str, tested.finish(copied(50, 100), copied(51, 101)))) == sorted(map(str, [50, *whole([51])]))
    # and not forever, even if none comes
    monkeypatch.setattr(module, "FORGET_FAILURES_S", 0.0)
    assert tested.learner.has_work
    assert tested.learner.step() == []
    assert not tested.spaces.done[100] >> 63
    assert tested.finish(copied(52, 100)) == whole([52])


def test_a_process_whose_interpreters_break_the_reader_waits(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    class Breaking:
        failures = 0

        def search(self, pid: int, born: int, mappings: object) -> list[bytes]:
            looked.append(pid)
            self.failures += 1
            return []

    tested.learner._interpreters = Breaking()  # type: ignore[assignment]
    for _ in range(MOST_FAILURES + 3):
        tested.learner.prepare(100, will_launch=False)
        tested.learner.prepare(100, will_launch=False)  # which is the same request
        tested.learner.step()
        assert not tested.learner.has_work
    assert looked == [100] * MOST_FAILURES
    tested.learner.prepare(200, will_launch=False)
    tested.learner.step()
    assert looked[-1] == 200


def test_interpreters_are_looked_for_when_no_launch_waits_and_only_so_long(tested: LearnerUnderTest) -> None:
    now = [0.0]
    tested.learner._search_budget = Budget(0.1, 1.0, lambda: now[0])
    tested.learner.prepare(300, will_launch=False)
    tested.learner.take(copied(1, 100))
    assert len(tested.learner.step()) == 1
    assert tested.learner.has_work
    with tested.learner._search_budget.spent():
        now[0] += 1.5
    assert not tested.learner.has_work
    assert tested.learner.poll_timeout_ms == pytest.approx(1000 * (1.5 - 1 - 0.1 * 1.5) / 0.1)


def test_files_are_read_ahead_piece_by_piece_when_no_stack_waits(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a process with three images, of which one was opened before
    mapped = tuple(Mapping(start, start + 10, 0, image) for image, start in enumerate((100, 200, 300)))
    grown(monkeypatch, mapped)
    left, done = {0: 2, 2: 1}, list[tuple[str, int]]()

    def prepare(image: int) -> bool:
        done.append(("open", image))
        return image in left

    def read_ahead(image: int) -> bool:
        done.append(("read", image))
        left[image] -= 1
        return left[image] > 0

    monkeypatch.setattr(tested.finishing, "prepare", prepare, raising=False)
    monkeypatch.setattr(tested.finishing, "read_ahead", read_ahead, raising=False)
    # when
    tested.learner.prepare(100, will_launch=True)
    while tested.learner.has_work:
        before = len(done)
        tested.learner.step()
        if len(done) == before + 1 == 4:  # a stack comes
            tested.learner.take(copied(1, 100))
            assert list(map(_read, tested.learner.step())) == whole([1])
            assert len(done) == 4
    # then
    assert done == [*(("open", image) for image in range(3)), ("read", 0), ("read", 2), ("read", 0)]


def test_a_process_whose_files_take_too_long_has_no_more_of_them_read(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def prepare(image: int) -> bool:
        asked.append(image)
        raise IaprofError("it is slow")

    monkeypatch.setattr(tested.finishing, "prepare", prepare, raising=False)
    grown(monkeypatch, tuple(Mapping(start, start + 10, 0, start) for start in range(100, 200, 10)))
    tested.learner.prepare(100, will_launch=True)
    while tested.learner.has_work:
        tested.learner.step()
    assert asked == [*range(100, 200, 10)][:MOST_FAILURES]
    # and it is not asked again, but another process is
    tested.learner.prepare(100, will_launch=True)
    tested.learner.prepare(200, will_launch=True)
    while tested.learner.has_work:
        tested.learner.step()
    assert len(asked) == 2 * MOST_FAILURES


def test_a_user_whose_processes_break_the_reader_waits_and_others_do_not(tested: LearnerUnderTest) -> None:
    # given
    tested.finishing.answer = IaprofError("the child died")
    numbers = range(MOST_FAILURES_OF_A_USER + 3)
    assert tested.finish(*(copied(number, 100 + number) for number in numbers)) == [*numbers]
    assert len(tested.finishing.asked) == MOST_FAILURES_OF_A_USER
    assert len(tested.spaces.copied_again) == MOST_FAILURES_OF_A_USER - 1
    # when
    tested.finishing.answer = WHOLE
    # then
    assert sorted(map(str, tested.finish(copied(50, 199), copied(51, 200)))) == sorted(map(str, [50, *whole([51])]))


def test_a_process_that_has_changed_is_no_failure(tested: LearnerUnderTest) -> None:
    tested.finishing.answer = ImageGone("it is gone")
    found = tested.finish(*(copied(number, 100) for number in range(MOST_FAILURES + 3)))
    assert found == list(range(MOST_FAILURES + 3))
    # and each stack's end may be copied again, as it is now
    assert len(tested.spaces.copied_again) == len(found)


def test_a_copy_of_which_the_end_is_missing_is_finished_when_no_more_comes(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tested.finish(copied(1, 100)[:1]) == []
    assert tested.learner.poll_timeout_ms
    monkeypatch.setattr(module, "STALE_S", 0.0)
    assert tested.finish(copied(2, 100)[:0]) == whole([1])
    assert tested.learner.poll_timeout_ms is None


def test_a_copy_of_which_a_needed_page_is_missing_stays_unfinished(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given copies without their ends, as the ring buffer was full
    monkeypatch.setattr(module, "STALE_S", 0.0)
    # when a walk needs more, or the process is gone, so that the recording's end would walk the same
    tested.finishing.answer = finished(Walked.MEMORY)
    assert tested.finish(copied(1, 100)[:1]) == []
    tested.finishing.answer = ImageGone("it is gone")
    assert tested.finish(copied(2, 100)[:1]) == []
    # then a complete copy is not concerned
    assert tested.finish(copied(3, 100)) == [3]


def test_copies_that_a_busy_machine_has_no_time_for_are_left_to_the_recording_s_end(
    tested: LearnerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given copies of two launches' stacks and a CPU sample's, another launch's without its end, and no time for any
    copies = np.concatenate([copied(1, 100), copied(2, 100, is_sample=True), copied(3, 200), copied(4, 200)[:1]])
    readable, _writable = os.pipe()
    ring: Any = SimpleNamespace(misfits=0, fileno=lambda: readable, read=lambda _: copies)
    recorder, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setattr(module, "ENDING_S", 0.0)
    monkeypatch.setattr(tested.learner, "step", list)
    # when the recording ends
    recorder.shutdown(socket.SHUT_WR)
    module._serve(tested.learner, ring, channel)
    channel.close()
    # then the copies come back
    messages = list(iter(lambda: recorder.recv(1 << 16), b""))
    assert messages[0] == READY
    assert [_read(message) for message in messages[1:]] == [1, 3, 2]


def test_copies_of_another_length_are_reported() -> None:
    # given a ring buffer with two of them, and a recorder that ends
    class Ring:
        misfits = 0

        def fileno(self) -> int:
            return there

        def read(self, _: int) -> np.ndarray:
            with contextlib.suppress(BlockingIOError):
                self.misfits += len(os.read(there, 100))
            recorder.shutdown(socket.SHUT_WR)
            return np.zeros(0, COPY)

    there, kernel = os.pipe()
    os.set_blocking(there, False)
    os.write(kernel, b"12")
    recorder, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    idle: Any = SimpleNamespace(
        has_work=False, poll_timeout_ms=-1, is_ending=False, take=lambda _: None, rest=list, room=9
    )
    ring: Any = Ring()
    # when
    module._serve(idle, ring, channel)
    # then
    assert [recorder.recv(100) for _ in range(3)] == [READY, MISFIT, MISFIT]
