"""Files for TensorBoard, by the rules of its plugin for the overview and the distributed view.

They are those of torch_tb_profiler 0.4.3, in profiler/trace.py and profiler/event_parser.py: a slice of a kernel counts
as communication if its `External id`, or its lack of one, is that of a collective's slice; a later collective with an
id replaces an earlier one; only what is in a step counts. tests/programs/test_tensorboard.py has the plugin itself.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from iaprof.timelines.intervals import Union
from iaprof.timelines.options import Options
from iaprof.timelines.stages.refinement import place_on_devices
from iaprof.timelines.trace import ABSENT, Dialect
from unit.in_process import iaprof
from unit.timelines.clock_examples import e6
from unit.timelines.traces import slice_, trace

COLLECTIVES = {
    f"{library}:{operation}"
    for library in ("nccl", "gloo")
    for operation in ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter")
}
OPERATORS = ("cpu_op", "operator", "python")


def plugin(path: Path) -> tuple[float, float, float, int]:
    """What the plugin says: us of computation, of communication and of both at once, and how many collectives."""
    slices = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]

    def intervals(chosen: list[dict[str, Any]]) -> Union:
        starts = np.array([round(event["ts"] * 1000) for event in chosen], np.int64)
        return Union.of(starts, starts + np.array([round(event["dur"] * 1000) for event in chosen], np.int64))

    annotations = [each for each in slices if each["cat"] in ("user_annotation", "gpu_user_annotation", *OPERATORS)]
    collectives = [each for each in annotations if each["name"] in COLLECTIVES]
    by_id = {each["args"].get("External id"): each for each in collectives}
    kernels = [each for each in slices if each["cat"] == "kernel"]
    communication = intervals(collectives + [each for each in kernels if each["args"].get("External id") in by_id])
    others = [each for each in kernels if each["args"].get("External id") not in by_id]
    operators = [each for each in annotations if each["cat"] in OPERATORS and each["name"] not in COLLECTIVES]
    computation = intervals(others or operators)
    steps = intervals([each for each in annotations if each["name"].startswith("ProfilerStep#")])
    if not len(steps.starts):
        of_host = intervals([each for each in slices if each["cat"] in OPERATORS])
        steps = Union(of_host.starts[:1], of_host.ends[-1:])

    def both(one: Union, other: Union) -> int:
        return int(one.within(other.starts, other.ends).sum())

    overlap = Union.of(
        np.append(computation.starts, communication.starts), np.append(computation.ends, communication.ends)
    )
    overlapped = both(computation, steps) + both(communication, steps) - both(overlap, steps)
    return both(computation, steps) / 1000, both(communication, steps) / 1000, overlapped / 1000, len(by_id)


def all_reduces(count: int, rank: int) -> list[dict[str, Any]]:
    """The all-reduce of e6 this many times, a ms apart: the events of a rank."""
    found = []
    for number in range(count):
        for event in e6(0)[rank]:
            counters = {f"TS{n}": str(event["args"][f"TS{n}"] + 1_000_000 * number) for n in range(1, 6)}
            found.append({**event, "ts": event["ts"] + 1000 * number, "args": {**event["args"], **counters}})
    return found


def test_each_collective_is_one_and_kernels_compute(tmp_path: Path) -> None:
    # Given six all-reduces of 100 us, 1040 to 1140, between kernels of 1000 to 1040 and 1160 to 1200, with and without
    # operators of the host: one of them would be the step, and ends before the last kernels
    for host in ([], [{"ph": "X", "name": "Flex RoundTrip", "pid": 0, "tid": 1, "ts": 900, "dur": 3000}]):
        paths = []
        for rank in (0, 1):
            paths.append(tmp_path / f"rank-{rank}.json")
            paths[-1].write_text(json.dumps([*all_reduces(6, rank), *({**each, "pid": rank} for each in host)]))
        out = tmp_path / "out"
        options = ("--collectives", "--tb", "--align-ranks", "none", "--force", "-q")
        assert iaprof("timeline", *paths, *options, "-o", out).code == 0
        # Then the plugin says the same of both ranks, and what stats_summary.csv does
        ours = list(csv.DictReader((out / "stats_summary.csv").read_text().splitlines()))
        for rank in (0, 1):
            assert plugin(out / f"trace_worker_{rank}.pt.trace.json") == (480, 600, 0, 6)
            assert float(ours[rank]["comm_active_atime"]) == 600
        assert float(ours[0]["comp_active_atime"]) == 480


def test_only_collectives_without_an_id_get_one_that_nothing_else_has() -> None:
    names = ["nccl:all_reduce", "gloo:broadcast", "nccl:all_gather", "nccl:send", "mm", "nccl:reduce"]
    made = trace(
        [slice_(name, 10 * number, 5, cat="user_annotation") for number, name in enumerate(names)],
        dialect=Dialect.TORCH,
    )
    made.slices.extra["External id"] = np.array([7, ABSENT, 0, ABSENT, 12, ABSENT])
    place_on_devices(made, Options())
    assert made.slices.extra["External id"].tolist() == [7, 13, 14, ABSENT, 12, 15]


def test_a_trace_of_pytorch_keeps_its_steps(tmp_path: Path) -> None:
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "pid": 9, "tid": 9, "ts": 10, "dur": 50}
    kernel = {"ph": "X", "cat": "kernel", "name": "mm", "pid": 0, "tid": 7, "ts": 0, "dur": 30, "args": {}}
    content = {"deviceProperties": [{"id": 0}], "distributedInfo": {"rank": 3}, "traceEvents": [step, kernel]}
    (tmp_path / "x.json").write_text(json.dumps(content))
    assert iaprof("timeline", tmp_path / "x.json", "--tb", "-o", tmp_path / "out", "-q").code == 0
    assert plugin(tmp_path / "out" / "trace_worker_3.pt.trace.json") == (20, 0, 0, 0)
