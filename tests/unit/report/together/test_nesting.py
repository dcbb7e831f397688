"""The innermost slice around a time or a slice is the one that looking at all of them finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from iaprof.report.join.operators import NOTHING, Nesting, depths

_SLICES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 30)), max_size=40)
_LAUNCHES = st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 62)), max_size=40)


@given(_SLICES, _LAUNCHES)
@settings(deadline=None, max_examples=300)
def test_every_answer_is_that_of_looking_at_all_slices(
    slices: list[tuple[int, int, int]], launches: list[tuple[int, int]]
) -> None:
    columns = np.array(slices, np.int64).reshape(-1, 3).T
    nesting = Nesting(columns[0], columns[1], columns[1] + columns[2])
    rows = sorted(((thread, begin, -begin - length) for thread, begin, length in slices))
    ours = list(zip(nesting.thread.tolist(), nesting.begin.tolist(), (-nesting.end).tolist(), strict=True))
    assert ours == rows

    def last(thread: int, begin: int, end: int, before: int) -> int:
        found = [at for at, (own, since, until) in enumerate(rows[:before])
                 if own == thread and since <= begin and -until >= end]  # fmt: skip
        return max(found, default=NOTHING)

    parents = [last(thread, begin, -end, at) for at, (thread, begin, end) in enumerate(rows)]
    assert nesting.parents().tolist() == parents
    wanted = [last(thread, time, time + 1, len(rows)) for thread, time in launches]
    times = np.array(launches, np.int64).reshape(-1, 2).T
    assert nesting.around(times[0], times[1]).tolist() == wanted
    depth = [0] * len(rows)
    for at, parent in enumerate(parents):
        depth[at] = depth[parent] + 1 if parent >= 0 else 0
    assert depths(nesting.parents()).tolist() == depth


def test_a_million_slices_inside_each_other_are_no_deep_recursion() -> None:
    count = 100_000
    begin = np.arange(count)
    nesting = Nesting(np.zeros(count, np.int64), begin, 4 * count - begin)
    assert depths(nesting.parents())[-1] == count - 1
    assert nesting.around(np.zeros(1, np.int64), np.array([count + 5])).tolist() == [count - 1]
