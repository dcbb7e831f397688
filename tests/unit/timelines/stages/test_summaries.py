from __future__ import annotations

from typing import Any

import pytest

from iaprof.timelines.options import Options
from iaprof.timelines.stages.summaries import calculate_stats
from iaprof.timelines.trace import Dialect, Trace
from unit.timelines.examples import all_reduce, charges, launched, two_operations
from unit.timelines.traces import slice_, trace


def rows(made: Trace, table: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in made.tables[table].to_pylist()]


def test_two_operations() -> None:
    made = two_operations()
    calculate_stats(made, Options())
    near = pytest.approx
    assert made.tables["summary"].column_names == [
        "Time", "Total Time", "Calls", "Mean", "Median", "Min", "Max", "StDev", "pid", "Name",
    ]  # fmt: skip
    assert rows(made, "summary") == [
        (near(55.5555555), 50.0, 1, 50.0, 50.0, 50.0, 50.0, 0.0, 0, "k_[N] Cmpt Exec"),
        (near(44.4444444), 40.0, 1, 40.0, 40.0, 40.0, 40.0, 0.0, 0, "m_[N] Cmpt Exec"),
    ]
    assert rows(made, "active") == [(90.0, 110.0, 1000.0, 1110.0, near(81.8181818), 0)]
    assert rows(made, "ts_analysis")[0] == (
        1,
        *(each for cycles in (10000, 20000, 50000, 5000) for each in (cycles, cycles, cycles, cycles, 0.0)),
        0,
        "k_[N] Cmpt Exec",
    )
    assert [name.replace("TS5-4_", "") for name in made.tables["ts_analysis"].column_names[16:]] == [
        "Mean", "Median", "Min", "Max", "StDev", "pid", "Name",
    ]  # fmt: skip


def test_statistics_of_several_calls() -> None:
    kernels = [slice_(f"a_{n} Cmpt Exec", 100 * n, dur, pid=2) for n, dur in enumerate((1, 2, 6, 3))]
    made = trace([*kernels, slice_("b-5 Cmpt Exec", 0, 20, pid=2), slice_("c Cmpt Exec", 0, 1, pid=1)])
    calculate_stats(made, Options())
    assert rows(made, "summary") == [
        (100.0, 1.0, 1, 1.0, 1.0, 1.0, 1.0, 0.0, 1, "c Cmpt Exec"),
        (62.5, 20.0, 1, 20.0, 20.0, 20.0, 20.0, 0.0, 2, "b_[N] Cmpt Exec"),
        (37.5, 12.0, 4, 3.0, 2.5, 1.0, 6.0, pytest.approx(2.1602469), 2, "a_[N] Cmpt Exec"),
    ]
    assert rows(made, "ts_analysis") == []


def test_all_kernels_of_torch_count() -> None:
    made = launched()
    calculate_stats(made, Options())
    assert [(row[1], row[-1]) for row in rows(made, "summary")] == [(50.0, "mm_[N]"), (30.0, "add_[N]")]


def test_cycles_of_kernels() -> None:
    made = two_operations()
    calculate_stats(made, Options())
    nan = pytest.approx(float("nan"), nan_ok=True)
    share = pytest.approx(50000 / 850)
    # The power from 1050 to 1110 is known: that is all of m_2's time, and none of k_1's.
    assert rows(made, "kernels") == [
        (0, 1, 101000, 10000, 50000, 40000, 1000, pytest.approx(40000 / 1010), 16.796875, "m_[N] Cmpt Exec"),
        (0, 1, 85000, 10000, 20000, 50000, 5000, share, nan, "k_[N] Cmpt Exec"),
    ]


def test_mean_power_of_kernels() -> None:
    # Given kernels of which the second, third and fifth run while the power is known
    made = charges()
    calculate_stats(made, Options())
    assert made.tables["kernels"].column("Mean Watts").to_pylist() == [pytest.approx((46.875 + 2 * 23.4375) / 3)]


def test_ranks_are_apart() -> None:
    made = all_reduce()
    calculate_stats(made, Options())
    assert [(row[1], row[-2]) for row in rows(made, "summary")] == [(80.0, 0), (80.0, 1), (10.0, 1)]


def test_no_kernels() -> None:
    for made in (trace([]), trace([slice_("h", 0, 1)], dialect=Dialect.TORCH)):
        calculate_stats(made, Options())
        counts = {name: table.num_rows for name, table in made.tables.items()}
        assert counts == {"summary": 0, "active": 0, "ts_analysis": 0, "kernels": 0}
