"""Traces of several tools: which dialect they are told to be, and what counts as a kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unit.in_process import iaprof
from unit.timelines.clock_examples import E1

Json = Any


def x(name: str, ts: float, dur: float, pid: int, tid: int, cat: str | None = None, **args: Json) -> Json:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args} | (
        {"cat": cat} if cat else {}
    )


def process(pid: int, name: str) -> Json:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}


# As pti-gpu's unitrace/src/chromelogger.h writes: a launch, its kernel, a copy, a barrier, and the arrow to the kernel.
UNITRACE = [
    process(5000, "RANK 0 HOST<vm>"),
    process(4294967299, "RANK 0 DEVICE<vm>"),
    x("zeCommandListAppendLaunchKernel", 10, 5, 5000, 5001, "cpu_op", id="1"),
    {"ph": "s", "name": "dep", "cat": "Flow_H2D_1_0", "id": 1, "pid": 5000, "tid": 5001, "ts": 11},
    x("gemm_kernel[SIMD32 {64; 1; 1} {16; 16; 1}]", 20, 30, 4294967299, 1, "gpu_op", id="1"),
    {"ph": "t", "name": "dep", "cat": "Flow_H2D_1_0", "id": 1, "pid": 4294967299, "tid": 1, "ts": 20},
    x("zeCommandListAppendMemoryCopy(H2D)[4096 bytes]", 60, 10, 4294967299, 1, "gpu_op", id="2"),
    x("zeCommandListAppendBarrier", 72, 1, 4294967299, 1, "gpu_op", id="3"),
]
# As rocprof's tblextr.py writes them, and rocprofv3 in Perfetto's format.
ROCPROF = [
    process(2, "0 CPU HIP API"),
    process(1, "1 COPY"),
    process(6, "2 GPU0"),
    x("hipLaunchKernel", 10, 5, 2, 77, BeginNs="10000", EndNs="15000"),
    x("gemm.kd", 20, 30, 6, 0, BeginNs="20000", EndNs="50000"),
    x("CopyHostToDevice", 60, 10, 1, 0, BeginNs="60000", EndNs="70000"),
]
ROCPROF_3 = [
    x("hipLaunchKernel", 10, 5, 900, 901, "hip_api"),
    x("gemm.kd", 20, 30, 1 << 20, 1, "kernel_dispatch"),
    x("MEMORY_COPY_HOST_TO_DEVICE", 60, 10, 1 << 20, 2, "memory_copy"),
]
# As torch_npu's profiler writes trace_view.json: numbers in texts, no categories on the device.
TORCH_NPU = [
    process(100, "Python"),
    process(200, "CANN"),
    process(300, "Ascend Hardware"),
    x("aten::mm", 5, 20, 100, 101, "cpu_op"),
    x("AscendCL@aclnnMm", 10, 5, 200, 201),
    {**x("aclnnMm_MatMul", 20, 30, 300, 2, **{"Task Type": "AI_CORE"}), "ts": "20.000"},
    x("MEMCPY_ASYNC", 60, 10, 300, 2, **{"Task Type": "SDMA_SQE"}),
    x("EVENT_WAIT", 72, 1, 300, 2),
]
# As Kineto writes without CUPTI: no deviceProperties.
TORCH_CPU = {
    "schemaVersion": 1,
    "traceEvents": [x("aten::mm", 5, 20, 100, 101, "cpu_op"), x("aten::add", 40, 5, 100, 102, "cpu_op")],
}
TORCH_XPU = [
    x("aten::mm", 5, 20, 100, 101, "cpu_op"),
    x("gemm_kernel", 20, 30, 0, 7, "kernel", correlation=3),
    x("Memcpy M2D", 60, 10, 0, 7, "gpu_memcpy"),
]
UNKNOWN = [x("step", 0, 100, 7, 1, "game"), x("draw", 10, 20, 8, 1, "game"), x("swap", 40, 5, 9, 1, "game")]

DEVICES: dict[str, tuple[str, Json]] = {
    "unitrace": ("unitrace", UNITRACE),
    "rocprof": ("rocprof", ROCPROF),
    "rocprofv3": ("rocprof", ROCPROF_3),
    "torch_npu": ("torch_npu", TORCH_NPU),
    "torch for XPU": ("torch", TORCH_XPU),
}


def imported(folder: Path, content: Json) -> str:
    """Imports a trace; returns its dialect."""
    path = folder / "trace.json"
    path.write_text(json.dumps(content))
    words = ("import", path, "-o", folder / "run.parquet", "-f")
    (file,) = json.loads(iaprof(*words, "--json").out)["files"]
    return str(file["dialect"])


@pytest.mark.parametrize("tool", DEVICES)
def test_kernels_of_other_tools_are_kernels(tmp_path: Path, tool: str) -> None:
    # Given a launch, a kernel of 30 us from 20 us on, and a copy
    dialect, content = DEVICES[tool]
    assert imported(tmp_path, content) == dialect
    found = json.loads(iaprof("timeline", tmp_path / "run.parquet", "--json").out)
    # Then one process has a kernel, and only that one counts as a rank
    assert [(row["Calls"], row["Total Time"]) for row in found["tables"]["summary"]] == [(1, 30.0)]
    assert [row["Total Kernel Time"] for row in found["tables"]["active"]] == [30.0]


@pytest.mark.parametrize("tool", DEVICES)
def test_copies_and_waits_of_devices_are_no_kernels(tmp_path: Path, tool: str) -> None:
    imported(tmp_path, DEVICES[tool][1])
    assert iaprof("timeline", tmp_path / "run.parquet", "-o", tmp_path / "out", "-q").code == 0
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [event["ts"] for event in slices if event.get("cat") == "gpu_memcpy"] == [60]
    assert [event["ts"] for event in slices if event.get("cat") == "kernel"] == [20]
    # And no process got another number
    assert {event["pid"] for event in slices} == {event["pid"] for event in events_of(DEVICES[tool][1])}


def ranks_of(folder: Path, contents: list[Json]) -> tuple[list[list[int]], Json, list[Json]]:
    """The ranks of files, the tables that `timeline` makes of them, and the slices of its trace.json."""
    paths = [folder / f"results-{number}.json" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_text(json.dumps(content))
    files = json.loads(iaprof("import", *paths, "-o", folder / "run.parquet", "-f", "--json").out)["files"]
    tables = json.loads(iaprof("timeline", folder / "run.parquet", "--json").out)["tables"]
    assert iaprof("timeline", folder / "run.parquet", "-o", folder / "out", "-q", "-f").code == 0
    events = json.loads((folder / "out" / "trace.json").read_text())["traceEvents"]
    return [file["ranks"] for file in files], tables, [event for event in events if event["ph"] == "X"]


def kernel_time(tables: Json) -> list[tuple[int, float]]:
    return [(row["pid"], row["Total Kernel Time"]) for row in tables["active"]]


def longer(content: Json, by: float) -> Json:
    """The same trace with longer kernels: of 30 us."""
    return [{**each, "dur": each["dur"] + by} if each.get("dur") == 30 else each for each in content]


@pytest.mark.parametrize("tool", [ROCPROF, ROCPROF_3, TORCH_NPU])
def test_each_file_of_tools_that_tell_no_rank_is_one(tmp_path: Path, tool: Json) -> None:
    # Given files of two processes, which have the same numbers for what is on them
    ranks, tables, slices = ranks_of(tmp_path, [tool, longer(tool, 7)])
    assert ranks == [[0], [1]]
    assert kernel_time(tables) == [(0, 30), (1, 37)]
    # Then no process has slices of both, and those of the device are the ranks
    places = [{each["pid"] for each in slices if each["args"]["jobname"] == f"results-{n}.json"} for n in (0, 1)]
    assert not places[0] & places[1]
    kernels = {(each["pid"], each["dur"]) for each in slices if each.get("cat") == "kernel"}
    assert kernels == {(0, 30), (1, 37)}


def test_unitrace_tells_the_rank_in_names_of_processes(tmp_path: Path) -> None:
    def of_rank(rank: int) -> Json:
        # Both ranks start with the same id on their hosts; a device's is 2^32 - 1 - 32 * rank
        found = json.loads(json.dumps(UNITRACE).replace("RANK 0", f"RANK {rank}"))
        return [{**each, "pid": 2**32 - 1 - 32 * rank} if each["pid"] > 5000 else each for each in found]

    ranks, tables, slices = ranks_of(tmp_path, [of_rank(3), longer(of_rank(2), 7)])
    assert ranks == [[3], [2]]
    assert kernel_time(tables) == [(2, 37), (3, 30)]
    assert len({each["pid"] for each in slices if each["name"] == "zeCommandListAppendLaunchKernel"}) == 2
    # And without MPI, files are numbered: two devices of a process stay two
    alone = json.loads(json.dumps(UNITRACE).replace("RANK 0 ", ""))
    two = [*alone, x("add", 90, 5, 4294967290, 1, "gpu_op", id="9")]
    ranks, tables, _ = ranks_of(tmp_path, [alone, two])
    assert ranks == [[0], [1]]
    assert sorted(kernel_time(tables))[0] == (0, 30)
    assert sorted(time for _, time in kernel_time(tables)) == [5, 30, 30]


def test_a_trace_of_unitrace_without_anything_on_a_device_is_one(tmp_path: Path) -> None:
    for name in ("HOST<vm>", "RANK 2 HOST<vm>"):
        assert imported(tmp_path, [process(5000, name), x("zeKernelCreate", 10, 5, 5000, 1, "cpu_op")]) == "unitrace"


def test_devices_of_pytorch_on_other_nodes_are_their_ranks(tmp_path: Path) -> None:
    # Given ranks 1 and 9, each of which uses device 1 of its node
    def of_rank(rank: int) -> Json:
        kernel = x("gemm", 20, 30 + rank, 1, 7, "kernel", device=1)
        return {"deviceProperties": [{"id": 0}, {"id": 1}], "distributedInfo": {"rank": rank}, "traceEvents": [kernel]}

    ranks, tables, _ = ranks_of(tmp_path, [of_rank(1), of_rank(9)])
    assert ranks == [[1], [9]]
    assert kernel_time(tables) == [(1, 31), (9, 39)]


def test_hosts_of_pytorch_in_containers_are_one_process_each(tmp_path: Path) -> None:
    # Given two ranks whose hosts have the same process id, as in containers
    def of_rank(rank: int) -> Json:
        events = [x("aten::mm", 5, 20 + rank, 12, 12, "cpu_op"), x("gemm", 20, 30 + rank, 0, 7, "kernel")]
        return {"deviceProperties": [{"id": 0}], "distributedInfo": {"rank": rank}, "traceEvents": events}

    _, tables, slices = ranks_of(tmp_path, [of_rank(0), of_rank(1), of_rank(12)])
    assert kernel_time(tables) == [(0, 30), (1, 31), (12, 42)]
    # Then each process of a host has another number, and that of the device 12 is not among them
    hosts = {each["pid"] for each in slices if each["cat"] == "cpu_op"}
    assert hosts == {10_000_012, 20_000_012, 130_000_012}


def test_files_of_pytorch_that_tell_no_rank_are_said(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    for path in paths:
        path.write_text(json.dumps(TORCH_XPU))
    done = iaprof("import", *paths, "-o", tmp_path / "run.parquet")
    assert done.err.count("tells no rank") == 1
    assert "0.json: it tells no rank (distributedInfo), as 2 other files do not: all of them are rank 0" in done.err
    assert "tells no rank" not in iaprof("import", paths[0], "-o", tmp_path / "run.parquet", "-f").err


def events_of(content: Json) -> list[Json]:
    events = content["traceEvents"] if isinstance(content, dict) else content
    return [event for event in events if event["ph"] == "X"]


def test_arrows_of_unitrace_which_end_in_steps_stay(tmp_path: Path) -> None:
    imported(tmp_path, UNITRACE)
    assert iaprof("timeline", tmp_path / "run.parquet", "-o", tmp_path / "out", "-q").code == 0
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert [(event["ph"], event["ts"]) for event in events if event["ph"] in "stf"] == [("s", 11), ("t", 20)]


def test_torch_without_a_device(tmp_path: Path) -> None:
    assert imported(tmp_path, TORCH_CPU) == "torch"
    done = iaprof("timeline", tmp_path / "run.parquet")
    assert done.out.splitlines() == ["no kernels were found in these traces"]


def test_what_no_tool_is_known_for_is_said_to_be_unknown(tmp_path: Path) -> None:
    assert imported(tmp_path, UNKNOWN) == "unknown"
    said = iaprof("timeline", tmp_path / "trace.json").err
    assert "trace.json: unknown dialect: its slices, counters and flows are read as they are" in said
    done = iaprof("timeline", tmp_path / "run.parquet")
    assert done.out.splitlines() == ["no kernels were found: the trace is of an unknown dialect"]


def test_the_aius_runtime_needs_no_counters(tmp_path: Path) -> None:
    assert imported(tmp_path, [x("AIU Roundtrip", 0, 10, 0, 1), x("k RDMA", 0, 10, 0, 1)]) == "flex"
    assert imported(tmp_path, E1) == "flex"


def test_names_of_other_tools_stay(tmp_path: Path) -> None:
    imported(tmp_path, [x("Receive RDMA", 0, 10, 0, 1, "cpu_op")])
    out = iaprof("query", tmp_path / "run.parquet", "SELECT name FROM slices", "--format=csv").out
    assert "Receive RDMA" in out


def test_an_output_is_told_from_what_it_is_of(tmp_path: Path) -> None:
    imported(tmp_path, TORCH_XPU)
    assert iaprof("timeline", tmp_path / "run.parquet", "-o", tmp_path / "out", "-q").code == 0
    assert imported(tmp_path, json.loads((tmp_path / "out" / "trace.json").read_text())) == "iaprof"
