"""What lies on top at an address: against the plain search through all events."""

import random

import numpy as np
import pytest

from iaprof.symbols.names.layers import Layers


def plain(ranges: list[tuple[int, int]], events: list[tuple[int, int]], address: int, time: int) -> int:
    """The index of the last event up to `time` whose range contains `address`."""
    hits = [(when, index) for index, (when, which) in enumerate(events)
            if when <= time and ranges[which][0] <= address < ranges[which][1]]  # fmt: skip
    return max(hits, default=(0, -1))[1]


def layers(ranges: list[tuple[int, int]], events: list[tuple[int, int]]) -> Layers:
    starts, ends = (np.array([pair[i] for pair in ranges], np.uint64) for i in (0, 1))
    times = np.array([when for when, _ in events], np.uint64)
    return Layers(starts, ends, times, np.array([which for _, which in events], np.int64))


@pytest.mark.parametrize("seed", range(60))
def test_like_the_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    starts = [rng.randrange(60) for _ in range(rng.randrange(1, 30))]
    ranges = [(start, start + rng.randrange(30)) for start in starts]
    events = [(rng.randrange(20), rng.randrange(len(ranges))) for _ in range(rng.randrange(60))]
    asked = [(rng.randrange(100), rng.randrange(-1, 25) % (1 << 64)) for _ in range(200)]
    found = layers(ranges, events)
    pieces = found.pieces(np.array([address for address, _ in asked], np.uint64))
    answers = found.last(pieces, np.array([time for _, time in asked], np.uint64)).tolist()
    assert answers == [plain(ranges, events, address, time) for address, time in asked]


def test_without_ranges_nothing_is_anywhere() -> None:
    empty = layers([], [])
    assert empty.last(empty.pieces(np.array([0, 5], np.uint64)), np.array([9, 9], np.uint64)).tolist() == [-1, -1]
    assert not len(empty.last(np.empty(0, np.int64), np.empty(0, np.uint64)))
