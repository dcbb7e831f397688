from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from iaprof.formats.distinct import groups
from iaprof.timelines.grouped import Groups, before
from iaprof.timelines.intervals import FARTHEST, Union, lengths_of_unions

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(-5, 10)), max_size=8)


@given(INTERVALS, st.integers(-5, 40), st.integers(0, 20))
def test_a_union_covers_what_any_interval_does(intervals: list[tuple[int, int]], start: int, length: int) -> None:
    starts = np.array([low for low, _ in intervals], np.int64)
    ends = starts + np.array([size for _, size in intervals], np.int64)
    union = Union.of(starts, ends)
    covered = {ns for low, size in intervals for ns in range(low, low + size)}
    asked = np.array([start]), np.array([start + length])
    assert union.length == len(covered)
    assert union.within(*asked).tolist() == [len(covered & set(range(start, start + length)))]
    assert (union.starts[1:] > union.ends[:-1]).all()


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(-9, 9)), max_size=12)


@given(ROWS)
def test_statistics_of_groups(rows: list[tuple[int, int, int]]) -> None:
    first, second, values = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    grouped = Groups(first, second)
    expected: dict[tuple[int, int], list[int]] = {}
    for one, two, value in rows:
        expected.setdefault((one, two), []).append(value)
    lists = [expected[key] for key in sorted(expected)]
    assert list(zip(grouped.key(first).tolist(), grouped.key(second).tolist(), strict=True)) == sorted(expected)
    assert grouped.counts.tolist() == [len(each) for each in lists]
    assert grouped.median(values).tolist() == [float(np.median(each)) for each in lists]
    stdevs = [float(np.std(each, ddof=1)) if len(each) > 1 else 0.0 for each in lists]
    assert np.allclose(grouped.stdev(values), stdevs)
    assert grouped.max(values).tolist() == [max(each) for each in lists]
    assert grouped.sum(values)[grouped.numbers].tolist() == [sum(expected[row[:2]]) for row in rows]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-9, 9)), max_size=12))
def test_the_largest_value_before(rows: list[tuple[int, int]]) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    groups, values = (np.array([row[place] for row in rows], np.int64) for place in range(2))
    expected = [
        max((value for one, value in rows[:number] if one == group), default=np.iinfo(np.int64).min)
        for number, (group, _) in enumerate(rows)
    ]
    assert before(values, groups).tolist() == expected


def test_groups_are_those_of_sorted_values() -> None:
    random = np.random.default_rng(1)
    columns = [random.integers(-3, 3, 500), random.choice([5, -(2**62), 2**62], 500), random.integers(0, 9, 500)]
    numbers, first = groups(*columns)
    distinct, expected_first, expected = np.unique(np.stack(columns, 1), axis=0, return_index=True, return_inverse=True)
    assert numbers.tolist() == expected.reshape(-1).tolist()
    assert first.tolist() == expected_first.tolist()
    assert len(distinct) == len(first)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 9), st.integers(-2, 9)), max_size=15), st.booleans())
def test_unions_of_groups_are_those_of_each_group(rows: list[tuple[int, int, int]], are_far_apart: bool) -> None:
    group, start, length = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    start = start * (FARTHEST // 9) if are_far_apart else start  # then no numbers are left for ranges of their own
    expected = [Union.of(start[its], (start + length)[its]).length for its in (group == each for each in range(4))]
    assert lengths_of_unions(start, start + length, group, 4).tolist() == expected
