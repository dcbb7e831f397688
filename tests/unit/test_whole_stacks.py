"""How many stacks are whole, out of headers that may be anyone's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from iaprof.formats.whole_stacks import MOST_PROCESSES, LibraryEnd, ProcessEnd, WholeStacks

SOME = WholeStacks.of(
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
    both = WholeStacks.together([part, SOME])
    assert (both.stacks, both.others) == (2 * SOME.stacks, 2 * SOME.others)
    assert both.ends[0] == LibraryEnd("[redacted]", SOME.others - SOME.more)


def test_the_processes_with_the_most_stacks_that_end_early_are_told() -> None:
    assert SOME.processes == tuple(ProcessEnd(pid, 40, pid) for pid in range(39, 39 - MOST_PROCESSES, -1))
    assert ", in process 39 (39 of 40), 38 (38 of 40), 37 (37 of 40), and 17 more; " in SOME.text("launches")
    # but not of several captures, which may be of several hosts
    assert WholeStacks.together([SOME]).processes == SOME.processes
    assert WholeStacks.together([SOME, SOME]).processes == ()


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


@pytest.mark.parametrize("wrong", [{"whole": SOME.stacks + 1}, {"unknown": SOME.stacks}, {"more": 0}, {"ends": []}])
def test_counts_that_do_not_add_up_are_not_believed(wrong: dict[str, Any]) -> None:
    assert WholeStacks.from_json(SOME.to_json() | wrong) is None
