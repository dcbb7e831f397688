from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.timelines.options import Options
from iaprof.timelines.stages.power import compute_power
from iaprof.timelines.stages.summaries import calculate_stats
from iaprof.timelines.stages.utilization import compute_utilization
from iaprof.timelines.trace import Dialect, Trace
from unit.timelines.examples import launched, member, points, two_operations
from unit.timelines.traces import Event, slice_, trace

DATA = Path(__file__).parents[1] / "data"


def written(path: Path, *tables: dict[str, int], name: str = "log.txt", before: str = "") -> str:
    """Writes a log with tables of lines, and returns its path."""
    text = before
    for table in tables:
        lines = "".join(f"{line}  {cycles}\n" for line, cycles in table.items())
        text += f"~~~~ Ideal/Total Cycles ~~~~\n{lines}====== Perf Summary End ======\n"
    (path / name).write_text(text)
    return str(path / name)


def rows(made: Trace, table: str) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in made.tables[table].to_pylist()]


def test_one_kernel_with_ideal_cycles(tmp_path: Path) -> None:
    made = two_operations()
    path = written(tmp_path, {"k_1-opCatBmm_fp16": 22000, "m_2-opCatScalar": 0})
    compute_utilization(made, Options(compiler_logs=(path,)))

    assert points(made, "PT Active") == [(0, 1000, 40.0), (0, 1050, 0.0)]
    assert rows(made, "categories") == [
        (0, "UNKN", "StcdpHbm", 0, 0, 0, 0, 0, 0, 0),
        (0, "UNKN", "other", 0, 0, 0, 0, 0, 0, 0),
        (0, "UNKN", "Scalar", 40.0, 0.4444, 1, 0, 0, 0, 0),
        (0, "UNKN", "Bmm_fp16", 50.0, 0.5556, 1, 20.0, 22000, 1.0, 0.4),
        (0, "UNKN", "Total", 90.0, 1.0, 2, 20.0, 22000, 1.0, 0.2222),
    ]
    assert rows(made, "categories_cycles")[3:] == [
        (0, "Bmm_fp16", 50000, 0.5556, 1, 55000, 22000, 1.0, 0.4),
        (0, "Total", 90000, 1.0, 2, 99000, 22000, 1.0, 0.2222),
    ]
    assert np.nan_to_num(made.slices.extra["pt_active"]).tolist() == [0, 0, 0, 0, 0.4, 0, 0, 0]
    assert made.slices.extra["core used"].tolist() == [False] * 4 + [True] + [False] * 3
    assert member(made, "user_cat") == [None] * 4 + ["Bmm_fp16", None, None, "Scalar"]
    assert [each.text for each in made.messages.said] == [
        "pid=0: avg_mm_util=40.000, avg_util=22.222, t_mm=50.000, t_sf=40.000, ratio_mm/sf=55.56:44.44"
    ]


def test_more_ideal_cycles_than_time(tmp_path: Path) -> None:
    made = two_operations()
    path = written(tmp_path, {"k_1-opCatBmm_fp16": 66000, "m_2-opCatScalar": 0})
    compute_utilization(made, Options(compiler_logs=(path,)))
    assert points(made, "PT Active") == [(0, 1000, 101.0), (0, 1050, 0.0)]
    assert made.slices.extra["pt_active"][4] == pytest.approx(1.2, abs=1e-12)
    # The time counts, and what is ideal does not.
    assert rows(made, "categories")[3] == (0, "UNKN", "Bmm_fp16", 50.0, 0.5556, 1, 0, 0, 0, 0)


def test_kernels_that_overlap_are_not_active_for_more_than_all_of_the_time(tmp_path: Path) -> None:
    # Given a kernel of 100 us of which 70 are ideal; one of 60, of which 30 are ideal, from 50 on; and one of 10, of
    # which 12 are ideal, from 200 on, beside one of 20, of which 10 are
    kernels = [("a", 0, 100), ("b", 50, 60), ("c", 200, 10), ("d", 195, 20)]
    made = trace(
        [
            slice_(f"{name} Cmpt Exec", ts, dur, (0, 0, 0, dur * 1000, dur * 1000), tid=n)
            for n, (name, ts, dur) in enumerate(kernels)
        ]
    )
    ideals = {"a": 70, "b": 30, "c": 12, "d": 10}
    log = written(tmp_path, {f"{name}-opCatBmm_fp16": us * 1100 for name, us in ideals.items()})
    compute_utilization(made, Options(compiler_logs=(log,)))
    # Then a and b together are 120 %, and shown as 100; only what is wrong by itself is shown as 101
    assert [(time, value) for _, time, value in points(made, "PT Active")] == [
        (0, 70), (50, 100), (100, 50), (110, 0), (195, 50), (200, 101), (210, 50), (215, 0)
    ]  # fmt: skip
    assert [each.text for each in made.messages.said if "overlap" in each.text] == [
        "PT Active adds up to more than 100 % 1 time, where kernels overlap: shown as 100"
    ]


@pytest.mark.parametrize(
    ("at_core", "ideal", "expected"),
    [(78699230, 18061203, 0.2295), (86547239, 18061203, 0.2087), (64885331, 525920, 0.0081)],
)
def test_figures_of_the_references_readme(tmp_path: Path, at_core: int, ideal: int, expected: float) -> None:
    # Given a kernel of so many cycles of the core that none of another number of the SoC's are as many
    cycles = -(-at_core * 10 // 11)
    made = trace([slice_("k Cmpt Exec", 0, cycles / 1000, (0, 0, 0, cycles, cycles))])
    compute_utilization(made, Options(compiler_logs=(written(tmp_path, {"k-opCatBmm_fp16": ideal}),)))
    row = made.tables["categories_cycles"].to_pylist()[-1]
    assert (row["Cycles(core)"], row["Ideal_Cyc"], row["PT_Util"]) == (at_core, ideal, expected)


def sample() -> Trace:
    """IBM's sample: pairs of B and E events, in the dialect FLEX; slices as long as their cycles at 557.1 MHz."""
    begun: dict[tuple[str, int], list[Event]] = defaultdict(list)
    slices = []
    for event in json.loads((DATA / "sample_flex.json").read_text()):
        key = (event["name"], event["tid"])
        if event["ph"] == "B":
            begun[key].append(event)
            continue
        attributes = {name: int(value, 0) for name, value in begun[key].pop()["attr"].items()}
        counters = [attributes.pop(f"TS{n}") for n in range(1, 6)]
        window = {"Prep": (1, 2), "Exec": (2, 3)}.get(event["name"].split()[-1], (0, 4))
        duration = (counters[window[1]] - counters[window[0]]) / 557.1
        slices.append(slice_(event["name"], event["ts"] - duration, duration, counters, **attributes))
    return trace(sorted(slices, key=lambda each: float(each["ts"])))


def test_a_real_job() -> None:
    made = sample()
    log = str(DATA / "sample_compiler_log.txt")
    options = Options(soc_mhz=557.1, compiler_logs=(log,), power_scale=12 / 512 * 5.37 / 1000)
    compute_utilization(made, options)
    total = made.tables["categories"].to_pylist()[-1]
    assert (total["Category"], total["Calls"], total["Ideal_Cyc"], total["PT_Util"]) == ("Total", 17, 556336, 0.1872)
    assert (round(total["Kernel_Time"], 3), total["Ideal_Time"]) == (2702.122, 505.76)
    assert made.messages.said[-1].text.startswith("pid=0: avg_mm_util=38.607, ")

    calculate_stats(made, options)
    # The reference says 22.97 %: it counts the file's two kernels of 280.942 us at one time, which are the same, twice.
    active = made.tables["active"].to_pylist()[0]
    assert (round(active["Active percentage"], 2), round(active["Elapsed Time"], 3)) == (20.58, 11763.226)

    compute_power(made, options)
    watts = sorted(round(value, 1) for *_, value in points(made, "Power"))
    assert (watts[:2], watts[-1]) == ([32.3, 34.7], 38.8)  # the least is between two kernels that end 1.7 us apart


def test_each_rank_has_its_own_log(tmp_path: Path) -> None:
    kernels = [slice_("k Cmpt Exec", 0, 10, (0, 0, 0, 10000, 10000), pid=pid) for pid in (0, 1, 2)]
    made = trace(kernels)
    paths = [written(tmp_path, {"k-opCatBmm_fp16": cycles}, name=f"{cycles}") for cycles in (1100, 2200)]
    compute_utilization(made, Options(compiler_logs=tuple(paths)))
    assert points(made, "PT Active") == [(0, 0, 10.0), (0, 10, 0), (1, 0, 20.0), (1, 10, 0)]
    assert made.messages.said[0].text == "1 of 3 jobs run no kernel of any table of ideal cycles"
    of_rank_2 = [row for row in rows(made, "categories") if row[0] == 2]
    assert [(row[2], row[3]) for row in of_rank_2] == [("StcdpHbm", 0), ("other", 10), ("Total", 10)]


def test_the_table_that_fits_a_job_best(tmp_path: Path) -> None:
    # Given a job of each phase of a run, and a table for each, with the same kernels in another order
    def job(order: str) -> list[Event]:
        return [slice_(f"{name} Cmpt Exec", 10 * n, 10, (0, 0, 0, 10000, 10000)) for n, name in enumerate(order)]

    made = trace(job("abcd"), job("dcba"), job("xyz"))
    first = written(tmp_path, {f"{name}-opCatBmm_fp16": 1100 for name in "abcd"}, before=" PREFILL\n", name="1")
    second = written(tmp_path, {f"{name}-opCatBmm_fp16": 2200 for name in "dcba"}, before=" DECODING\n", name="2")
    both = tmp_path / "both"
    both.write_text(Path(first).read_text() + Path(second).read_text())
    compute_utilization(made, Options(compiler_logs=(str(both),)))

    # Then each job is measured by its table, and the third by none
    totals = [(row[1], row[5], row[9]) for row in rows(made, "categories") if row[2] == "Total"]
    assert totals == [("ITL", 4, 0.2), ("TTFT", 4, 0.1), ("UNKN", 3, 0.0)]


def test_a_job_that_fits_no_table_clearly(tmp_path: Path) -> None:
    made = two_operations()
    log = written(tmp_path, {"k_1-opCatBmm_fp16": 22000}, {"k_1-opCatBmm_fp16": 11000})
    compute_utilization(made, Options(compiler_logs=(log,)))
    assert made.messages.said[0].text == "1 of 1 jobs do not clearly fit one table of ideal cycles"


def test_autopilot_knows_totals_only(tmp_path: Path) -> None:
    made = two_operations()
    log = written(tmp_path, {"Total": 49500}, before="DSM-AutoPilot BEGIN\n")
    compute_utilization(made, Options(compiler_logs=(log,)))
    assert points(made, "PT Active") == [(0, 1000, 50.0), (0, 1110, 0.0)]
    assert np.isnan(made.slices.extra["pt_active"]).all()
    assert [row[2:] for row in rows(made, "categories")] == [
        ("StcdpHbm", 0, 0, 0, 0, 0, 0, 0),
        ("other", 90.0, 1.0, 2, 0, 0, 0, 0),
        ("Total", 90.0, 1.0, 2, 45.0, 49500, 1.0, 0.5),
    ]


def test_kernels_of_torch(tmp_path: Path) -> None:
    made = launched()
    log = written(tmp_path, {"mm_1-opCatBmm_fp16": 27500, "add_2-opCatScalar": 0})
    compute_utilization(made, Options(compiler_logs=(log,)))
    assert points(made, "PT Active") == [(0, 1070, 50.0), (0, 1120, 0.0)]
    assert rows(made, "categories_cycles")[-1][2:5] == (80000, 1.0, 2)


def test_a_log_that_is_missing_is_said_once() -> None:
    made = two_operations()
    compute_utilization(made, Options(compiler_logs=("/none",)))
    assert [each.text for each in made.messages.said] == ["/none is neither a file nor a folder."]
    assert made.tables == {}


def test_no_kernels(tmp_path: Path) -> None:
    for made in (trace([]), trace([slice_("host", 0, 1)], dialect=Dialect.TORCH)):
        compute_utilization(made, Options(compiler_logs=(written(tmp_path, {"k": 1}),)))
        assert made.tables == {}
