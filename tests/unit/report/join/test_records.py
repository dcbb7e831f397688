"""What records.c does with records, compared with loops in Python, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fuzz import fuzz_join
from iaprof.gpu import vendors
from iaprof.gpu.code import ADDRESS_MASK
from iaprof.gpu.samples import SampleLayout
from iaprof.report.join.records import PLACE_BITS, Addresses, ReadCells, add, sum_columns
from unit.gpu.acme import LAYOUTS as OF_ACME

LAYOUTS = vendors.layouts() | OF_ACME
RECORDS = 500
WRONG = "the columns of records do not belong together"


def words_of(layout: SampleLayout, seed: int = 7) -> list[NDArray[np.uint64]]:
    rng = np.random.default_rng(seed)
    words = [rng.integers(0, (1 << 64) - 1, RECORDS, np.uint64, endpoint=True) for _ in range(layout.words)]
    if layout.name in OF_ACME:
        words[3] %= np.uint64(len(layout.reasons) + 1)
        words[4] >>= np.uint64(32)
    return words


@pytest.mark.parametrize("name", LAYOUTS)
def test_sums_are_those_of_each_reason(name: str) -> None:
    layout = LAYOUTS[name]
    words, fields = words_of(layout), layout.fields
    slots = np.random.default_rng(8).integers(0, 40, RECORDS)
    columns, type_ = sum_columns(fields)
    rows = np.zeros((40, columns), type_)
    for _ in range(2):
        add(fields, layout.packed(words), slots, rows)
    for column, reason in enumerate(fields.reasons):
        counts = layout.counts(words, reason)
        assert int(counts.max()) <= layout.most
        expected = [2 * sum(counts[slots == slot].tolist()) for slot in range(40)]
        assert rows[:, column].tolist() == expected
        assert sum(expected)
    assert not rows[:, len(fields.reasons) :].any()
    assert {reason for reason in layout.reasons if layout.counts(words, reason).any()} == set(fields.reasons)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_address_has_the_number_that_it_was_given(name: str) -> None:
    layout = LAYOUTS[name]
    rng = np.random.default_rng(9)
    words = layout.packed(words_of(layout))
    # given addresses that are close together, far apart, and twice there
    words[0][:200] = words[0][0] + rng.integers(0, 1 << 14, 200, np.uint64)
    words[0] &= ~np.uint64((1 << layout.unit_bits >> layout.fields.address_shift) - 1)
    ips = (words[0] & np.uint64(layout.fields.address_mask)) << np.uint64(layout.fields.address_shift)
    ips &= np.uint64(ADDRESS_MASK)
    known = Addresses(layout.unit_bits)
    numbers: dict[int, int] = {}
    found = np.empty(RECORDS, np.int64)
    assert known.find(words[0], layout.fields, found) == RECORDS
    assert set(found.tolist()) == {-1}
    for some in (slice(0, 100), slice(50, 300)):
        added = known.add(ips[some]).tolist()
        assert sorted(added) == sorted(set(ips[some].tolist()) - numbers.keys())
        given = rng.integers(0, 1 << 60, len(added))
        numbers |= dict(zip(added, given.tolist(), strict=True))
        known.set_last(given)
        expected = [numbers.get(ip, -1) for ip in ips.tolist()]
        assert known.find(words[0], layout.fields, found) == expected.count(-1) > 0
        assert found.tolist() == expected
    assert known.ips.tolist() == list(numbers)


def test_of_addresses_in_one_unit_one_is_added() -> None:
    known = Addresses(4)
    assert known.add(np.array([0x1018, 0x2000, 0x1010, 0x2000, 0x1018], np.uint64)).tolist() == [0x1010, 0x2000]
    known.set_last(np.array([5, 6]))
    assert known.add(np.array([0x1018, 0x3000], np.uint64)).tolist() == [0x3000]


@pytest.mark.parametrize("seed", range(5))
def test_pairs_and_values_are_those_of_loops(seed: int) -> None:
    rng = random.Random(seed)
    cells = rng.choice((1, 3, 100))
    lengths = [rng.choice((0, 1, 5, 60)) for _ in range(12)]
    of_reads = [[(rng.randrange(cells), rng.randrange(1 << 20)) for _ in range(length)] for length in lengths]
    numbers = [cell << PLACE_BITS | place for each in of_reads for cell, place in each]
    found = ReadCells(ints(numbers), ints(lengths), cells)
    pairs = sorted({(read, cell) for read, each in enumerate(of_reads) for cell, _ in each})
    assert list(zip(found.read.tolist(), found.cell.tolist(), strict=True)) == pairs
    value = {pair: rng.randrange(1 << 40) for pair in pairs}
    values = ints([value[pair] for pair in pairs])
    expected = [(value[read, cell], place) for read, each in enumerate(of_reads) for cell, place in each]
    assert found.of_records(values).tolist() == [one + place for one, place in expected]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("places", [True, False])
def test_counts_are_added_to_the_rows_of_their_pairs(name: str, places: bool) -> None:
    layout, rng = LAYOUTS[name], random.Random(11)
    cells, lengths = 30, [0, 1, 130, 0, 260, RECORDS - 391, 0]
    words, fields = words_of(layout), layout.fields
    numbers = ints([rng.randrange(cells) << PLACE_BITS | rng.randrange(5) for _ in range(RECORDS)])
    found = ReadCells(numbers, ints(lengths), cells)
    first_rows = ints([rng.randrange(60) for _ in found.read])
    # when the counts are added in one step, and in two
    columns, type_ = sum_columns(fields)
    rows, expected = np.zeros((64, columns), type_), np.zeros((64, columns), type_)
    packed = layout.packed(words)
    found.add(fields, packed, first_rows, rows, places)
    add(fields, packed, found.of_records(first_rows) - (0 if places else numbers & 0xFFFFFFFF), expected)
    # then
    assert rows.tolist() == expected.tolist()
    assert rows.any()
    with pytest.raises(AssertionError, match=WRONG):
        found.add(fields, packed, first_rows + 64 - int(first_rows.max()), rows, places)


def ints(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("numbers", "lengths", "cells"),
    [
        ([0, 0], [1], 1),
        ([0, 0], [3], 1),
        ([0, 0], [-1, 3], 1),
        ([0, 0], [1 << 62, 1 << 62], 1),
        ([0, 1 << PLACE_BITS], [2], 1),
        ([0, -1], [2], 1),
    ],
)
def test_columns_that_do_not_belong_together_are_refused(numbers: list[int], lengths: list[int], cells: int) -> None:
    with pytest.raises(AssertionError, match=WRONG):
        ReadCells(ints(numbers), ints(lengths), cells)


@pytest.mark.parametrize("slot", [10, -1, (1 << 63) - 1, -(1 << 63)])
def test_a_slot_that_is_not_there_is_refused(slot: int) -> None:
    for layout in LAYOUTS.values():
        words = layout.packed(words_of(layout))
        columns, type_ = sum_columns(layout.fields)
        rows: NDArray[Any] = np.zeros((10, columns), type_)
        with pytest.raises(AssertionError, match=WRONG):
            add(layout.fields, words, ints([0] * (RECORDS - 1) + [slot]), rows)
        assert not rows.any()


def test_records_without_words_are_refused() -> None:
    fields = next(iter(vendors.layouts().values())).fields
    columns, type_ = sum_columns(fields)
    with pytest.raises(AssertionError, match=WRONG):
        add(fields, [], ints([]), np.zeros((10, columns), type_))


def test_made_up_columns_under_sanitizers(tmp_path: Path) -> None:
    worked, refused = fuzz_join.run(fuzz_join.compiled(tmp_path), 1, 3000)
    assert worked > 4000
    assert refused > 1000
