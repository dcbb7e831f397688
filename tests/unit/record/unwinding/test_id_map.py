"""Ids and their numbers in columns do what a dict does."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from iaprof.record.stacks.id_map import IdMap


@pytest.mark.parametrize("at_once", [1, 7, 5000])
def test_it_does_what_a_dict_does(at_once: int) -> None:
    random = np.random.default_rng(at_once)
    map_, wanted = IdMap(), dict[int, int]()
    ids = random.integers(0, 9000, 20_000, np.uint64) * np.uint64((1 << 64) // 9000)  # some come again
    for begin in range(0, 4000 if at_once == 1 else len(ids), at_once):
        part = ids[begin : begin + at_once]
        numbers = random.integers(0, 1 << 64, len(part), np.uint64)
        map_.add(part, numbers)
        for id_, number in zip(part.tolist(), numbers.tolist(), strict=True):
            wanted.setdefault(id_, number)
        asked = random.choice(ids, 3)
        assert map_.get(asked, ~asked).tolist() == [wanted.get(id_, id_ ^ (1 << 64) - 1) for id_ in asked.tolist()]
    assert map_.has(ids).tolist() == [id_ in wanted for id_ in ids.tolist()]
    assert map_.get(ids, ids).tolist() == [wanted.get(id_, id_) for id_ in ids.tolist()]


def test_an_empty_one_has_nothing() -> None:
    map_, ids = IdMap(), np.array([1, 2], np.uint64)
    map_.add(ids[:0], ids[:0])
    assert map_.has(ids).tolist() == [False, False]
    assert map_.get(ids, ids).tolist() == [1, 2]


def test_an_entry_takes_sixteen_bytes() -> None:
    map_, count = IdMap(), 1 << 20
    tracemalloc.start()
    for begin in range(0, count, 1 << 12):
        ids = np.arange(begin, begin + (1 << 12), dtype=np.uint64)
        map_.add(ids, ids)
        assert map_.has(ids).all()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 20 * count
