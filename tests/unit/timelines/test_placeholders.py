"""Placeholders for times, such as 0 and -1, beside real times: no span begins or ends there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from iaprof.timelines.load import load
from iaprof.timelines.options import Options
from iaprof.timelines.placeholders import find_placeholders, placed
from iaprof.timelines.registry import STAGES, run
from iaprof.timelines.trace import Trace
from iaprof.timelines.views.busy import span
from unit.timelines.reading.importing import imported
from unit.timelines.traces import slice_, trace

NOW = 1_700_000_000_000_000  # us since 1970, in 2023
LATEST = 2_305_843_009_213_694  # us: 2^61 ns


def torch(*events: dict[str, Any]) -> dict[str, Any]:
    return {"deviceProperties": [{"id": 0}], "traceEvents": list(events)}


def kernel(ts: float, dur: float = 100, **others: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": "mm", "pid": 0, "tid": 7, "ts": ts, "dur": dur, **others}


def watts(ts: float) -> dict[str, Any]:
    return {"ph": "C", "name": "Power", "pid": 0, "ts": ts, "args": {"Watts": 100}}


def finished(folder: Path, *contents: Any) -> Trace:
    made = load(imported(folder, *contents)[0])
    run(made, Options(), [True] * len(STAGES), lambda number, stage: None)
    return made


def said(made: Trace) -> list[str]:
    return [each.text for each in made.messages.said if each.stage == "TIME"]


@pytest.mark.parametrize("placeholder", [0, -1, -(2**40), -4_000_000_000_000_000, LATEST, 4_500_000_000_000_000])
def test_a_kernel_with_a_placeholder_counts_in_sums_but_in_no_span(tmp_path: Path, placeholder: int) -> None:
    made = finished(
        tmp_path, torch(kernel(NOW), kernel(NOW + 200), kernel(placeholder, 5), watts(NOW), watts(NOW + 300))
    )
    (active,) = made.tables["active"].to_pylist()
    assert (active["Elapsed Time"], active["Total Kernel Time"]) == (300, 205)
    assert active["Active percentage"] == pytest.approx(200 / 3)
    assert made.tables["summary"]["Calls"].to_pylist() == [3]
    assert made.tables["overlap"]["Computation"].to_pylist() == [200]
    begin, end = span(made)
    assert (begin, end - begin) == (NOW * 1000, 300_000)
    sentence = "Found 1 slice with a placeholder for the time, such as 0 or -1: no span of time includes their times"
    assert said(made) == [sentence]


def test_power_with_a_placeholder_is_no_energy_of_fifty_years(tmp_path: Path) -> None:
    made = finished(tmp_path, torch(kernel(NOW), watts(0), watts(NOW), watts(NOW + 300)))
    # 100 W for 300 us, of which the kernel runs for 100
    energy = {row["Name"]: row["Energy"] for row in made.tables["energy"].to_pylist()}
    assert energy == {"mm": 10_000, "[idle]": 20_000}
    assert said(made)[0].startswith("Found 1 counter value with a placeholder")


@pytest.mark.parametrize(
    "times",
    [
        [0, 100, 200],  # from 0 on
        [-50, 100, 200],  # one clock before the other
        [0, 30_000_000],  # half a minute later
        [0, 0],
        [-(2**40), -(2**40) + 100],
        [0, 100_000_000, 100_000_000_000],  # a day
    ],
)
def test_times_that_may_be_real_are(times: list[int]) -> None:
    made = trace([slice_("k", ts, 10) for ts in times])
    find_placeholders(made)
    assert placed(made).all() and not said(made)


def test_each_file_has_its_own_clock() -> None:
    made = trace([slice_("a", 0, 10), slice_("b", 20, 10)], [slice_("c", NOW, 10), slice_("d", 0, 10)])
    find_placeholders(made)
    assert placed(made).tolist() == [True, True, True, False]
    # What a stage moves is still known
    made.slices.start = made.slices.start + NOW * 1000
    made.slices = made.slices.take(made.slices.start > 0)
    assert placed(made).tolist() == [True, True, True, False]


def test_what_stages_make_of_slices_with_placeholders_is_in_no_span(tmp_path: Path) -> None:
    # Given an operation, and the slices of a message, at a real time and at 0
    def flex(name: str, ts: float, dur: float, cycles: int) -> dict[str, Any]:
        counters = {f"TS{n}": str(cycles + 1000 * dur * n / 5) for n in range(1, 6)}
        return {"ph": "X", "name": name, "pid": 0, "tid": 1, "ts": ts, "dur": dur, "args": counters}

    sends = ["SenRdmaSend_3 - Set BcList DmaO", "SenRdmaSend_3 - Xseg to rank 0 DmaO"]
    events = [
        flex("k", NOW, 100, 10**6),
        flex("k", 0, 100, 10**6),
        *(flex(each, NOW + 50, 20, 10**6) for each in sends),
    ]
    made = load(imported(tmp_path, [*events, flex(sends[0], 0, 20, 10**6)])[0])
    for options in (Options(split=True), Options(merge_sends=True)):
        run(made, options, [True] * len(STAGES), lambda number, stage: None)
        begin, end = span(made)
        assert end - begin <= 200_000
        assert (~placed(made)).sum() == 2


def test_a_rank_without_any_time_has_no_elapsed_time(tmp_path: Path) -> None:
    host = {**kernel(NOW), "cat": "cpu_op", "pid": 9}
    made = finished(tmp_path, torch(host, {**host, "ts": NOW + 50}, kernel(0, 5)))
    (active,) = made.tables["active"].to_pylist()
    assert active["Total Kernel Time"] == 5
    assert active["Elapsed Time"] != active["Elapsed Time"]  # NaN: written as null


def test_the_duration_of_a_capture(tmp_path: Path) -> None:
    capture, _ = imported(tmp_path, torch(kernel(NOW), kernel(0), kernel(NOW + 200), kernel(-1), watts(LATEST)))
    header = capture.parts[0].header
    assert header["end_ns"] - header["clock"]["monotonic_ns"] == 300_000
