"""Time series of metrics: their names, which are selected, and how too many values become points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.report.join.selection import Selection, TimeRange
from iaprof.report.merging import merge
from iaprof.report.profile import ReportOptions
from iaprof.report.views.series import MAX_PROCESSES, MAX_SERIES, series
from unit.capturing import HEADER, capture

BEGUN = HEADER["clock"]["monotonic_ns"]
SECOND = 1_000_000_000
ALL = Selection()
Points = list[tuple[float, float]]


def gpu(card: str, **more: int) -> dict[str, Any]:
    return {"layout": "xe2", "ip_version": [20, 1, 0], "card": card, **more}


def metric(second: float, name: str, value: float, stream: int | None = 0, pid: int | None = None) -> dict[str, Any]:
    time_ns = BEGUN + round(second * SECOND)
    return {"time_ns": time_ns, "stream": stream, "pid": pid, "name": name, "value": value}


def cpu(second: float, pid: int, value: float) -> dict[str, Any]:
    return metric(second, "cpu-percent", value, None, pid)


def process(pid: int, comm: str) -> dict[str, Any]:
    row = dict.fromkeys(("ppid", "ns_pid", "cgroup", "container", "uid", "gid"))
    return {**row, "time_ns": BEGUN, "pid": pid, "tid": pid, "event": "running", "comm": comm}


def found(path: Path, selection: Selection = ALL, **more: Any) -> dict[tuple[str, str], Points]:
    return {
        (each.name, each.place): list(zip(each.seconds.tolist(), each.values.tolist(), strict=True))
        for each in series(CaptureReader(path), ReportOptions(selection), **more)
    }


def test_a_single_gpu_needs_no_name_and_rows_are_sorted_by_time(tmp_path: Path) -> None:
    # given a GPU's metrics, and a process's CPU usage
    path = capture(
        tmp_path / "c",
        HEADER | {"streams": [gpu("card0", gt=0, tile=0)]},
        metric=[
            metric(0.5, "frequency-actual-MHz", 900),
            metric(0.25, "frequency-actual-MHz", 400),
            metric(1, "temperature-pkg-C", 60),
            metric(1, "busy-render-percent", 99),
            cpu(1, 7, 150),
        ],
        process=[process(7, "python")],
    )
    # when
    of = found(path)
    # then
    assert list(of.items()) == [
        (("frequency-actual-MHz", ""), [(0.25, 400), (0.5, 900)]),
        (("busy-render-percent", ""), [(1, 99)]),
        (("temperature-pkg-C", ""), [(1, 60)]),
        (("cpu-percent", "python 7"), [(1, 150)]),
    ]


def test_several_gpus_and_gts_are_named(tmp_path: Path) -> None:
    streams = [gpu("card0", tile=0, gt=0), gpu("card0", tile=0, gt=1), gpu("card1", tile=0, gt=0)]
    rows = [metric(1, name, 1, stream) for name in ("busy-copy-percent", "power-card-W") for stream in (0, 2)]
    path = capture(tmp_path / "c", HEADER | {"streams": streams}, metric=[*rows, metric(1, "busy-copy-percent", 2, 1)])
    assert list(found(path)) == [
        ("busy-copy-percent", "card0 tile 0 GT 0"),
        ("busy-copy-percent", "card0 tile 0 GT 1"),
        ("busy-copy-percent", "card1"),
        ("power-card-W", "card0"),
        ("power-card-W", "card1"),
    ]


def test_energy_is_left_out_if_there_is_power(tmp_path: Path) -> None:
    rows = [metric(1, "energy-card-J", 5), metric(1, "power-card-W", 9), metric(1, "energy-pkg-J", 7)]
    assert list(found(capture(tmp_path / "c", metric=rows))) == [("power-card-W", ""), ("energy-pkg-J", "")]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(time_range=TimeRange(1, 2)), {("power-a-W", "card1"): [(1, 2.0)]}),
        (
            Selection(devices=("card1",)),
            {
                ("power-a-W", "card1"): [(1, 2.0)],
                ("cpu-percent", "a 7"): [(0.5, 5.0)],
                ("cpu-percent", "b 8"): [(2, 6.0)],
            },
        ),
        (
            Selection(pids=frozenset({7})),
            {
                ("power-a-W", "card0"): [(0.5, 1.0)],
                ("power-a-W", "card1"): [(1, 2.0)],
                ("cpu-percent", "a 7"): [(0.5, 5.0)],
            },
        ),
    ],
)
def test_selections_apply(selection: Selection, expected: dict[Any, Points], tmp_path: Path) -> None:
    path = capture(
        tmp_path / "c",
        HEADER | {"streams": [gpu("card0"), gpu("card1")]},
        metric=[metric(0.5, "power-a-W", 1, 0), metric(1, "power-a-W", 2, 1), cpu(0.5, 7, 5), cpu(2, 8, 6)],
        process=[process(7, "a"), process(8, "b")],
    )
    assert found(path, selection) == expected


def test_merged_captures_have_hosts_and_a_common_time_0(tmp_path: Path) -> None:
    # given recordings of two machines, the second one begun ten seconds later, at 500 s of its own clock
    for name, monotonic, wall in (("one", BEGUN, 100), ("two", 500 * SECOND, 110)):
        clock = {"monotonic_ns": monotonic, "realtime_ns": wall * SECOND}
        about = HEADER | {"host": {"name": name, "boot_id": name}, "clock": clock, "streams": [gpu("card0")]}
        rows = [{**metric(0, "power-a-W", 3), "time_ns": monotonic + SECOND}]
        capture(tmp_path / name, about, metric=rows)
    # when
    merge([tmp_path / "one", tmp_path / "two"], tmp_path / "m")
    # then
    assert found(tmp_path / "m") == {("power-a-W", "one card0"): [(1, 3)], ("power-a-W", "two card0"): [(11, 3)]}


def test_files_of_one_recording_make_one_series(tmp_path: Path) -> None:
    for part in (0, 1):
        clock = {"monotonic_ns": BEGUN + part * SECOND, "realtime_ns": (100 + part) * SECOND}
        about = HEADER | {"host": {"name": "one", "boot_id": "b"}, "clock": clock, "part": part}
        capture(tmp_path / f"{part}", about, metric=[metric(part + 0.5, "power-a-W", part)])
    merge([tmp_path / "0", tmp_path / "1"], tmp_path / "m")
    assert found(tmp_path / "m") == {("power-a-W", "one"): [(0.5, 0), (1.5, 1)]}


def test_too_many_values_become_means_of_equal_time_slices(tmp_path: Path) -> None:
    # given ten values a second apart, and a limit of five points
    path = capture(tmp_path / "c", metric=[metric(n, "power-a-W", n * n) for n in range(10)])
    # when
    points = found(path, max_points=5)["power-a-W", ""]
    # then each point is the mean of two
    squares = np.arange(10.0).reshape(5, 2) ** 2
    assert points == list(zip([0.5, 2.5, 4.5, 6.5, 8.5], squares.mean(axis=1).tolist(), strict=True))


def test_the_number_of_series_and_processes_is_limited(tmp_path: Path) -> None:
    # given hundreds of metrics, and processes with increasing CPU usage
    names = [metric(1, f"power-{n}-W", n) for n in range(300)]
    path = capture(tmp_path / "c", metric=names + [cpu(1, 1000 + n, n) for n in range(100)])
    # when
    of = found(path)
    # then
    assert len(of) == MAX_SERIES
    busiest = [place for name, place in of if name == "cpu-percent"]
    assert busiest == [str(1099 - n) for n in range(MAX_PROCESSES)]


def test_absurd_values_times_and_streams_are_harmless(tmp_path: Path) -> None:
    rows = [metric(1, "power-a-W", value) for value in (float("nan"), float("inf"), -1e300)]
    late = {**metric(0, "power-a-W", 4, stream=9), "time_ns": (1 << 64) - 1}
    of = found(capture(tmp_path / "c", metric=[*rows, late]))
    assert {key: [value for _, value in points] for key, points in of.items()} == {("power-a-W", "stream 9"): [4]}


def test_a_capture_without_metrics_has_no_series(tmp_path: Path) -> None:
    assert found(capture(tmp_path / "c")) == {}
