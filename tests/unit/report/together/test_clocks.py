"""Clocks of traces are joined to a capture's: by launches, by the wall clock, or as they are."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.traces import JoinedBy, TraceClock, describe_clock, trace_clocks
from iaprof.report.together.joining import join_traces
from iaprof.report.together.launches import KernelTexts, SeenLaunches
from iaprof.report.together.matching import Recorded, match
from unit.report.together import runs
from unit.timelines.reading.importing import imported


def joined(folder: Path, *traces: dict[str, Any], **more: Any) -> tuple[CaptureReader, list[TraceClock]]:
    """The capture of the run joined with traces."""
    stalls = CaptureReader(runs.recorded(folder / "cap.parquet", **more))
    imports, _ = imported(folder, *traces)
    with (folder / "both.parquet").open("wb") as output:
        found = join_traces(stalls, imports, output)
    both = CaptureReader(folder / "both.parquet")
    assert trace_clocks(both.header) == [each.clock for each in found]
    return both, [each.clock for each in found]


def with_events(events: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
    whole = {**runs.TRACE, **members, "traceEvents": [*runs.TRACE["traceEvents"], *events]}
    return {key: value for key, value in whole.items() if value is not None}


def test_launches_of_both_join_the_clocks_to_the_nanosecond(tmp_path: Path) -> None:
    both, (clock,) = joined(tmp_path, with_events(runs.calls()))
    assert (clock.by, clock.is_guess) == (JoinedBy.LAUNCHES, False)
    assert clock.offset_ns == runs.BASE_NS - runs.WALL_NS
    assert (clock.launches, clock.fitting, clock.median_ns, clock.largest_ns) == (5, 5, 0, 0)
    assert clock.threads == {(runs.PID, runs.PID): (runs.PID, runs.PID)}
    slices = both.table("slice").to_pylist()
    (first,) = (row for row in slices if row["name"] == "## forward ##")
    assert first["time_ns"] == runs.monotonic_ns(4568708870801.734)
    assert both.count("stall") == 5 and both.count("launch") == 5
    assert both.header["totals"] == {"stalls": 5, "slices": len(slices), "counter_values": 0, "flows": 0, "instants": 8}


def test_without_launches_the_wall_clock_joins_them(tmp_path: Path) -> None:
    _, (clock,) = joined(tmp_path, with_events([]))
    assert (clock.by, clock.is_guess, clock.launches) == (JoinedBy.WALL, False, 0)
    assert clock.offset_ns == runs.BASE_NS - runs.WALL_NS


def test_a_wall_clock_that_was_set_while_recording_is_a_guess(tmp_path: Path) -> None:
    moved = runs.header()["clock_end"]
    moved["realtime_ns"] += 5_000_000_000
    _, (clock,) = joined(tmp_path, with_events([]), clock_end=moved)
    assert (clock.by, clock.is_guess) == (JoinedBy.WALL, True)


def test_launches_outdo_a_wall_clock_that_is_wrong(tmp_path: Path) -> None:
    _, (clock,) = joined(tmp_path, with_events(runs.calls(), baseTimeNanoseconds=runs.BASE_NS + 7_000_000_000))
    assert (clock.by, clock.offset_ns) == (JoinedBy.LAUNCHES, runs.BASE_NS - runs.WALL_NS)


def test_times_of_the_monotonic_clock_stay_as_they_are_and_are_a_guess(tmp_path: Path) -> None:
    event = {"ph": "X", "name": "op", "cat": "cpu_op", "pid": 1, "tid": 1,
             "ts": runs.monotonic_ns(4568708871060.0) / 1000, "dur": 1}  # fmt: skip
    _, (clock,) = joined(tmp_path, {"traceEvents": [event]})
    assert (clock.by, clock.offset_ns, clock.is_guess) == (JoinedBy.MONOTONIC, 0, True)


def test_a_trace_of_another_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    sentence = (
        r"job-0\.json does not fit the capture: none of its launches is in the capture, and by the wall clock it was "
        r"recorded at another time: pass the capture of the same run"
    )
    with pytest.raises(IaprofError, match=sentence):
        joined(tmp_path, with_events([], baseTimeNanoseconds=runs.BASE_NS + 3_600_000_000_000))


def test_processes_of_a_container_are_found_by_their_launches(tmp_path: Path) -> None:
    events = [{**each, "pid": 12, "tid": 13} if each["cat"] == "xpu_runtime" else each for each in runs.calls()]
    _, (clock,) = joined(tmp_path, with_events(events))
    assert clock.threads == {(12, 13): (runs.PID, runs.PID)}


@pytest.mark.parametrize(
    ("rows", "threads"),
    [
        ([(runs.PID, 12)], {(12, 12): (runs.PID, runs.PID)}),
        ([(runs.PID, 12), (900, 12)], {}),  # two containers have such a process
        ([(runs.PID, 12), (12, None)], {}),  # it can be the one outside
        ([(runs.PID, None)], {}),
    ],
)
def test_a_process_of_a_container_without_launches_is_found_by_its_own_pid(
    rows: list[tuple[int, int | None]], threads: dict[Any, Any], tmp_path: Path
) -> None:
    events = [{"ph": "X", "cat": "cpu_op", "name": "op", "pid": 12, "tid": 12, "ts": runs.LAUNCHED[0][0], "dur": 5}]
    _, (clock,) = joined(tmp_path, with_events(events), processes=rows)
    assert clock.by is JoinedBy.WALL
    assert clock.threads == threads


def test_a_second_trace_gets_the_next_number(tmp_path: Path) -> None:
    both, _ = joined(tmp_path, with_events(runs.calls()))
    again, _ = imported(tmp_path, with_events([]))
    with (tmp_path / "three.parquet").open("wb") as output:
        join_traces(both, again, output)
    files = CaptureReader(tmp_path / "three.parquet").table("slice")["file"].to_numpy()
    assert sorted(set(files.tolist())) == [0, 1]


def test_each_clock_is_described_in_a_sentence() -> None:
    clock = TraceClock(JoinedBy.LAUNCHES, 5, False, 1000, 990, 1500, 2_500_000)
    assert describe_clock(clock) == (
        "clocks joined by launches: 990 of 1,000 launches fit, 1.5 us apart in the median, 2.5 ms at most"
    )
    assert describe_clock(replace(clock, drift_ns=-120_000)).endswith(
        ", 2.5 ms at most; from the first to the last launches the trace's clock gets 120.0 us behind"
    )
    assert describe_clock(replace(clock, drift_ns=9_999)) == describe_clock(clock)
    assert describe_clock(TraceClock(JoinedBy.WALL, 5, True)) == (
        "clocks joined by the wall clock; no launches show how well (a guess)"
    )


def loop(steps: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Times and names of a training loop: every step launches the same 40 kernels, a few us apart."""
    random_ = random.Random(seed)
    times, names, now = [], [], 1_000_000_000
    for _ in range(steps):
        for kernel in range(40):
            now += random_.randrange(5_000, 30_000)
            times.append(now)
            names.append(kernel % 9)
        now += random_.randrange(900_000, 1_100_000)
    return np.array(times), np.array(names)


@pytest.mark.parametrize("seed", range(5))
def test_of_steps_that_look_alike_the_right_one_is_found(seed: int) -> None:
    times, names = loop(200, seed)
    one = np.full(len(times), 4)
    recorded = Recorded(SeenLaunches.of(times, one, one, names))
    part = slice(40 * 90, 40 * 95)  # what the profiler saw: five steps of two hundred
    jitter = np.random.default_rng(seed).integers(-2000, 2000, len(times[part]))
    lost = np.random.default_rng(seed + 9).random(len(times[part])) > 0.1
    offset = 123_456_789_012
    trace = SeenLaunches.of((times[part] - offset + jitter)[lost], one[part][lost], one[part][lost], names[part][lost])
    found = match(trace, recorded)
    assert found is not None
    fit, is_ambiguous = found
    assert abs(fit.offset_ns - offset) < 2000
    assert not is_ambiguous
    assert fit.launches == len(trace) and fit.share > 0.95
    assert np.array_equal(names[fit.partner], trace.name[fit.place])


def test_how_far_the_clocks_drift_apart() -> None:
    times, names = loop(100, 3)
    one = np.full(len(times), 4)
    recorded = Recorded(SeenLaunches.of(times, one, one, names))
    for rate in (-50, 0, 50):  # ns in a ms
        trace = SeenLaunches.of(times - 777 + (times - times[0]) * rate // 1_000_000, one, one, names)
        found = match(trace, recorded)
        assert found is not None
        expected = 0.9 * (times[-1] - times[0]) * rate / 1_000_000  # between the middles of the tenths
        assert recorded.drift_ns(trace, found[0]) == pytest.approx(expected, rel=0.02, abs=1)
    few = SeenLaunches.of(times[:30], one[:30], one[:30], names[:30])
    assert recorded.drift_ns(few, recorded.fit(few, 0)) == 0


@pytest.mark.parametrize("rate", [-200, -50, 50, 200])  # ns in a ms
def test_a_steady_drift_is_corrected(rate: int) -> None:
    times, names = loop(1200, 3)
    one = np.full(len(times), 4)
    recorded = Recorded(SeenLaunches.of(times, one, one, names))
    late = np.random.default_rng(1).integers(-500, 500, len(times))
    trace = SeenLaunches.of(times - 777 + (times - times[0]) * rate // 1_000_000 + late, one, one, names)
    found = match(trace, recorded)
    assert found is not None
    fit, drift = recorded.steadied(trace, found[0])
    assert drift is not None
    assert drift.rate == pytest.approx(rate / 1_000_000, rel=0.01)
    assert fit.share > 0.999 and fit.median_ns < 400 < found[0].median_ns
    assert np.abs(drift.corrected(trace.time) + fit.offset_ns - times).max() < 1500


def test_launches_that_are_late_at_one_end_are_no_drift() -> None:
    times, names = loop(100, 3)
    one = np.full(len(times), 4)
    recorded = Recorded(SeenLaunches.of(times, one, one, names))
    late = np.where(np.arange(len(times)) > 0.9 * len(times), 20_000, 0)
    fit = recorded.refined(SeenLaunches.of(times - 777 + late, one, one, names), 777)
    steadied, drift = recorded.steadied(SeenLaunches.of(times - 777 + late, one, one, names), fit)
    assert steadied is fit and drift is None


def test_times_and_durations_of_a_clock_that_drifts_are_corrected(tmp_path: Path) -> None:
    rate = 1e-4
    first = runs.LAUNCHED[0][0]
    seen = [(first + 10_000.0 * number, runs.LAUNCHED[number % 5][1]) for number in range(100)]
    told = [(first + (time - first) * (1 + rate), kernel) for time, kernel in seen]
    recording = CaptureReader(runs.recorded(tmp_path / "long.parquet", seen))
    long = {"ph": "X", "cat": "cpu_op", "name": "long", "pid": 1, "tid": 1, "ts": first, "dur": 1_000_000}
    traces, _ = imported(tmp_path, with_events([*runs.calls(told), long]))
    with (tmp_path / "steady.parquet").open("wb") as output:
        (found,) = join_traces(recording, traces, output)
    joined_ = CaptureReader(tmp_path / "steady.parquet")
    assert found.clock.rate == pytest.approx(rate, rel=0.01)
    assert trace_clocks(joined_.header) == [found.clock]
    assert ", which was corrected" in describe_clock(found.clock)
    rows = [row for row in joined_.table("slice").to_pylist() if row["category"] == "xpu_runtime"]
    wanted = [runs.monotonic_ns(time - 1) for time, _ in seen]
    assert [row["time_ns"] for row in rows] == pytest.approx(wanted, abs=1500)
    assert {row["duration_ns"] for row in rows} == {2000}
    assert [row["duration_ns"] for row in joined_.table("slice").to_pylist() if row["name"] == "long"] == [
        pytest.approx(999_900_010, abs=1000)
    ]


@pytest.mark.parametrize("rate", [1e-2, float("nan"), 1, "1e-4", None])
def test_rates_that_no_clock_has_are_none(rate: Any) -> None:
    described = {"by": "launches", "offset_ns": 5, "is_guess": False, "rate": rate, "steady_ns": 1 << 70}
    (clock,) = trace_clocks({"traces": [{"clock": described}]})
    assert clock is not None and (clock.rate, clock.steady_ns) == (0.0, 0)


def test_a_run_without_any_difference_between_steps_is_a_guess() -> None:
    times, one = np.arange(1, 101) * 5_000_000, np.ones(100, np.int64)
    trace = SeenLaunches.of(times[40:50] - 777, one[:10], one[:10], one[:10])
    found = match(trace, Recorded(SeenLaunches.of(times, one, one, one)))
    assert found is not None and found[1]


def test_mangled_and_cut_names_are_the_same_kernel() -> None:
    texts = KernelTexts()
    numbers = texts.number(["_ZN2at13relu_functionEv", "at::relu_function()", "at::relu_fun…", None, ""])
    assert numbers.tolist() == [0, 0, 1, -1, -1]
    assert texts.whole().tolist() == [0, 0]
