"""Rows of samples: what is packed is what is counted, for any counts."""

from __future__ import annotations

import numpy as np

from iaprof.gpu.nvidia.reasons import MEANINGS, ROWS
from iaprof.gpu.nvidia.records import MOST, PC_SAMPLES
from unit.gpu.nvidia.captures import packed

REASONS = list(MEANINGS)


def test_packed_counts_are_those_that_were_given() -> None:
    generator = np.random.default_rng(47)
    counts = generator.integers(0, 5, (200, 2 * len(REASONS))).astype(np.uint32)
    counts[generator.integers(0, 200, 40), generator.integers(0, 2 * len(REASONS), 40)] = generator.integers(
        MOST, 1 << 20, 40
    )
    addresses = np.arange(200, dtype=np.uint64) * np.uint64(16) + np.uint64(7 << 30)
    columns = packed(addresses, counts)
    assert len(columns) == len(ROWS.columns) == 1 + 2 * 5
    assert {len(column) for column in columns} == {len(columns[0])}
    assert len(columns[0]) > 200  # counts above MOST take several records
    ips = PC_SAMPLES.ips(columns)
    for number, reason in enumerate(REASONS):
        sums = np.bincount((ips - addresses[0]).astype(int) // 16, PC_SAMPLES.counts(columns, reason), 200)
        assert sums.astype(int).tolist() == counts[:, number].tolist()
        latency = [columns[0], *columns[ROWS.required :]]  # packed alike
        sums = np.bincount((ips - addresses[0]).astype(int) // 16, PC_SAMPLES.counts(latency, reason), 200)
        assert sums.astype(int).tolist() == counts[:, len(REASONS) + number].tolist()


def test_no_samples() -> None:
    none = np.empty(0, np.uint64), np.empty((0, 2 * len(REASONS)), np.uint32)
    assert [len(column) for column in packed(*none)] == [0] * len(ROWS.columns)
    zeros = packed(np.array([16], np.uint64), np.zeros((1, 2 * len(REASONS)), np.uint32))
    assert [column.tolist() for column in zeros] == [[16], *[[0]] * 10]
