from __future__ import annotations

import pytest

from iaprof.timelines.options import Options
from iaprof.timelines.stages.counter_tracks import queueing_counter
from unit.timelines.examples import points, two_operations
from unit.timelines.traces import slice_, trace


def test_counts_open_preparations_and_drops_their_slices() -> None:
    # Given two operations, each with a preparation
    made = two_operations()

    # When they are counted
    queueing_counter(made, Options())

    # Then the counter follows them, and their slices are gone
    expected = [(0, 980, 1), (0, 1000, 0), (0, 1010, 1), (0, 1060, 0)]
    assert points(made, "ConcurrentPreps") == expected
    assert (len(made.slices), made.dropped) == (6, {"preparations, shown as a counter": 2})


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(0, 100), (20, 60)], [(0, 1), (20, 2), (60, 1), (100, 0)]),
        ([(0, 30), (10, 50), (50, 60)], [(0, 1), (10, 2), (30, 1), (50, 1), (60, 0)]),
        ([(50, 60), (10, 50), (0, 30)], [(0, 1), (10, 2), (30, 1), (50, 1), (60, 0)]),
        ([(5, 5)], [(5, 0)]),
        ([(5, -5)], [(5, 0)]),
    ],
)
def test_one_that_ends_within_another_leaves_the_other_open(
    intervals: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    made = trace([slice_("k Cmpt Prep", start, end - start, pid=3) for start, end in intervals])
    queueing_counter(made, Options(keep_preparations=True))
    assert points(made, "ConcurrentPreps") == [(3, time, count) for time, count in expected]
    assert len(made.slices) == len(intervals)


def test_ranks_are_counted_apart() -> None:
    made = trace([slice_("k Cmpt Prep", 0, 10, pid=pid) for pid in (1, 0)])
    queueing_counter(made, Options())
    assert points(made, "ConcurrentPreps") == [(0, 0, 1), (0, 10, 0), (1, 0, 1), (1, 10, 0)]
