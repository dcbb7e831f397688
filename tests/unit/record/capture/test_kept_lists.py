# SPDX-License-Identifier: Apache-2.0
"""Command lists that others include: the next file has as many as the lists that are still filled."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.formats.wire.launches import LIST_EVENT, ListEvent
from iaprof.record.capture import rotation_state
from iaprof.record.capture.rotation_state import KeptLists

INNER, OUTER = 0x5000, 0x6000


def event(what: ListEvent, time: int, *lists: int, queue: int = 0) -> NDArray[np.void]:
    row = np.zeros(1, LIST_EVENT)
    row["event"], row["time"], row["pid"], row["queue"], row["count"] = what, time, 7, queue, len(lists)
    row["lists"][0, : len(lists)] = lists
    return row


def kept(*events: NDArray[np.void]) -> Counter[tuple[ListEvent, int, int]]:
    lists = KeptLists()
    for each in events:
        lists.add_events(each)
    _, rows = lists.current()
    again = KeptLists()
    again.add_events(rows)
    assert (again.current()[1] == rows).all()
    return Counter((ListEvent(int(row["event"])), int(row["lists"][0]), int(row["time"])) for row in rows)


def test_all_lists_that_a_list_includes_are_kept_until_it_is_reset() -> None:
    old = [event(ListEvent.INCLUDE, 1, INNER, queue=OUTER), event(ListEvent.RESET, 2, OUTER)]
    new = [event(ListEvent.INCLUDE, 3, INNER, INNER, queue=OUTER), event(ListEvent.INCLUDE, 4, INNER, queue=OUTER)]
    assert kept(*old, *new) == {
        (ListEvent.RESET, OUTER, 2): 1,
        (ListEvent.INCLUDE, INNER, 3): 2,
        (ListEvent.INCLUDE, INNER, 4): 1,
    }


def test_a_list_that_includes_others_for_ever_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation_state, "MOST_APPENDED", 10)
    lists = KeptLists()
    for time in range(1, 101):
        lists.add_events(event(ListEvent.INCLUDE, time, INNER, queue=OUTER))
    assert [int(row["time"]) for row in lists.current()[1]] == list(range(91, 101))
    assert lists.dropped == 90
