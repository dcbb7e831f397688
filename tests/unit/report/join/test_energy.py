"""The energy of GPUs is divided among what ran, and what is left is idle: all of it adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from iaprof.formats.energy import Energy, whole_parts
from unit.capturing import HEADER, capture, launch, record, stall
from unit.in_process import iaprof as run

MS = 1_000_000
START = 1_000_000_000
ONE, TWO = 0x1000, 0x2000
LAUNCHES = [launch(START, 7, ONE, 0, name="one"), launch(START, 7, TWO, 0, name="two")]


def metric(ms: int, name: str, value: float, stream: int = 0) -> dict[str, Any]:
    return {"time_ns": START + ms * MS, "stream": stream, "pid": None, "name": name, "value": value}


def read(ms: int, since: int, one: int, two: int = 0, stream: int = 0) -> dict[str, Any]:
    records = [record(ONE + 8, sbid=one), record(TWO + 8, send=two)]
    return stall(START + ms * MS, *records, begin_ns=START + since * MS, stream=stream)


def top(path: Path, *more: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Joules by kernel, and the parts of all; checks that they add up exactly."""
    done = run("top", path, "--by", "energy", "--json", *more)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    parts = {name.removesuffix("_joules"): round(value * 1e9) for name, value in found["energy"].items()}
    assert parts["selected"] == sum(round(entry["joules"] * 1e9) for entry in found["entries"])
    total = parts.pop("total")
    assert sum(parts.values()) == total
    return {entry["kernel"]: entry["joules"] for entry in found["entries"]}, {
        name: part / 1e9 for name, part in (parts | {"total": total}).items()
    }


# 100 J in the first 100 ms, of which the GPU is busy half, and 10 J in the second, idle.
COUNTER = [
    metric(0, "energy-card-J", 5000.0),
    metric(100, "energy-card-J", 5100.0),
    metric(200, "energy-card-J", 5110.0),
]
BUSY = [metric(100, "busy-compute-percent", 50.0), metric(100, "busy-copy-percent", 20.0),
        metric(200, "busy-compute-percent", 0.0)]  # fmt: skip


def test_a_counter_of_energy_is_divided_by_time_utilization_and_samples(tmp_path: Path) -> None:
    # 50 ms have 50 J, of which the GPU was busy with 25: 3 of 4 samples are of one. The next 50 ms have no samples.
    path = capture(tmp_path / "x", HEADER, launch=LAUNCHES, metric=[*COUNTER, *BUSY], stall=[read(50, 0, 30, 10)])
    kernels, parts = top(path)
    assert kernels == pytest.approx({"one": 18.75, "two": 6.25}, abs=1e-8)
    assert parts == pytest.approx(
        {"selected": 25.0, "not_selected": 0.0, "busy_without_stalls": 25.0, "idle": 60.0, "total": 110.0}, abs=1e-8
    )


def test_power_alone_is_integrated_over_the_time_since_the_row_before(tmp_path: Path) -> None:
    power = [metric(0, "power-pkg-W", 999.0), metric(100, "power-pkg-W", 1000.0), metric(200, "power-pkg-W", 100.0)]
    path = capture(tmp_path / "x", HEADER, launch=LAUNCHES, metric=[*power, *BUSY], stall=[read(50, 0, 30, 10)])
    assert top(path)[1] == pytest.approx(
        {"selected": 25.0, "not_selected": 0.0, "busy_without_stalls": 25.0, "idle": 60.0, "total": 110.0}, abs=1e-8
    )


def test_what_a_card_uses_is_not_counted_again_for_its_package(tmp_path: Path) -> None:
    package = [metric(ms, "energy-pkg-J", ms / 10) for ms in (0, 100, 200)]
    path = capture(tmp_path / "x", HEADER, launch=LAUNCHES, metric=[*package, *COUNTER], stall=[read(50, 0, 1)])
    assert top(path)[1]["total"] == 110.0


def test_without_utilization_the_time_of_reads_with_samples_counts_as_busy(tmp_path: Path) -> None:
    path = capture(
        tmp_path / "x", HEADER, launch=LAUNCHES, metric=COUNTER, stall=[read(50, 0, 30, 10), read(180, 50, 4)]
    )
    kernels, parts = top(path)
    # The second read is of 130 ms, but samples stand for 100 ms at most: 20 J until 100 ms, then 8 J.
    assert kernels == pytest.approx({"one": 37.5 + 28, "two": 12.5}, abs=1e-8)
    assert parts["idle"] == pytest.approx(110 - 78, abs=1e-8) and parts["busy_without_stalls"] == 0


def test_kernels_that_are_not_selected_keep_their_energy(tmp_path: Path) -> None:
    path = capture(tmp_path / "x", HEADER, launch=LAUNCHES, metric=[*COUNTER, *BUSY], stall=[read(50, 0, 30, 10)])
    kernels, parts = top(path, "--kernel", "two")
    assert kernels == pytest.approx({"two": 6.25}, abs=1e-8)
    assert parts["not_selected"] == pytest.approx(18.75, abs=1e-8) and parts["idle"] == pytest.approx(60.0, abs=1e-8)


def test_only_the_energy_of_the_selected_time_counts(tmp_path: Path) -> None:
    path = capture(tmp_path / "x", HEADER, launch=LAUNCHES, metric=[*COUNTER, *BUSY], stall=[read(50, 0, 30, 10)])
    assert top(path, "--time", "25ms-75ms")[1] == pytest.approx(
        {"selected": 12.5, "not_selected": 0.0, "busy_without_stalls": 12.5, "idle": 25.0, "total": 50.0}, abs=1e-6
    )


def test_streams_of_a_gpu_share_its_energy(tmp_path: Path) -> None:
    stream = {"layout": "xe2", "ip_version": [20, 1, 0], "card": "card0"}
    header = HEADER | {"streams": [stream, stream]}
    stalls = [read(100, 0, 1), read(100, 0, 0, 1, stream=1)]
    kernels, parts = top(capture(tmp_path / "x", header, launch=LAUNCHES, metric=COUNTER, stall=stalls))
    assert kernels == pytest.approx({"one": 50.0, "two": 50.0}, abs=1e-8)
    assert parts["total"] == 110.0


def test_a_counter_that_falls_was_reset_and_damage_is_no_energy(tmp_path: Path) -> None:
    odd = [metric(250, "energy-card-J", 3.0), metric(300, "energy-card-J", 4.0), metric(310, "energy-card-J", 1e300)]
    path = capture(tmp_path / "x", HEADER, launch=LAUNCHES, metric=[*COUNTER, *odd], stall=[read(50, 0, 1)])
    assert top(path)[1]["total"] == pytest.approx(111.0)


def ran(begin_us: int, end_us: int, stream: int = 0) -> dict[str, Any]:
    times = {"time_ns": START + begin_us * 1000, "end_ns": START + end_us * 1000}
    return times | {"pid": 7, "stream": stream, "correlation": 0, "address": ONE, "queue": 0}


def test_where_it_is_known_when_kernels_ran_they_share_the_energy_of_that_time(tmp_path: Path) -> None:
    # given two kernels that run for 30 ms together, with 1 J each ms, and later for 1 ms, with 0.1 J
    runs = [ran(30_000, 50_000), ran(20_000, 40_000), ran(150_000, 151_000)]
    reads = [read(100, 0, 30, 10), read(200, 100, 0, 5)]
    kinds: Any = {"launch": LAUNCHES, "stall": reads, "execution": runs}
    # when, then
    kernels, parts = top(capture(tmp_path / "x", HEADER, metric=COUNTER, **kinds))
    assert kernels == pytest.approx({"one": 22.5, "two": 7.6}, abs=1e-8)
    assert parts == pytest.approx(
        {"selected": 30.1, "not_selected": 0.0, "busy_without_stalls": 0.0, "idle": 79.9, "total": 110.0}, abs=1e-8
    )
    # and utilization, which knows of copies, says how long the GPU was busy
    kernels, parts = top(capture(tmp_path / "y", HEADER, metric=[*COUNTER, *BUSY], **kinds))
    assert kernels == pytest.approx({"one": 22.5, "two": 7.6}, abs=1e-8)
    assert parts == pytest.approx(
        {"selected": 30.1, "not_selected": 0.0, "busy_without_stalls": 19.9, "idle": 60.0, "total": 110.0}, abs=1e-8
    )
    assert top(tmp_path / "x", "--time", "25ms-101ms")[1]["selected"] == pytest.approx(25.0, abs=1e-5)


def test_samples_that_come_late_have_the_energy_of_their_kernels(tmp_path: Path) -> None:
    # given a kernel that ends when a read is made, and samples that may be of the time before that read, too
    kinds: Any = {"launch": LAUNCHES, "metric": COUNTER, "execution": [ran(80_000, 100_000)]}
    late = [read(200, 0, 4)]
    assert top(capture(tmp_path / "x", HEADER, stall=late, **kinds))[0] == pytest.approx({"one": 20.0})
    both = [read(100, 0, 4), read(200, 0, 0, 4)]
    kernels, _ = top(capture(tmp_path / "y", HEADER, stall=both, **kinds))
    assert kernels == pytest.approx({"one": 10.0, "two": 10.0})
    # and two processes, whose reads are made at the same time
    same = [read(100, 0, 4), read(100, 50, 0, 4)]
    kernels, _ = top(capture(tmp_path / "z", HEADER, stall=same, **kinds))
    assert kernels == pytest.approx({"one": 10.0, "two": 10.0})


def test_executions_at_times_that_cannot_be(tmp_path: Path) -> None:
    odd = [ran(50_000, 20_000), ran(0, 10**16), {**ran(0, 1), "time_ns": 1 << 63, "end_ns": (1 << 64) - 1}]
    odd[1]["end_ns"] = (1 << 64) - 1
    kinds: Any = {"launch": LAUNCHES, "metric": COUNTER, "execution": odd, "stall": [read(100, 0, 1)]}
    assert top(capture(tmp_path / "x", HEADER, **kinds))[0] == pytest.approx({"one": 100.0})


def test_tables_have_a_column_and_a_row_for_idle(tmp_path: Path) -> None:
    path = capture(tmp_path / "x", HEADER, launch=LAUNCHES, metric=[*COUNTER, *BUSY], stall=[read(50, 0, 30, 10)])
    assert run("top", path, "--by", "energy", "-q").out == (
        " JOULES    SHARE  SAMPLES  TOP REASON  LAUNCHES  KERNEL\n"
        " 18.750   17.0 %       30  sbid 100 %         1  one\n"
        "  6.250    5.7 %       10  send 100 %         1  two\n"
        " 25.000   22.7 %                                 [busy without stalls]\n"
        " 60.000   54.5 %                                 [idle]\n"
        "110.000  100.0 %       40  sbid 75 %          2  (total)\n"
    )
    assert "   75.0 %  18.750  sbid" in run("top", path, "-q").out
    assert ',"sbid",30,18.75\n' in run("report", path, "--format=csv").out


def test_a_capture_without_sensors_says_so(tmp_path: Path) -> None:
    path = capture(tmp_path / "x", HEADER, launch=LAUNCHES, stall=[read(50, 0, 1)])
    done = run("top", path, "--by", "energy")
    assert (done.code, done.out) == (1, "") and "has no energy of its GPUs" in done.err
    assert "JOULES" not in run("top", path).out


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.integers(0, 10**15))
def test_whole_parts_add_up_and_are_near(parts: list[float], total: int) -> None:
    values = np.array(parts)
    found = whole_parts(values, total)
    if values.sum() > 0:
        assert found.sum() == total and (found >= 0).all()
        assert np.abs(found - values / values.sum() * total).max() <= 1 + 1e-9 * total


def test_energies_add_up() -> None:
    assert Energy.sum([Energy(1, 2, 3, 4), Energy(10, 20, 30, 40)]) == Energy(11, 22, 33, 44)
    assert Energy(1, 2, 3, 4).total == 10
