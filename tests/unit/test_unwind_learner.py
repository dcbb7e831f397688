"""The learner's order of work: processes take turns, what is too much is left out, and who breaks its reader waits."""

from __future__ import annotations

import contextlib
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
from iaprof.record.unwinding.budget import Budget
from iaprof.record.unwinding.learner import (
    MISFIT,
    MOST_FAILURES_OF_A_USER,
    MOST_SAMPLES,
    MOST_WAITING,
    READY,
    Learner,
)
from iaprof.record.unwinding.mappings import ImageGone
from iaprof.record.unwinding.misses import MOST_FAILURES
from iaprof.symbols.unwind.code import Mapping
from iaprof.symbols.unwind.finishing import Finished
from iaprof.symbols.unwind.walk import Found

DEPTH, TOP = 8, 0x7FFF_0000_1000
WHOLE = Finished([1], [Found.INTERRUPTED], Walked.WHOLE)
GUESS, INSTRUCTION, BLOCK = Rule(RuleKind.BY_RBX, 8, 0, RuleFlags.GUESS), RuleScope.INSTRUCTION, RuleScope.BLOCK
MAPPED = (Mapping(0x1000, 0x2000, 0, 0),)


def copied(number: int, pid: int, is_sample: bool = False) -> np.ndarray:
    """COPY[2] of a stack of one page."""
    records = np.zeros(2, COPY)
    records["is_sample"] = is_sample
    records["id"], records["pid"], records["way"], records["depth"] = number, pid, 100 + number, 1
    records["address"], records["start"]["sp"] = [TOP, 0], TOP + 8
    records["of"] = (0, 1, 2, 0)
    return records


class Table:
    """Rules that were written."""

    bits, is_crowded = 10, False

    def __init__(self) -> None:
        self.written: list[tuple[int, int, RuleKind]] = []

    def write(self, space: int, address: int, scope: RuleScope, rule: Rule) -> None:
        self.written.append((space, address, rule.kind))


class Spaces:
    """What BPF would be told of processes and ways."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        self.times_loaded = 0

    def loads(self, pid: int) -> int:
        return self.times_loaded

    def set(self, pid: int, generation: object, space: int, bits: int) -> None:
        self.said.append(("space", space))

    def arrived(self, way: int) -> None:
        self.said.append(("arrived", way))

    def stays(self, way: int, number: int, until: int) -> None:
        self.said.append(("stays", way))


class Finishing:
    """Answers as it is told to."""

    def __init__(self) -> None:
        self.answer: Finished | Exception = Finished([1, 2], [Found.INTERRUPTED, Found.BY_RULE], Walked.WHOLE)
        self.asked = 0

    def finish(self, *of: Any) -> Finished:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Tried:
    """A learner without its children."""

    def __init__(self) -> None:
        self.table, self.spaces, self.finishing = Table(), Spaces(), Finishing()
        self.learner = Learner(self.table, self.spaces, DEPTH, 1, -1)  # type: ignore[arg-type]
        self.learner._finishing = self.finishing  # type: ignore[assignment]

    def finish(self, *copies: np.ndarray) -> list[tuple[int, Walked] | int]:
        """Id and end of each stack that it finished, and ids of copies that it gave back, in its order."""
        self.learner.take(np.concatenate(copies))
        messages: list[bytes] = []
        while self.learner.waits:
            messages += self.learner.next()
        return [_read(message) for message in messages]


def _read(message: bytes) -> tuple[int, Walked] | int:
    if len(message) == COPY.itemsize:
        return int(np.frombuffer(message, COPY)["id"][0])
    (record,) = np.frombuffer(message, stack_dtype(DEPTH))
    return int(record["id"]), Walked(int(record["walked"]))


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Tried:
    monkeypatch.setattr(module, "executable", lambda pid, images: MAPPED)
    monkeypatch.setattr(module, "_born", lambda pid: 0)
    monkeypatch.setattr(module, "rights_of", lambda pid: Rights(pid // 100, 0))
    return Tried()


def whole(numbers: Sequence[int]) -> list[tuple[int, Walked]]:
    return [(number, Walked.WHOLE) for number in numbers]


def test_processes_take_turns(tried: Tried) -> None:
    assert tried.finish(*(copied(number, 100) for number in (1, 2, 3)), copied(4, 200)) == whole([1, 4, 2, 3])


def test_cpu_samples_take_no_more_than_their_share_of_the_time(tried: Tried) -> None:
    # given no time is left for them
    now = [0.0]
    tried.learner._for_samples = Budget(0.1, 1.0, lambda: now[0])
    with tried.learner._for_samples.spent():
        now[0] += 1.5
    # when both come, only the launch's is finished
    assert tried.finish(copied(1, 100, is_sample=True), copied(2, 100)) == whole([2])
    assert tried.learner.patience_ms == pytest.approx(1000 * (1.5 - 1 - 0.1 * 1.5) / 0.1)
    # but later, or when the recording ends
    now[0] += 10
    assert tried.finish(copied(3, 200)) == whole([3, 1])
    with tried.learner._for_samples.spent():
        now[0] += 20
    assert tried.finish(copied(4, 100, is_sample=True)) == []
    tried.learner.is_ending = True
    assert tried.finish(copied(5, 200)) == whole([5, 4])


def test_cpu_samples_wait_until_no_launch_does(tried: Tried) -> None:
    copies = [copied(number, 100, is_sample=True) for number in range(1, MOST_SAMPLES + 2)]
    found = tried.finish(*copies, copied(1000, 100), copied(1001, 200))
    assert found == whole([1000, 1001, *range(2, MOST_SAMPLES + 2)])


def test_the_recorder_waits_only_for_what_came_before_it_asked(tried: Tried) -> None:
    tried.learner.take(np.concatenate([copied(1, 100), copied(2, 100)]))
    asked = time.monotonic()
    tried.learner.take(copied(3, 200))
    found = []
    while not tried.learner.is_done_with(asked):
        found += [_read(message) for message in tried.learner.next()]
    assert found == whole([1, 3, 2])
    assert tried.learner.is_done_with(asked)


def test_of_the_process_with_the_most_copies_the_oldest_are_left_out(tried: Tried) -> None:
    copies = [copied(number, 100) for number in range(1, MOST_WAITING + 3)]
    found = tried.finish(copied(0, 200), *copies)
    # and the recording's end gets them
    assert found[:3] == [1, 2, 3]
    finished = [each for each in found if isinstance(each, tuple)]
    assert len(finished) == MOST_WAITING
    assert finished[:2] == whole([0, 4])


def test_a_path_is_walked_in_bpf_from_then_on_only_if_its_rules_lead_to_its_end(tried: Tried) -> None:
    at = (1, RuleScope.INSTRUCTION)
    tried.finishing.answer = Finished([1], [Found.INTERRUPTED], Walked.WHOLE, {at: Rule(RuleKind.END)})
    tried.finish(copied(1, 100))
    assert tried.table.written == [(1, 1, RuleKind.END)]
    tried.finishing.answer = Finished([1], [Found.INTERRUPTED], Walked.WHOLE, {at: HARD})
    tried.finish(copied(2, 100))
    tried.finishing.answer = Finished([1], [Found.INTERRUPTED], Walked.STUCK)
    tried.finish(copied(3, 100))
    assert [said for said in tried.spaces.said if said[0] != "space"] == [
        ("arrived", 101),
        ("stays", 102),
        ("stays", 103),
    ]


def test_a_guess_for_a_block_becomes_a_rule_when_it_is_made_twice_alike(tried: Tried) -> None:
    other = GUESS._replace(cfa=24)
    for number, rules in enumerate(
        (
            {(1, INSTRUCTION): GUESS, (64, BLOCK): GUESS, (128, BLOCK): GUESS},
            {(2, INSTRUCTION): GUESS, (64, BLOCK): GUESS, (128, BLOCK): other},
            {(3, INSTRUCTION): GUESS, (128, BLOCK): GUESS},
        )
    ):
        tried.finishing.answer = Finished([1], [Found.INTERRUPTED], Walked.WHOLE, rules)
        tried.finish(copied(number, 100))
    # an instruction's own holds at once, what was found otherwise once never
    assert [address for _, address, _ in tried.table.written] == [1, 2, 64, 3]
    assert [said for said, _ in tried.spaces.said if said != "space"] == ["arrived"] * 3


def test_mappings_are_read_again_where_a_stack_leads_to_none_of_them(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a process whose code grows without the kernel counting it
    tried.finish(copied(1, 100))
    grown = (*MAPPED, Mapping(0x9000, 0xA000, 0, -1))
    monkeypatch.setattr(module, "executable", lambda pid, images: grown)
    tried.finish(copied(2, 100))
    # when a stack leads there
    tried.finishing.answer = Finished([1], [Found.INTERRUPTED], Walked.STUCK, met_unknown=True)
    before = tried.finishing.asked
    tried.finish(copied(3, 100))
    # then it is walked again, in another space
    assert tried.finishing.asked == before + 2
    assert [space for said, space in tried.spaces.said if said == "space"] == [1, 1, 2]
    # and once only if nothing has changed
    tried.finish(copied(4, 100))
    assert tried.finishing.asked == before + 3


def test_a_library_that_was_loaded_meanwhile_teaches_nothing(tried: Tried) -> None:
    # given
    tried.spaces.times_loaded = 1  # and the copy says 0
    # then the recording's end gets it
    assert tried.finish(copied(1, 100)) == [1]
    assert tried.table.written == []
    assert tried.spaces.said == []


def test_a_process_that_is_gone_leaves_its_copies_to_the_recording_s_end(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "executable", lambda pid, images: ())
    assert tried.finish(copied(1, 100), copied(2, 100)) == [1, 2]


def test_a_process_whose_files_break_the_reader_waits_and_others_do_not(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given
    tried.finishing.answer = IaprofError("the child died")
    numbers = range(MOST_FAILURES + 3)
    assert tried.finish(*(copied(number, 100) for number in numbers)) == [*numbers]  # for the recording's end
    assert tried.finish(copied(49, 100, is_sample=True)) == []
    assert tried.finishing.asked == MOST_FAILURES
    # when
    tried.finishing.answer = WHOLE
    # then
    assert tried.finish(copied(50, 100), copied(51, 101)) == [50, *whole([51])]
    # and not for ever
    monkeypatch.setattr(module, "FORGIVEN_S", 0.0)
    assert tried.finish(copied(52, 100)) == whole([52])


def test_a_process_whose_interpreters_break_the_reader_waits(tried: Tried, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    class Breaking:
        failures = 0

        def look(self, pid: int, born: int, mappings: object) -> list[bytes]:
            looked.append(pid)
            self.failures += 1
            return []

    tried.learner._interpreters = Breaking()  # type: ignore[assignment]
    for _ in range(MOST_FAILURES + 3):
        tried.learner.look_for_python(100)
        tried.learner.look_for_python(100)  # which is the same request
        tried.learner.next()
        assert not tried.learner.waits
    assert looked == [100] * MOST_FAILURES
    tried.learner.look_for_python(200)
    tried.learner.next()
    assert looked[-1] == 200


def test_interpreters_are_looked_for_when_no_launch_waits_and_only_so_long(tried: Tried) -> None:
    now = [0.0]
    tried.learner._for_looks = Budget(0.1, 1.0, lambda: now[0])
    tried.learner.look_for_python(300)
    tried.learner.take(copied(1, 100))
    assert len(tried.learner.next()) == 1
    assert tried.learner.waits
    with tried.learner._for_looks.spent():
        now[0] += 1.5
    assert not tried.learner.waits
    assert tried.learner.patience_ms == pytest.approx(1000 * (1.5 - 1 - 0.1 * 1.5) / 0.1)


def test_a_user_whose_processes_break_the_reader_waits_and_others_do_not(tried: Tried) -> None:
    # given
    tried.finishing.answer = IaprofError("the child died")
    numbers = range(MOST_FAILURES_OF_A_USER + 3)
    assert tried.finish(*(copied(number, 100 + number) for number in numbers)) == [*numbers]
    assert tried.finishing.asked == MOST_FAILURES_OF_A_USER
    # when
    tried.finishing.answer = WHOLE
    # then
    assert tried.finish(copied(50, 199), copied(51, 200)) == [50, *whole([51])]


def test_that_a_process_changed_is_nobody_s_failure(tried: Tried) -> None:
    tried.finishing.answer = ImageGone("it is gone")
    found = tried.finish(*(copied(number, 100) for number in range(MOST_FAILURES + 3)))
    assert found == list(range(MOST_FAILURES + 3))


def test_a_copy_of_which_the_end_is_missing_is_finished_when_no_more_comes(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried.finish(copied(1, 100)[:1]) == []
    assert tried.learner.patience_ms
    monkeypatch.setattr(module, "STALE_S", 0.0)
    assert tried.finish(copied(2, 100)[:0]) == whole([1])
    assert tried.learner.patience_ms is None


def test_copies_of_another_length_are_told() -> None:
    # given a ring buffer with two of them, and a recorder that ends
    class Ring:
        misfits = 0

        def fileno(self) -> int:
            return there

        def read(self) -> np.ndarray:
            with contextlib.suppress(BlockingIOError):
                self.misfits += len(os.read(there, 100))
            recorder.shutdown(socket.SHUT_WR)
            return np.zeros(0, COPY)

    there, kernel = os.pipe()
    os.set_blocking(there, False)
    os.write(kernel, b"12")
    recorder, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    idle: Any = SimpleNamespace(waits=False, patience_ms=-1, is_ending=False, take=lambda _: None)
    ring: Any = Ring()
    # when
    module._serve(idle, ring, channel)
    # then
    assert [recorder.recv(100) for _ in range(3)] == [READY, MISFIT, MISFIT]
