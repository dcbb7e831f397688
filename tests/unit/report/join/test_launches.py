"""What launches.c finds and counts, compared with loops in Python, and what it refuses."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.report.join.launches import Launches
from iaprof.report.join.placements import Placed, Placement

PLACEMENTS, SITES, LAUNCHES, PAIRS = 4, 6, 60, 60
WINDOW_NS = 40
LAST = (1 << 64) - 1


def launches(latest: int) -> tuple[Placed, NDArray[np.int64]]:
    """Launches of random sites up to a time, and the placement of each; the last placement has none."""
    rng = np.random.default_rng(3)
    times = np.sort(rng.integers(0, 400, LAUNCHES, np.uint64))
    site = rng.integers(0, SITES, LAUNCHES)
    placed = Placed([Placement(1, 0, 0, None, "") for _ in range(PLACEMENTS)])
    placed.time, placed.site = times + np.uint64(latest) - times[-1], site
    placed.count = rng.integers(1, 5, LAUNCHES)
    return placed, site % (PLACEMENTS - 1)


def made_of(placed: Placed, placement: NDArray[np.int64]) -> Launches:
    return Launches(placed, placement, WINDOW_NS)


@pytest.mark.parametrize("latest", [399, 1 << 40, LAST])
def test_launches_are_found_and_counted(latest: int) -> None:
    # given
    placed, placement = launches(latest)
    rng = np.random.default_rng(4)
    ends = np.uint64(latest) - rng.integers(0, 400, PAIRS, np.uint64)
    begins = ends - np.minimum(ends, rng.integers(0, 2 * WINDOW_NS, PAIRS, np.uint64))
    pair, its_placement = rng.integers(0, PAIRS, 200), rng.integers(0, PLACEMENTS, 200)
    # when
    all_launches = made_of(placed, placement)
    found = all_launches.running(pair, its_placement, begins, ends)
    counted = Counter[tuple[int, int, int]]()
    for *key, weight in zip(*(column.tolist() for column in all_launches.count(found)), strict=True):
        counted[tuple(key)] += weight
    # then
    expected = Counter[tuple[int, int, int]]()
    rows = list(zip(placed.time.tolist(), placed.site.tolist(), placement.tolist(), placed.count.tolist(), strict=True))
    for number, (each, where) in enumerate(zip(pair.tolist(), its_placement.tolist(), strict=True)):
        begin, end = int(begins[each]), int(ends[each])
        youngest = max((time for time, _, its, _ in rows if its == where and time <= end), default=end)
        oldest = max(begin - WINDOW_NS, 0)
        since = max(min(begin, max(youngest - (end - youngest) // 2, 0)), oldest)
        for time, site, its, count in rows:
            if its == where and since <= time <= end:
                expected[each, where, site] += count
        # in which the window is whole buckets
        touched = range(oldest // WINDOW_NS, end // WINDOW_NS + 1)
        sites = {site for time, site, its, _ in rows if its == where and time // WINDOW_NS in touched}
        assert found.single[number] == (len(sites) == 1)
    assert counted == expected
    assert len(expected) > 50 and set(found.single.tolist()) == {False, True}


@pytest.mark.parametrize("latest", [399, LAST])
def test_the_last_and_the_first_launch_of_a_placement_are_found(latest: int) -> None:
    placed, placement = launches(latest)
    times = [*placed.time.tolist(), 0, latest - 399, latest]
    for where in range(PLACEMENTS):
        of_it = [rank for rank, its in enumerate(placement.tolist()) if its == where]
        found = made_of(placed, placement).last(np.full(len(times), where), np.array(times, np.uint64))
        expected = [max((rank for rank in of_it if placed.time[rank] <= time), default=-1) for time in times]
        assert found.tolist() == expected
        assert not of_it or made_of(placed, placement).first(where) == of_it[0]


def test_of_no_launches_none_is_found() -> None:
    none = np.empty(0, np.int64)
    some, times = np.array([0, 1]), np.array([5, LAST], np.uint64)
    placed = Placed([Placement(1, 0, 0, None, "") for _ in range(PLACEMENTS)])
    found = made_of(placed, none).running(some, some, times, times)
    assert (found.slices, found.single.tolist()) == (0, [False, False])
    assert made_of(placed, none).last(some, times).tolist() == [-1, -1]


@pytest.mark.parametrize(("pair", "placement"), [(PAIRS, 0), (-1, 0), (0, PLACEMENTS), (0, -1)])
def test_pairs_and_placements_that_are_not_there_are_refused(pair: int, placement: int) -> None:
    times = np.zeros(PAIRS, np.uint64)
    with pytest.raises(AssertionError, match="do not belong together"):
        made_of(*launches(399)).running(np.array([0, pair]), np.array([0, placement]), times, times)


def test_the_last_launch_of_a_placement_that_is_not_there_is_refused() -> None:
    for placement in (-1, PLACEMENTS):
        with pytest.raises(AssertionError, match="do not belong together"):
            made_of(*launches(399)).last(np.array([0, placement]), np.zeros(2, np.uint64))
