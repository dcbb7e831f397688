"""Events of several kinds come in order of time, without one sort of all of them."""

from __future__ import annotations

import tracemalloc
from unittest import mock

import numpy as np
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from iaprof.timelines.outputs import event_order
from iaprof.timelines.outputs.event_order import EventKind, EventOrder


def kind(times: NDArray[np.int64]) -> EventKind:
    return EventKind(len(times), lambda span: times[span])


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(-5, 30), st.integers(0, 3))), max_size=4),
    st.sampled_from([1, 3, 1 << 16]),
    st.sampled_from([1, 4, 1 << 19]),
    st.sampled_from([1, 3, 1 << 15]),
)
def test_chunks_are_parts_of_the_order_of_all_events(
    kinds: list[list[tuple[int, int]]], block: int, window: int, at_once: int
) -> None:
    # given
    columns = [np.array(each, np.int64).reshape(-1, 2).T for each in kinds]
    times = np.concatenate([np.zeros(0, np.int64), *(each[0] for each in columns)])
    keys = np.concatenate([np.zeros(0, np.int64), *(each[1] for each in columns)])
    # when
    with mock.patch.multiple(event_order, _BLOCK=block, _WINDOW=window, _SAMPLED=1):
        order = EventOrder([kind(each[0]) for each in columns])
        found = list(order.chunks(lambda events: keys[events], at_once))
    # then
    assert [number for events, _ in found for number in events.tolist()] == np.lexsort((keys, times)).tolist()
    assert all((times[events] == at).all() for events, at in found)
    assert all(len(events) == at_once for events, _ in found[:-1])
    assert order.earliest == min(times.tolist(), default=0)


def test_ordering_takes_memory_for_a_window_of_events_only() -> None:
    # given
    count = 1 << 20
    times = np.arange(count)
    # when
    with mock.patch.multiple(event_order, _BLOCK=1 << 13, _WINDOW=1 << 15):
        tracemalloc.start()
        seen = sum(len(events) for events, _ in EventOrder([kind(times)]).chunks(lambda events: events, 1 << 12))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # then: the numbers of all events alone would take 8 MiB
    assert seen == count
    assert most < 6 << 20
