"""Stalls are put down to the operators in which their kernels were launched."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.report.join import operators as module
from iaprof.report.join.operators import OTHERS, read_operators
from unit.capturing import capture as write, record, stall
from unit.in_process import iaprof as run
from unit.report.together import runs
from unit.report.together.test_clocks import joined, with_events

FORWARD = ("## forward ##", "nn.Module: Net_0")
BACKWARD = ("autograd::engine::evaluate_function: AddmmBackward0", "AddmmBackward0", "aten::mm")
CHAINS = [  # read off the trace, for the times in runs.LAUNCHED
    (*FORWARD, "nn.Module: Linear_0", "aten::linear", "aten::addmm"),
    (*FORWARD, "aten::relu", "aten::clamp_min"),
    (*FORWARD, "nn.Module: Linear_1", "aten::linear", "aten::addmm"),
    BACKWARD,
    BACKWARD,
]


@pytest.fixture
def both(tmp_path: Path) -> Path:
    capture, _ = joined(tmp_path, with_events(runs.calls()))
    return capture.path


def chains(capture: CaptureReader) -> list[tuple[str, ...]]:
    found = read_operators(capture)
    assert found is not None
    launches = found.of_launches(capture.table("launch", ("time_ns", "pid", "tid")))
    return [found.chains[number] for number in launches["operator"].to_pylist()]


def test_each_launch_is_in_the_operators_around_it(both: Path) -> None:
    assert chains(CaptureReader(both)) == CHAINS


def test_top_ranks_operators_by_the_samples_of_their_launches(both: Path) -> None:
    done = run("top", both, "--by", "operator", "--json", "-n", "0")
    assert done.code == 0, done.err
    found = {each["operator"]: (each["samples"], each["inclusive"]) for each in json.loads(done.out)["entries"]}
    assert found == {  # the launches have 1 to 5 samples
        "aten::mm": (9, 9), "aten::addmm": (4, 4), "aten::clamp_min": (2, 2), BACKWARD[0]: (0, 9), BACKWARD[1]: (0, 9),
        FORWARD[0]: (0, 6), FORWARD[1]: (0, 6), "aten::linear": (0, 4), "nn.Module: Linear_1": (0, 3),
        "aten::relu": (0, 2), "nn.Module: Linear_0": (0, 1),
    }  # fmt: skip
    assert json.loads(done.out)["total"]["samples"] == 15


def test_stacks_have_operators_between_process_and_functions(both: Path) -> None:
    lines = run("report", both, "--frames", "process,operator,cpu,function").out.splitlines()
    assert lines == sorted([
        f"app;{';'.join(CHAINS[0])};[no stack];-;gemm_kernel_[G] 1",
        f"app;{';'.join(CHAINS[1])};[no stack];-;_ZN2at13relu_functionEv_[G] 2",
        f"app;{';'.join(CHAINS[2])};[no stack];-;gemm_kernel_[G] 3",
        f"app;{';'.join(BACKWARD)};[no stack];-;at::mm_kernel(float)_[G] 9",
    ])  # fmt: skip


def test_the_table_has_a_column_of_operators(both: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run("report", both, "--format=csv").out)))
    assert {(row["operators"], row["samples"]) for row in rows} == {
        (";".join(CHAINS[0]), "1"), (";".join(CHAINS[1]), "2"), (";".join(CHAINS[2]), "3"), (";".join(BACKWARD), "9"),
    }  # fmt: skip


def test_steps_of_the_profiler_add_up(tmp_path: Path) -> None:
    step = {"ph": "X", "cat": "user_annotation", "pid": runs.PID, "tid": runs.PID, "dur": 50.0}
    events = [{**step, "name": f"ProfilerStep#{number}", "ts": 4568708872000.0 + 100 * number} for number in (7, 8)]
    launched = tuple((4568708872010.0 + 100 * number, runs.MM) for number in (7, 8))
    capture, _ = joined(tmp_path, with_events([*events, *runs.calls()]))
    runs.recorded(tmp_path / "cap.parquet", launched)
    found = read_operators(capture)
    assert found is not None
    rows = CaptureReader(tmp_path / "cap.parquet").table("launch", ("time_ns", "pid", "tid"))
    numbers = found.of_launches(rows)["operator"].to_pylist()
    assert [found.chains[number] for number in numbers] == [("ProfilerStep",)] * 2
    assert len(set(numbers)) == 1


def test_of_too_many_chains_those_with_fewest_launches_become_one(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_CHAINS", 1)
    assert chains(CaptureReader(both)) == [(OTHERS,)] * 3 + [BACKWARD] * 2


def test_what_is_nested_too_deep_has_the_operators_of_its_ancestor(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DEEPEST", 2)
    assert chains(CaptureReader(both)) == [FORWARD] * 3 + [BACKWARD[:2]] * 2


def test_a_redacted_capture_keeps_operators_by_other_names(both: Path, tmp_path: Path) -> None:
    assert run("archive", both, "--redact", "-o", tmp_path / "r.parquet").code == 0
    found = json.loads(run("top", tmp_path / "r.parquet", "--by", "operator", "--json").out)["entries"]
    assert [each["samples"] for each in found][:3] == [9, 4, 2]
    assert not {each["operator"] for each in found} & {name for chain in CHAINS for name in chain}


def test_a_capture_without_a_trace_has_no_operators(tmp_path: Path) -> None:
    stalls = runs.recorded(tmp_path / "cap.parquet")
    done = run("top", stalls, "--by", "operator")
    assert done.code == 0 and "[no operator]" in done.out
    assert "the capture has no operators: join a trace of the same run with iaprof import --with" in done.err


def test_attribution_divides_samples_among_operators_that_launch_a_kernel(tmp_path: Path) -> None:
    """One read has the stalls of two launches of one kernel, which different operators made."""
    trace = with_events(runs.calls())
    capture, _ = joined(tmp_path, trace)
    rows: dict[str, Any] = {kind: capture.table(kind).to_pylist() for kind in ("launch", "slice")}
    at = runs.monotonic_ns(4568708871200.0)
    stalls = [stall(at, record(runs.ADDRESSES[runs.ADDMM] + 8, sbid=10), begin_ns=rows["launch"][0]["time_ns"])]
    path = write(tmp_path / "one.parquet", capture.header, stall=stalls, launch=rows["launch"][:3], slice=rows["slice"])
    done = run("report", path, "--frames", "operator,function")
    assert done.out.splitlines() == [
        f"{';'.join(CHAINS[0])};-;gemm_kernel_[G] 5", f"{';'.join(CHAINS[2])};-;gemm_kernel_[G] 5",
    ]  # fmt: skip
