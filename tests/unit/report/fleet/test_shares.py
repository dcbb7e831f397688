"""Quantiles of shares that are mostly 0 are those of the whole table."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from iaprof.report.fleet.comparison import Shares

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=40)


@given(ROWS)
def test_quantiles_are_those_of_the_whole_table(rows: list[tuple[int, int, int]]) -> None:
    entry, group, samples = (np.array([row[place] for row in rows], np.int64) for place in range(3))
    distinct, group = np.unique(group, return_inverse=True)  # each group has samples
    table = np.zeros((4, len(distinct)))
    np.add.at(table, (entry, group), samples)
    of_group = table.sum(axis=0).astype(np.int64)
    shares = Shares.of(entry, group, samples, 4, of_group)
    for part in (0.1, 0.5, 0.9, 0.99):
        assert shares.quantile(part).tolist() == np.quantile(table / of_group, part, axis=1).tolist()
    most, which = shares.largest()
    assert most.tolist() == (table / of_group).max(axis=1).tolist()
    assert which.tolist() == (table / of_group).argmax(axis=1).tolist()
