"""No share in any table is above 100 % that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from iaprof.timelines.options import Options
from iaprof.timelines.stages.collectives.balance import calculate_stats_v2, compare_ranks
from iaprof.timelines.stages.summaries import calculate_stats
from iaprof.timelines.stages.utilization import compute_utilization
from iaprof.timelines.trace import Dialect, Trace
from unit.timelines.examples import two_operations
from unit.timelines.traces import slice_, trace

PERCENT = ("Time", "Active percentage", "Overlap Percent", "Execute Percent", "avg_mm_util", "avg_util")
OTHERS = {"iteration_times": {"Time"}}  # columns of these names that are no shares, but us
FRACTIONS = ("comp_active_atime_perc", "comm_active_atime_perc", "Frac_Time", "Frac_Ideal", "Frac_Cycle", "PT_Util")


def too_large(made: Trace) -> list[tuple[str, str, Any]]:
    """Shares of all tables that are above 100 %, with their table and column."""
    found = []
    for name, table in made.tables.items():
        for columns, most in ((PERCENT, 100), (FRACTIONS, 1)):
            for column in set(columns) & set(table.column_names) - OTHERS.get(name, set()):
                values = [value for value in table[column].to_pylist() if value is not None]
                found += [(name, column, value) for value in values if value > most * (1 + 1e-9)]
    return found


def test_two_streams_at_once_are_busy_once() -> None:
    # Given 0 to 100 in one stream, 50 to 150 in another, and 200 to 250
    kernels = [slice_("a", 0, 100, tid=7), slice_("b", 50, 100, tid=8), slice_("c", 200, 50, tid=7)]
    made = trace([{**each, "cat": "kernel"} for each in kernels], dialect=Dialect.TORCH)
    calculate_stats(made, Options())
    calculate_stats_v2(made, Options())
    # Then 200 of 250 us are busy, though the kernels take 250 us together
    (active,) = made.tables["active"].to_pylist()
    assert (active["Total Kernel Time"], active["Elapsed Time"], active["Active percentage"]) == (250, 250, 80)
    (summary,) = made.tables["stats_summary"].to_pylist()
    assert (summary["comp_active_atime"], summary["comp_active_atime_perc"]) == (200, 0.8)


def test_kernels_that_are_faster_than_ideal_count_as_none_in_every_table(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "~~~~ Ideal/Total Cycles ~~~~\nk_1-opCatBmm_fp16 66000\nm_2-opCatBmm_fp16 22000\n"
        "====== Perf Summary End ======\n"
    )
    made = two_operations()
    compute_utilization(made, Options(compiler_logs=(str(tmp_path / "log"),)))
    # k_1 takes 50 us of ideally 60, and m_2 40 of ideally 20
    (row,) = made.tables["utilization"].to_pylist()
    assert (row["avg_mm_util"], row["avg_util"]) == (50, pytest.approx(2000 / 90))
    assert too_large(made) == []


def test_a_total_that_is_faster_than_ideal_has_no_utilization(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "DSM-AutoPilot BEGIN\n~~~~ Ideal/Total Cycles ~~~~\nTotal 198000\n====== Perf Summary End ======\n"
    )
    made = two_operations()
    compute_utilization(made, Options(compiler_logs=(str(tmp_path / "log"),)))
    for table in ("categories", "categories_cycles"):
        total = made.tables[table].to_pylist()[-1]
        assert (total["Category"], total["Ideal_Cyc"], total["PT_Util"]) == ("Total", 198000, None)


_KERNELS = st.lists(
    st.tuples(st.integers(0, 200), st.floats(-50, 300), st.integers(0, 2), st.sampled_from(["k", "HCOLL"])),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(_KERNELS)
def test_any_streams_give_no_share_above_all(kernels: list[tuple[int, float, int, str]]) -> None:
    made = trace(
        [
            slice_(name, ts, dur, tid=tid, cat="kernel" if name == "k" else "gpu_op")
            for ts, dur, tid, name in kernels
        ],
        dialect=Dialect.TORCH,
    )  # fmt: skip
    for stage in (calculate_stats, compare_ranks, calculate_stats_v2):
        stage(made, Options())
    assert too_large(made) == []
