"""How many stacks are whole, out of headers that may be anyone's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from iaprof.formats.whole_stacks import LibraryEnd, WholeStacks

SOME = WholeStacks.of(3, 2, Counter({f"lib{number}": number for number in range(1, 70)}))


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


@pytest.mark.parametrize("wrong", [{"whole": SOME.stacks + 1}, {"unknown": SOME.stacks}, {"more": 0}, {"ends": []}])
def test_counts_that_do_not_add_up_are_not_believed(wrong: dict[str, Any]) -> None:
    assert WholeStacks.from_json(SOME.to_json() | wrong) is None
