"""Captures of NVIDIA's GPUs through the verbs: kernels, functions, lines, reasons and their meanings, queries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from iaprof.gpu.nvidia.reasons import MEANINGS
from unit.capturing import HEADER, capture
from unit.gpu.nvidia.captures import GPU, PIDS, base_of, reads, two_processes
from unit.gpu.nvidia.cubins import PLAIN, SCALE, WITH_LINES
from unit.in_process import iaprof

KERNEL = "void math::scale<float>(float*, float const*, int)"
SAMPLES = {
    PIDS[0]: [
        (SCALE, 0xC0, "active", 10, 0),
        (SCALE, 0xF0, "long_scoreboard", 70_000, 60_000),
        ("reduce", 0x170, "barrier", 40, 40),
        ("reduce", 0x5F0, "wait", 5, 0),
    ],
    PIDS[1]: [(SCALE, 0xF0, "long_scoreboard", 7, 6), ("reduce", 0x8F0, "sleeping", 1, 1)],
}


@pytest.fixture(scope="module")
def cap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_processes(tmp_path_factory.mktemp("nvidia") / "cap.parquet", WITH_LINES, SAMPLES)


def said(*words: str | Path) -> str:
    done = iaprof(*words)
    assert done.code == 0, done.err
    return done.out


def as_json(*words: str | Path) -> Any:
    return json.loads(said(*words, "--json"))


def test_a_kernel_lies_at_the_base_of_its_process_and_its_place_in_the_file(cap: Path) -> None:
    found = as_json("top", cap, "-q")["entries"]
    assert {(each["kernel"], each["samples"]) for each in found} == {
        (KERNEL, 70_017),
        ("reduce", 46),
    }
    by_process = as_json("top", cap, "--by=process", "-q")["entries"]
    assert {(each["pid"], each["samples"]) for each in by_process} == {(7, 70_055), (8, 8)}


def test_functions_files_and_lines_of_each_sample(cap: Path) -> None:
    frames = "--frames=process,function,file,line,reason,offset"
    source = "/src/kernels.cu_[G]"
    assert sorted(said("report", cap, frames, "-q").splitlines()) == [
        f"app;-;reduce_[G];{source};line 25_[G];barrier_[g];0x170_[g] 40",
        # a function that the kernel calls, and another that was inlined into it
        f"app;-;reduce_[G];summed(float const*, int)_[G];{source};line 8_[G];wait_[g];0x5f0_[g] 5",
        f"app;-;reduce_[G];summed(float const*, int)_[G];{source};line 9_[G];sleeping_[g];0x8f0_[g] 1",
        f"app;-;{KERNEL}_[G];{source};line 16_[G];active_[g];0xc0_[g] 10",
        f"app;-;{KERNEL}_[G];scaled(float, float)_[G];{source};line 2_[G];long_scoreboard_[g];0xf0_[g] 70007",
    ]


def test_without_lines_functions_are_those_of_the_symbol_table(tmp_path: Path) -> None:
    path = two_processes(tmp_path / "cap.parquet", PLAIN, SAMPLES)
    assert sorted(said("report", path, "--frames=function,line,offset", "-q").splitlines()) == [
        "reduce_[G];0x170_[g] 40",
        "reduce_[G];summed(float const*, int)_[G];0x5f0_[g] 5",
        "reduce_[G];summed(float const*, int)_[G];0x8f0_[g] 1",
        f"{KERNEL}_[G];0xc0_[g] 10",
        f"{KERNEL}_[G];0xf0_[g] 70007",
    ]


def test_reasons(cap: Path) -> None:
    found = as_json("top", cap, "--by=reason", "-n0", "-q")["entries"]
    assert {each["reason"]: each["samples"] for each in found} == {
        "long_scoreboard": 70_007, "barrier": 40, "active": 10, "wait": 5, "sleeping": 1,
    }  # fmt: skip
    assert as_json("top", cap, "--reason=wait,sleeping", "-q")["total"]["samples"] == 6
    assert as_json("top", cap, "--no-active", "-q")["total"]["samples"] == 70_053


def test_queries_have_both_counts(cap: Path, tmp_path: Path) -> None:
    # a count above 65,535 has two records
    sql = (
        "SELECT printf('%x', ip) AS ip, long_scoreboard, latency_long_scoreboard FROM stalls WHERE long_scoreboard > 0"
    )
    at = base_of(7) + 0x24F0
    assert said("query", cap, sql, "--format=csv").split() == [
        "ip,long_scoreboard,latency_long_scoreboard",
        f"{at:x},65535,60000",
        f"{at:x},4465,0",
        f"{at - base_of(7) + base_of(8):x},7,6",
    ]
    (columns,) = said("query", cap, "SELECT * FROM stalls LIMIT 0", "--format=csv").splitlines()
    assert columns.split(",")[4:] == [*MEANINGS, *(f"latency_{each}" for each in MEANINGS if each != "active")]
    kernels = "SELECT pid, kernel, address FROM kernels WHERE kernel = 'reduce'"
    assert said("query", cap, kernels, "--format=csv").split() == [
        "pid,kernel,address",
        f"7,reduce,{base_of(7) + 0x2600}",
    ]


def test_latency_samples_may_be_missing(tmp_path: Path) -> None:
    path = capture(tmp_path / "cap.parquet", HEADER | GPU, pc_sample=[reads(100, [(64, "wait", 3, 1)], False)])
    sql = "SELECT wait, latency_wait, latency_wait IS NULL AS unknown FROM stalls"
    assert said("query", path, sql, "--format=csv").split() == ["wait,latency_wait,unknown", "3,,True"]
    assert as_json("top", path, "-q")["total"]["samples"] == 3
