"""A capture's time lines as columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from iaprof.formats.capture.reader import CaptureReader
from iaprof.report.merging import merge
from iaprof.timelines.load import arguments, load
from iaprof.timelines.trace import ABSENT, Dialect
from unit.timelines.reading.importing import imported

FLEX: Any = [
    {"ph": "X", "name": "k_1 Cmpt Exec", "pid": 0, "tid": 7, "ts": 1000.5, "dur": 50, "args": {"TS1": "0x10", "x": 1}},
    {"ph": "X", "name": "Flex RoundTrip", "pid": 0, "tid": 8, "ts": 900, "dur": 400.25},
]
TORCH: Any = {
    "deviceProperties": [{"id": 0, "name": "AIU"}],
    "distributedInfo": {"rank": 2},
    "traceEvents": [
        {"ph": "X", "name": "mm", "cat": "kernel", "pid": 0, "tid": 7, "ts": 1, "dur": 2,
         "args": {"External id": 5, "memory bandwidth (GB/s)": 1.5, "y": [2]}},
        {"ph": "s", "name": "ac2g", "id": 4, "pid": 1, "tid": 2, "ts": 3},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
        {"ph": "C", "name": "Power", "pid": 1, "ts": 3, "args": {"Watts": 2.5}},
    ],
}  # fmt: skip


def test_all_columns(tmp_path: Path) -> None:
    trace = load(imported(tmp_path, FLEX, TORCH)[0])
    assert [(file.name, file.dialect, file.rank, file.devices) for file in trace.files] == [
        ("job-0.json", Dialect.FLEX, 0, ()),
        ("job-1.json", Dialect.TORCH, 2, ({"id": 2, "name": "AIU"},)),
    ]
    assert trace.files[1].members == {"distributedInfo": {"rank": 2}}
    slices = trace.slices
    assert slices.file.tolist() == [0, 0, 1]
    assert trace.texts.taken(slices.name).to_pylist() == ["k_1 Cmpt Exec", "Flex RoundTrip", "mm"]
    assert trace.texts.taken(slices.category).to_pylist() == [None, None, "kernel"]
    assert slices.start.tolist() == [1_000_500, 900_000, 1000]
    assert slices.duration.tolist() == [50_000.0, 400_250.0, 2000.0]
    assert slices.counters.tolist() == [[16] + [ABSENT] * 4, [ABSENT] * 5, [ABSENT] * 5]
    assert slices.has_counters.tolist() == [True, False, False]
    assert slices.bandwidth.tolist()[2] == 1.5 and np.isnan(slices.bandwidth[:2]).all()
    assert slices.extra["External id"].tolist() == [ABSENT, ABSENT, 5]
    assert slices.row.tolist() == [0, 1, 2]
    assert (trace.flows.id.tolist(), trace.texts.taken(trace.flows.phase).to_pylist()) == ([4], ["s"])
    assert trace.texts.taken(trace.instants.name).to_pylist() == ["process_name"]
    assert (trace.points.value.tolist(), trace.texts.taken(trace.points.series).to_pylist()) == ([2.5], ["Watts"])
    assert trace.is_torch(slices).tolist() == [False, False, True]


def test_parts_of_a_merged_capture_are_files_of_their_own(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder, content in zip(folders, [FLEX, TORCH], strict=True):
        folder.mkdir()
        imported(folder, content)
    merge([folder / "run.parquet" for folder in folders], tmp_path / "merged.parquet")
    capture = CaptureReader(tmp_path / "merged.parquet")
    trace = load(capture)
    by_name = dict(zip(trace.texts.taken(trace.slices.name).to_pylist(), trace.slices.file.tolist(), strict=True))
    assert {name: trace.files[file].rank for name, file in by_name.items()} == {
        "k_1 Cmpt Exec": 0, "Flex RoundTrip": 0, "mm": 2,
    }  # fmt: skip
    with arguments(capture, "slice") as args_of_slices:
        everything = args_of_slices.take(np.arange(3)).to_pylist()
    names = trace.texts.taken(trace.slices.name).to_pylist()
    assert {name: args and json.loads(f"{{{args}}}") for name, args in zip(names, everything, strict=True)} == {
        "k_1 Cmpt Exec": {"x": 1}, "Flex RoundTrip": None, "mm": {"y": [2]},
    }  # fmt: skip


def test_args_of_some_rows(tmp_path: Path) -> None:
    events = [{**FLEX[0], "args": {"n": number}} for number in range(100)]
    capture, _ = imported(tmp_path, events)
    rows = np.array([3, 50, 99])
    with arguments(capture, "slice") as args_of_slices:
        assert args_of_slices.take(rows).to_pylist() == ['"n":3', '"n":50', '"n":99']
        assert args_of_slices.take(np.empty(0, np.int64)).to_pylist() == []
        assert args_of_slices.take(np.array([-1, 100])).to_pylist() == [None, None]


def test_a_capture_without_time_lines() -> None:
    data = Path(__file__).parents[2] / "data" / "captures"
    trace = load(CaptureReader(data / "format-8.parquet"))
    assert (len(trace.slices), len(trace.flows), len(trace.points), trace.files) == (0, 0, 0, [])
