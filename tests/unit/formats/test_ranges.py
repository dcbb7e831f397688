"""Ranges written out, compared with Python's own."""

from __future__ import annotations

import numpy as np
import pytest

from iaprof.formats.ranges import ranges


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint32, np.uint64, np.uint8])
def test_they_are_pythons_ranges(kind: type[np.integer]) -> None:
    chance = np.random.default_rng(7)
    for rows in (0, 1, 2, 50):
        for most in (0, 1, 9):
            starts = chance.integers(-100, 1 << 40, rows)
            counts = chance.integers(0, most + 1, rows).astype(kind)
            pairs = list(zip(starts.tolist(), counts.tolist(), strict=True))
            found = ranges(starts, counts)
            assert found.dtype == np.int64
            assert found.tolist() == [number for start, count in pairs for number in range(start, start + count)]
            assert ranges(0, counts).tolist() == [number for _, count in pairs for number in range(count)]


def test_what_is_given_stays_as_it_is() -> None:
    starts, counts = np.array([5, 9]), np.array([2, 3])
    assert ranges(starts, counts).tolist() == [5, 6, 9, 10, 11]
    assert (starts.tolist(), counts.tolist()) == ([5, 9], [2, 3])
