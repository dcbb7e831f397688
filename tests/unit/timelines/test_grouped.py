"""Orders and numbers of rows are those that NumPy's plain functions give."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given, settings, strategies as st

from iaprof.formats import distinct
from iaprof.formats.distinct import distinct_values, few
from iaprof.timelines.outputs import event_order
from iaprof.timelines.outputs.event_order import by_time
from iaprof.timelines.trace import ABSENT


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3))), st.sampled_from([1, 4, 1 << 16]))
def test_rows_are_in_order_of_time_and_a_key(rows: list[tuple[int, int]], part: int) -> None:
    times, key = np.array(rows, np.int64).reshape(-1, 2).T
    with mock.patch.object(event_order, "_CHUNK", part):
        found = by_time(times, key)
    assert found.tolist() == np.lexsort((key, times)).tolist()


@settings(deadline=None)
@given(st.lists(st.integers(-5, 5) | st.sampled_from([ABSENT, -ABSENT - 1])))
def test_numbers_of_few_integers_lead_back_to_them(values: list[int]) -> None:
    # given
    column = np.array(values, np.int64)
    # when
    found = few(column, column == ABSENT)
    # then
    if found is None:
        present = [each for each in values if each != ABSENT]
        assert not present or max(present) - min(present) >= len(values)
    else:
        numbers, distinct = found
        assert len(set(distinct.tolist())) == len(distinct)
        assert [ABSENT if n is None else int(distinct[n]) for n in numbers.to_pylist()] == values


@settings(deadline=None)
@given(st.lists(st.integers(-9, 9) | st.sampled_from([ABSENT, -ABSENT - 1])), st.integers(1, 20))
def test_distinct_values_are_those_of_numpy(values: list[int], part: int) -> None:
    column = np.array(values, np.int64)
    with mock.patch.object(distinct, "_PART", part):
        assert distinct_values(column).tolist() == np.unique(column).tolist()
    near = (column % 16).astype(np.int32)
    assert distinct_values(near).tolist() == np.unique(near).tolist()
