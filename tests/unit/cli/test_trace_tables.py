"""What `iaprof timeline` prints of a trace, from tables made by hand."""

from __future__ import annotations

import pyarrow as pa
import pytest

from iaprof.cli.terminal.trace_tables import show
from unit.report.timeline.traces import trace


def printed(capsys: pytest.CaptureFixture[str], limit: int = 10, **tables: pa.Table) -> list[str]:
    made = trace([])
    made.tables.update(tables)
    show(made, limit)
    return capsys.readouterr().out.splitlines()


def test_communication_beside_computation_and_who_waits(capsys: pytest.CaptureFixture[str]) -> None:
    active = pa.table(
        {"pid": [0, 1], "Elapsed Time": [200.0, 200.0], "Total Kernel Time": [80.0, 90.0],
         "Active percentage": [40.0, 45.0]}
    )  # fmt: skip
    overlap = pa.table({"pid": [0, 1], "Communication": [142.0, 0.0], "Overlap Percent": [28.169, 0.0]})
    waits = pa.table(
        {"pid": [0, 1], "Collectives": [2, 2], "Waits": [0.0, 12.5], "Longest Wait": [0.0, 12.5], "Last": [2, 0],
         "Longest Waits for It": [12.5, 0.0]}
    )  # fmt: skip
    assert printed(capsys, active=active, overlap=overlap, imbalance_ranks=waits) == [
        "RANK     ELAPSED    KERNELS     BUSY  COMMUNICATION  OVERLAPPED",
        "   0  200.000 us  80.000 us  40.00 %     142.000 us     28.17 %",
        "   1  200.000 us  90.000 us  45.00 %",
        "",
        "RANK  COLLECTIVES  WAITED US  LONGEST  LAST IN  OTHERS WAITED",
        "   0            2      0.000    0.000        2         12.500",
        "   1            2     12.500   12.500        0          0.000",
    ]


def test_a_rank_without_communication_has_neither(capsys: pytest.CaptureFixture[str]) -> None:
    active = pa.table(
        {"pid": [0], "Elapsed Time": [200.0], "Total Kernel Time": [80.0], "Active percentage": [40.0]}
    )  # fmt: skip
    overlap = pa.table({"pid": [0], "Communication": [0.0], "Overlap Percent": [0.0]})
    assert printed(capsys, active=active, overlap=overlap)[0].split() == ["RANK", "ELAPSED", "KERNELS", "BUSY"]


def test_a_trace_without_kernels_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys) == ["no kernels: nothing in these traces ran on a device"]


def test_energy_of_a_thousand_idle_devices_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    count = 1000
    joules = [3.0, 2.0, *[1.0] * (count + 1)]
    energy = pa.table(
        {"Energy": joules, "Energy Percent": joules, "Mean Energy": joules, "Calls": [1, 2, 1, *[0] * count],
         "pid": range(count + 3), "Name": ["a", "b", "c", *["[idle]"] * count]}
    )  # fmt: skip
    lines = printed(capsys, 2, energy=energy)
    assert [line.split()[-1] for line in lines[1:3]] == ["a", "b"]
    assert lines[3].strip() == "(1 more)"
    assert lines[-1].strip() == "(744 more)"
    assert len(lines) == 1 + 2 + 1 + 256 + 1


def test_categories_without_calls_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    categories = pa.table(
        {"Pid": [0, 0], "Category": ["other", "Bmm"], "Frac_Time": [0.0, 1.0], "Kernel_Time": [0.0, 5.0],
         "Calls": [0, 1], "Ideal_Time": [0.0, 1.0], "PT_Util": [0.0, 0.2]}
    )  # fmt: skip
    assert [line.split()[1] for line in printed(capsys, categories=categories)] == ["CATEGORY", "Bmm"]
