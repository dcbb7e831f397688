"""Distinct values of integer columns, and the number of each row's among these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from iaprof.formats.distinct import distinct, groups, numbered, order_by, sums_of

TYPES: tuple[type[np.integer[Any]], ...] = (np.int32, np.uint32, np.int64, np.uint64)


@st.composite
def columns(draw: st.DrawFn) -> np.ndarray[Any, np.dtype[Any]]:
    """Columns of a type, with values that are near to one another, or anywhere."""
    of_type = draw(st.sampled_from(TYPES))
    lowest, highest = int(np.iinfo(of_type).min), int(np.iinfo(of_type).max)
    first = draw(st.integers(lowest, highest))
    last = draw(st.sampled_from([min(first + 5, highest), min(first + 100_000, highest), highest]))
    return np.array(draw(st.lists(st.integers(first, last), max_size=50)), of_type)


@given(columns())
def test_values_and_numbers_are_those_of_plain_loops(values: np.ndarray[Any, np.dtype[Any]]) -> None:
    different, number = numbered(values)
    expected = sorted(set(values.tolist()))
    assert (different.tolist(), different.dtype) == (expected, values.dtype)
    assert (distinct(values).tolist(), distinct(values).dtype) == (expected, values.dtype)
    assert number.tolist() == [expected.index(each) for each in values.tolist()]
    assert number.dtype == np.int64


@pytest.mark.parametrize("count", [100_000, 200_000])
@pytest.mark.parametrize("distance", [1, 1000, 1 << 42, 1 << 60])
def test_many_rows(distance: int, count: int) -> None:
    rows = np.random.default_rng(1).integers(0, 8, count)
    different, number = numbered(rows * distance - 5)
    assert different.tolist() == [each * distance - 5 for each in range(8)]
    assert np.array_equal(number, rows)


@pytest.mark.parametrize("of_type", TYPES)
def test_of_many_rows_with_few_values_first_and_with_many_then(of_type: type[np.integer[Any]]) -> None:
    rng = np.random.default_rng(2)
    for values in (rng.integers(0, 1 << 31, 300_000), rng.choice(rng.integers(0, 1 << 31, 900), 300_000)):
        distinct, number = numbered(values.astype(of_type))
        expected, of_rows = np.unique(values, return_inverse=True)
        assert distinct.tolist() == expected.tolist()
        assert number.tolist() == of_rows.tolist()
        assert distinct.dtype == of_type
        assert number.dtype == np.int64


@given(st.data(), st.integers(0, 40))
def test_the_groups_are_those_of_plain_loops(data: st.DataObject, count: int) -> None:
    several: list[np.ndarray[Any, np.dtype[Any]]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        of_type = data.draw(st.sampled_from((*TYPES, np.int8)))
        low, high = int(np.iinfo(of_type).min), int(np.iinfo(of_type).max)
        few = data.draw(st.lists(st.integers(low, high), min_size=1, max_size=3))
        first = data.draw(st.integers(low, high))
        near = st.integers(first, min(first + 150, high))
        values = data.draw(st.lists(st.one_of(st.sampled_from(few), near), min_size=count, max_size=count))
        several.append(np.array(values, of_type))
    before = [column.copy() for column in several]
    rows = list(zip(*(column.tolist() for column in several), strict=True))
    expected = sorted(set(rows))
    number, first_rows = groups(*several)
    assert number.tolist() == [expected.index(row) for row in rows]
    assert first_rows.tolist() == [rows.index(row) for row in expected]
    number += 1  # which is not one of the columns
    assert all(np.array_equal(column, same) for column, same in zip(several, before, strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=50),
    st.sampled_from([0, 3, 50, 60]),
    st.sampled_from([0, 3, 30]),
)
def test_the_sums_are_those_of_plain_loops(rows: list[tuple[int, int]], distance: int, of_counts: int) -> None:
    sums: dict[int, int] = {}
    values, counts = [value << distance for value, _ in rows], [count << of_counts for _, count in rows]
    for value, count in zip(values, counts, strict=True):
        sums[value] = sums.get(value, 0) + count
    distinct, found = sums_of(np.array(values, np.int64), np.array(counts, np.int64))
    assert dict(zip(distinct.tolist(), found.tolist(), strict=True)) == sums
    assert distinct.tolist() == sorted(sums)


@pytest.mark.parametrize("count", [0, 1, 500, 5_000])
@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_that_of_lexsort(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = [
        rng.integers(0, 50, count),
        np.full(count, 7),
        rng.integers(-(1 << 63), (1 << 63) - 1, count, endpoint=True),
        rng.integers(0, (1 << 64) - 1, count, np.uint64, endpoint=True),
        np.sort(rng.integers(-5, 70_000, count)).astype(np.int32),
        rng.integers(-3, 3, count) << 40,
    ]
    for some in (
        columns[:1],
        columns[2:3],
        columns[3:4],
        columns[4:5],
        columns[5:],
        columns[:2],
        columns,
        columns[::-1],
    ):
        assert order_by(*some).tolist() == np.lexsort(some[::-1]).tolist()
