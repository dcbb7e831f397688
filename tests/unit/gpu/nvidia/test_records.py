"""Rows of samples: what is packed is what is counted, for any counts."""

from __future__ import annotations

import numpy as np

from iaprof.gpu.nvidia.reasons import MEANINGS, ROWS
from iaprof.gpu.nvidia.records import MOST, PC_SAMPLES, packed, places

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


def test_where_each_metric_is_counted() -> None:
    """Metrics have the names that CUPTI gave on an H200, and one of a later GPU."""
    prefix = "smsp__pcsamp_warps_issue_stalled"
    found = places({
        0: "smsp__pcsamp_sample_count",
        1: "smsp__pcsamp_samples_data_dropped",
        7: f"{prefix}_selected",
        8: f"{prefix}_selected_not_issued",
        9: f"{prefix}_long_scoreboard",
        10: f"{prefix}_long_scoreboard_not_issued",
        300: f"{prefix}_of_tomorrow",
        301: f"{prefix}_of_tomorrow_not_issued",
    })  # fmt: skip
    n = len(REASONS)
    assert found == {7: 0, 8: n, 9: 1, 10: n + 1, 300: n - 1, 301: 2 * n - 1}
    assert REASONS[0] == "active"
    assert REASONS[-1] == "other"
