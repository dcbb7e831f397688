"""The segment tree, compared with a linear search through all events."""

import random

import numpy as np
import pytest

from iaprof.symbols.names.segment_tree import SegmentTree


def linear_search(ranges: list[tuple[int, int]], events: list[tuple[int, int]], address: int, time: int) -> int:
    """The index of the last event up to `time` whose range contains `address`."""
    hits = [(when, index) for index, (when, which) in enumerate(events)
            if when <= time and ranges[which][0] <= address < ranges[which][1]]  # fmt: skip
    return max(hits, default=(0, -1))[1]


def segment_tree(ranges: list[tuple[int, int]], events: list[tuple[int, int]]) -> SegmentTree:
    """A tree of (start, end) ranges and (time, index of the range) events."""
    starts, ends = (np.array([pair[i] for pair in ranges], np.uint64) for i in (0, 1))
    times = np.array([time for time, _ in events], np.uint64)
    return SegmentTree(starts, ends, times, np.array([index for _, index in events], np.int64))


@pytest.mark.parametrize("seed", range(60))
def test_the_tree_finds_what_a_linear_search_finds(seed: int) -> None:
    rng = random.Random(seed)
    starts = [rng.randrange(60) for _ in range(rng.randrange(1, 30))]
    ranges = [(start, start + rng.randrange(30)) for start in starts]
    events = [(rng.randrange(20), rng.randrange(len(ranges))) for _ in range(rng.randrange(60))]
    queries = [(rng.randrange(100), rng.randrange(-1, 25) % (1 << 64)) for _ in range(200)]
    tree = segment_tree(ranges, events)
    segments = tree.segments(np.array([address for address, _ in queries], np.uint64))
    answers = tree.last(segments, np.array([time for _, time in queries], np.uint64)).tolist()
    assert answers == [linear_search(ranges, events, address, time) for address, time in queries]


def test_an_empty_tree_finds_nothing() -> None:
    empty = segment_tree([], [])
    assert empty.last(empty.segments(np.array([0, 5], np.uint64)), np.array([9, 9], np.uint64)).tolist() == [-1, -1]
    assert not len(empty.last(np.empty(0, np.int64), np.empty(0, np.uint64)))
