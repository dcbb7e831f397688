"""Captures of NVIDIA's GPUs through the verbs: kernels, functions, lines, reasons and their meanings, queries."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from iaprof.gpu.nvidia import nvdisasm
from iaprof.gpu.nvidia.cubin import read_cubin
from iaprof.gpu.nvidia.reasons import MEANINGS
from iaprof.report.gpu.module import GpuKernel
from iaprof.report.join.kernels import SampledKernels
from unit.capturing import HEADER, capture, launch
from unit.elfwriter import kernel as section
from unit.fakeprogram import build_nvdisasm
from unit.gpu.nvidia.captures import GPU, PIDS, base_of, reads, two_processes
from unit.gpu.nvidia.cubins import PLAIN, SCALE, WITH_LINES, cubin
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
        *(f"{pid},reduce,{base_of(pid) + 0x2600}" for pid in PIDS),
    ]


def test_latency_samples_may_be_missing(tmp_path: Path) -> None:
    path = capture(tmp_path / "cap.parquet", HEADER | GPU, pc_sample=[reads(100, [(64, "wait", 3, 1)], False)])
    sql = "SELECT wait, latency_wait, latency_wait IS NULL AS unknown FROM stalls"
    assert said("query", path, sql, "--format=csv").split() == ["wait,latency_wait,unknown", "3,,True"]
    assert as_json("top", path, "-q")["total"]["samples"] == 3


def test_annotate_has_instructions_lines_and_what_the_reasons_mean(
    cap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(nvdisasm.PROGRAM_VARIABLE, str(build_nvdisasm(tmp_path)))
    assert said("annotate", cap, "reduce", "-q").splitlines() == [
        "reduce",
        "/src/kernels.cu",
        "46 samples, 0.1 % of all; 2 processes, 2 launches",
        "",
        "  SAMPLES     % BARRIER  WAIT SLEEP   OFFSET  INSTRUCTION",
        "       46 100.0    87.0  10.9   2.2           (all)",
        *said("annotate", cap, "reduce", "-q").splitlines()[6:-4],
        "",
        "BARRIER  waits for other warps of its block at a barrier",
        "   WAIT  waits the fixed number of cycles that the instruction before it takes",
        "  SLEEP  sleeping: sleeps, as it asked for",
    ]
    told = as_json("annotate", cap, "scale", "-q")
    assert told["meanings"] == {each: MEANINGS[each] for each in ("active", "long_scoreboard")}
    (listing,) = told["kernels"]
    (hot,) = [each for each in listing["instructions"] if each["samples"] > 1000]
    assert hot["text"].startswith("NOP.X R")
    assert hot["reasons"] == {"long_scoreboard": 70_007}
    assert len(listing["instructions"]) == 32


def test_without_a_decoder_the_report_says_what_to_install(cap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nvdisasm.PROGRAM_VARIABLE, "/none")
    done = iaprof("top", cap)
    assert "nvdisasm was not found: pip install nvidia-cuda-nvdisasm" in done.err


def test_all_reports_can_be_made(cap: Path, tmp_path: Path) -> None:
    for output in (
        "stacks.folded",
        "flame.svg",
        "page.html",
        "cap.pb.gz",
        "firefox.json",
        "table.parquet",
        "trace.pftrace",
    ):
        said("report", cap, "-q", "-o", tmp_path / output)
        assert (tmp_path / output).stat().st_size
    page = (tmp_path / "page.html").read_text()
    texts = [gzip.decompress(base64.b64decode(each)) for each in re.findall(r">(H4sI[^<]+)<", page)]
    assert any(b"waits for other warps of its block at a barrier" in each for each in texts)
    said("info", cap)
    said("archive", cap, "--redact", "-o", tmp_path / "redacted.parquet")
    assert as_json("top", tmp_path / "redacted.parquet", "-q")["total"]["samples"] == 70_063


def test_a_capture_of_both_vendors(cap: Path, tmp_path: Path) -> None:
    intel = Path(__file__).resolve().parents[3] / "data" / "captures" / "format-10.parquet"
    said("merge", cap, intel, "-o", tmp_path / "both.parquet")
    found = as_json("top", tmp_path / "both.parquet", "--by=reason", "-n0", "-q")["entries"]
    reasons = {each["reason"]: each["samples"] for each in found}
    assert reasons["long_scoreboard"] == 70_007
    assert reasons["sbid"] > 0
    sql = "SELECT part, sum(latency_barrier) AS l, sum(sbid) > 0 AS s FROM stalls GROUP BY part ORDER BY part"
    assert said("query", tmp_path / "both.parquet", sql, "--format=csv").split() == [
        "part,l,s",
        "0,,True",
        "1,40,False",
    ]


def test_processes_have_addresses_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of processes whose addresses differ in high bits only needs no decoding to tell them apart."""
    monkeypatch.setenv(nvdisasm.PROGRAM_VARIABLE, str(build_nvdisasm(tmp_path)))
    read: list[set[str]] = []
    reads_kernels = SampledKernels.read

    def noted(self: SampledKernels, kernels: Collection[GpuKernel]) -> None:
        read.append({kernel.name for kernel in kernels})
        reads_kernels(self, kernels)

    monkeypatch.setattr(SampledKernels, "read", noted)
    pids = 4, 8  # the low 32 bits of their bases are the same
    modules = {pid: cubin([section(f"k{pid}", bytes([pid]) * 64)]) for pid in pids}
    kernels = {pid: read_cubin(module).kernels[0] for pid, module in modules.items()}
    path = capture(
        tmp_path / "cap.parquet",
        HEADER | GPU,
        pc_sample=[reads(100, [(base_of(pid) + kernels[pid].address, "wait", pid, 0) for pid in pids])],
        launch=[launch(50, pid, base_of(pid) + kernels[pid].address, 0) for pid in pids],
        kernel=[
            {"time_ns": 1, "pid": pid, "path": "", "digest": bytes([pid]) * 32, "size": 1, "elf": modules[pid],
             "base": base_of(pid)}
            for pid in pids
        ],
    )  # fmt: skip
    assert {each["kernel"]: each["samples"] for each in as_json("top", path, "-q")["entries"]} == {"k4": 4, "k8": 8}
    assert read == [set(), {"k4", "k8"}]
