"""How many stacks are whole, out of headers that may be anyone's."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from iaprof.formats.header.stack_counts import MOST_PROCESSES, LibraryEnd, ProcessEnd, WholeStacks, recorded

SOME = WholeStacks.from_counts(
    3,
    2,
    Counter({f"lib{number}": number for number in range(1, 70)}),
    [ProcessEnd(pid, 40, pid) for pid in range(40)],
    deep=1,
    guessed=4,
    late=5,
    presumed=6,
)


def test_what_was_written_is_read() -> None:
    assert SOME.more > 0
    assert WholeStacks.from_json(SOME.to_json()) == SOME


def test_libraries_that_have_one_name_after_redaction_are_added_up() -> None:
    redacted = SOME.to_json()
    redacted["ends"] = [{**end, "library": None} for end in redacted["ends"]]
    part = WholeStacks.from_json(redacted)
    assert part is not None
    both = WholeStacks.total([part, SOME])
    assert (both.stacks, both.early) == (2 * SOME.stacks, 2 * SOME.early)
    assert both.ends[0] == LibraryEnd("[redacted]", SOME.early - SOME.more)


def test_the_processes_with_the_most_stacks_that_end_early_are_told() -> None:
    assert SOME.processes == tuple(ProcessEnd(pid, 40, pid) for pid in range(39, 39 - MOST_PROCESSES, -1))
    assert ", in process 39 (39 of 40), 38 (38 of 40), 37 (37 of 40), and 17 more; " in SOME.text("launches")
    # but not of several captures, which may be of several hosts
    assert WholeStacks.total([SOME]).processes == SOME.processes
    assert WholeStacks.total([SOME, SOME]).processes == ()


@pytest.mark.parametrize(
    "wrong",
    [
        [{"pid": 1, "stacks": 3, "count": 4}],
        [{"pid": -1, "stacks": 3, "count": 3}],
        [{"pid": "1", "stacks": 3, "count": 3}],
        {"pid": 1, "stacks": 3, "count": 3},
        [None],
    ],
)
def test_processes_that_cannot_be_true_are_left_out(wrong: object) -> None:
    found = WholeStacks.from_json(SOME.to_json() | {"processes": wrong})
    assert found is not None
    assert found.processes == ()


def test_what_is_not_quite_known_is_said() -> None:
    said = SOME.text("launches")
    assert "; 6 have the stack of another one that looked the same" in said
    assert "; 5 were finished when the recording had ended" in said


CPU = WholeStacks.from_counts(
    87,
    2,
    Counter({"libfoo.so": 9, "python3": 1}),
    [ProcessEnd(7, 80, 9, deep=3, guessed=4), ProcessEnd(8, 20, 1), ProcessEnd(7, 0, 0, late=5), ProcessEnd(9, 0, 0)],
    deep=3,
    guessed=4,
    late=5,
    presumed=1,
    deep_in={"libfoo.so": 3},
    guesses=Counter({"libbar.so": 4}),
    guessed_early=1,
)


def test_all_of_it_as_lines() -> None:
    assert WholeStacks.from_json(CPU.to_json()) == CPU
    assert (CPU.stacks, CPU.early, CPU.cut, CPU.to_json()["cut"]) == (100, 10, 4, 4)
    assert list(CPU.facts("CPU stacks", "CPU samples")) == [
        (
            "CPU stacks",
            "87 of 100 CPU samples (87.0 %) have a whole stack, 4 (4.0 %) a guessed one, 4 (4.0 %) are cut, 3 (3.0 %) "
            "are too deep, 2 (2.0 %) may be whole or cut; of the guessed ones, 1 end early; 1 has the stack of "
            "another one that looked the same; 5 were finished when the recording had ended",
        ),
        ("  end in", "libfoo.so (9), python3 (1)"),
        ("  guessed in", "libbar.so (4)"),
        ("  process", "7: 9 of 80 end early, 3 of these too deep, 4 with guessed callers, 5 finished late"),
        ("  process", "8: 1 of 20 end early"),
    ]
    assert list(SOME.facts("x", "launches"))[-1] == ("", "and at least 17 processes more")
    assert list(WholeStacks.from_counts(0, 0, Counter()).facts("x", "launches")) == []


def test_in_short() -> None:
    assert CPU.short("CPU samples") == (
        "87 of 100 CPU samples (87.0 %) have a whole stack, 4 (4.0 %) a guessed one, 4 (4.0 %) are cut, 3 (3.0 %) "
        "are too deep, 2 (2.0 %) may be whole or cut, 1 of the guessed end early, 1 presumed, 5 finished late"
    )
    assert WholeStacks.from_counts(7, 0, Counter()).short("launches") == "7 of 7 launches (100.0 %) have a whole stack"


def test_shares_add_up_to_all() -> None:
    # as the issue has it; then thirds, of which no rounding for itself adds up; then next to nothing of much
    issue = WholeStacks.from_counts(921, 0, Counter({"libfoo.so": 29}), guessed=50)
    assert issue.short("launches") == (
        "921 of 1,000 launches (92.1 %) have a whole stack, 50 (5.0 %) a guessed one, 29 (2.9 %) are cut"
    )
    thirds = WholeStacks.from_counts(1, 0, Counter({"libfoo.so": 1}), guessed=1).short("launches")
    assert sorted(re.findall(r"\(([0-9.]+) %\)", thirds)) == ["33.3", "33.3", "33.4"]
    few = WholeStacks.from_counts(9_999_999, 0, Counter(), guessed=1).short("launches")
    assert few == "9,999,999 of 10,000,000 launches (99.9+ %) have a whole stack, 1 (<0.1 %) a guessed one"
    none = WholeStacks.from_counts(0, 0, Counter(), guessed=2).short("launches")
    assert none == "0 of 2 launches (0.0 %) have a whole stack, 2 (100.0 %) a guessed one"


# A header of format 6 to 9 as it was written before guessed stacks were counted apart.
OLD = {
    "stacks": 100, "whole": 90, "unknown": 1, "ends": [{"library": "libfoo.so", "count": 10, "deep": 2}], "more": 0,
    "deep": 2, "guessed": 4, "late": 0, "presumed": 0, "cut": 7,
    "guesses": [{"library": "libbar.so", "count": 4}], "processes": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("guessed", "kinds"),
    [
        (0, (90, 0, 7, 2, 1)),
        (4, (86, 4, 7, 2, 1)),
        (95, (0, 95, 2, 2, 1)),  # 5 guessed stacks did not reach the start
        (100, (0, 100, 0, 0, 0)),
    ],
)
def test_headers_that_counted_guessed_stacks_as_whole(guessed: int, kinds: tuple[int, ...]) -> None:
    found = WholeStacks.from_json(OLD | {"guessed": guessed})
    # then what it says for certain stays: how many have a stack, a guess, and how many do not reach the start
    assert found is not None
    assert (found.stacks, found.guessed, found.early) == (100, guessed, 10)
    # and as many as possible of the guessed ones are taken from those that it calls whole
    assert (found.whole, found.guessed, found.cut, found.deep, found.unknown) == kinds
    assert sum(kinds) == 100
    assert WholeStacks.from_json(found.to_json()) == found


def test_processes_that_only_were_finished_late_are_told_but_do_not_end_early() -> None:
    told = WholeStacks.from_counts(3, 0, Counter(), [ProcessEnd(7, 3, 0), ProcessEnd(7, 0, 0, late=2)], late=2)
    assert told.processes == (ProcessEnd(7, 3, 0, late=2),)
    assert "process" not in told.text("launches")


def test_what_was_recorded_in_all_parts() -> None:
    one = {"stack_ends": {"launches": SOME.to_json(), "cpu_samples": CPU.to_json()}}
    assert recorded(one) == {"launches": SOME, "cpu_samples": CPU}
    both = recorded({"parts": [one, {}, {"stack_ends": {"launches": SOME.to_json(), "cpu_samples": 7}}]})
    assert both["launches"] == WholeStacks.total([SOME, SOME])
    assert both["cpu_samples"] == CPU
    twice = WholeStacks.total([CPU, CPU])
    assert (twice.guesses, twice.ends[0]) == ((LibraryEnd("libbar.so", 8),), LibraryEnd("libfoo.so", 18, 6))


@pytest.mark.parametrize(
    "header", [{}, {"stack_ends": 7}, {"parts": [7]}, {"parts": 7, "stack_ends": {"launches": []}}]
)
def test_headers_from_anyone(header: dict[str, Any]) -> None:
    assert recorded(header) == {}


@pytest.mark.parametrize("wrong", [{"library": 7, "count": 1}, {"library": "x", "count": -1}, 7])
def test_guesses_that_cannot_be_true_are_left_out(wrong: object) -> None:
    found = WholeStacks.from_json(CPU.to_json() | {"guesses": [wrong]})
    assert found is not None
    assert found.guesses == ()


@pytest.mark.parametrize("wrong", [{"late": 81}, {"late": -1}, {"guessed": "4"}, {"deep": True}])
def test_processes_with_counts_that_cannot_be_true_are_left_out(wrong: dict[str, Any]) -> None:
    told = CPU.to_json()
    told["processes"] = [told["processes"][0] | wrong, told["processes"][1]]
    found = WholeStacks.from_json(told)
    assert found is not None
    assert found.processes == (ProcessEnd(8, 20, 1),)


@pytest.mark.parametrize(
    "wrong",
    [
        {"whole": SOME.stacks + 1},
        {"unknown": SOME.stacks},
        {"more": 0},
        {"ends": []},
        {"guessed_early": 5},
        {"guessed_early": -1},
        {"guessed_early": True},
        {"guessed": 5},
    ],
)
def test_counts_that_do_not_add_up_are_not_believed(wrong: dict[str, Any]) -> None:
    assert WholeStacks.from_json(SOME.to_json() | wrong) is None
