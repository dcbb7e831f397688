# SPDX-License-Identifier: Apache-2.0
"""Files of `iaprof timeline --tb` in TensorBoard's own plugin: its overview and distributed view, and iaprof's tables.

The plugin counts as communication what has the `External id` of a slice such as `nccl:all_reduce`, and that slice.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unit.in_process import iaprof
from unit.timelines.test_tensorboard import all_reduces

ROOT = Path(__file__).resolve().parents[2]
FIGURES = Path(__file__).parent / "work" / "tensorboard_figures.py"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
EPOCH = 1_700_000_000_000_000  # us
Event = dict[str, Any]


@pytest.fixture(scope="module")
def plugin() -> Path:
    """The folder with its packages."""
    script = ROOT / "scripts" / "test-tensorboard"
    return Path(subprocess.run([script], stdout=subprocess.PIPE, check=True, text=True).stdout.strip())


def shown(plugin: Path, folder: Path) -> dict[str, Any]:
    """What the plugin shows of a folder's files."""
    env = os.environ | {"PYTHONPATH": str(plugin)}
    words = [sys.executable, str(FIGURES), str(folder)]
    found: dict[str, Any] = json.loads(subprocess.run(words, env=env, stdout=subprocess.PIPE, check=True).stdout)
    return found


def written(folder: Path, traces: list[list[Event] | dict[str, Any]]) -> Path:
    """The folder of `iaprof timeline --tb` for traces, a file for each rank."""
    paths = [folder / f"rank-{rank}.json" for rank in range(len(traces))]
    for path, content in zip(paths, traces, strict=True):
        path.write_text(json.dumps(content))
    out = folder / "out"
    assert iaprof("timeline", *paths, "--collectives", "--tb", "--align-ranks", "none", "-q", "-o", out).code == 0
    return out


def table(out: Path, name: str) -> list[dict[str, float]]:
    """A table of iaprof's."""
    return [
        {key: float(value or "nan") for key, value in row.items()}
        for row in csv.DictReader((out / f"{name}.csv").read_text().splitlines())
    ]


def event(name: str, category: str, ts: float, dur: float, **more: Any) -> Event:
    """A slice of PyTorch's profiler."""
    on_device = category == "kernel"
    place = {"pid": 0 if on_device else 4000, "tid": more.pop("tid", 7 if on_device else 4000)}
    return {"ph": "X", "cat": category, "name": name, **place, "ts": EPOCH + ts, "dur": dur, "args": more}


def of_pytorch(rank: int, events: list[Event]) -> dict[str, Any]:
    """A trace of a rank, with a step of 1000 us."""
    about = {"backend": "nccl", "rank": rank, "world_size": 2}
    step = event("ProfilerStep#3", "user_annotation", 0, 1000)
    return {"deviceProperties": [{"id": 0}], "distributedInfo": about, "traceEvents": [step, *events]}


def multiplications(with_ids: bool) -> list[Event]:
    """Kernels from 100 to 300, 350 to 450 and 600 to 850: 550 us."""
    found = []
    for number, (ts, dur) in enumerate([(100, 200), (350, 100), (600, 250)], 1):
        ids = {"External id": number, "correlation": number} if with_ids else {}
        found.append(event("aten::mm", "cpu_op", ts - 60, 30, **ids))
        found.append(event("gemm", "kernel", ts, dur, **ids))
    return found


def operations(found: dict[str, Any], worker: str) -> list[list[Any]]:
    """Name, number, us, and us of transfer of the collectives of a worker."""
    rows = found["distributed"]["operations"][worker]["rows"]
    return [[name, calls, us, transfer] for name, calls, _, _, us, _, transfer, _ in rows]


def test_collectives_of_nccl(plugin: Path, tmp_path: Path) -> None:
    # Given all-reduces from 250 to 400 and from 700 to 900, which end 40 us later on rank 0, as it began earlier; and
    # the slices of the host that queued them, of 30 us each, while a kernel runs
    traces: list[Any] = []
    for rank, longer in ((0, 40), (1, 0)):
        events = multiplications(with_ids=True)
        for number, (ts, dur) in enumerate([(250, 150), (700, 200)], 11):
            ids = {"External id": number, "correlation": number}
            events.append(event("nccl:all_reduce", "user_annotation", ts - 40, 30, **ids))
            events.append(event(NCCL, "kernel", ts, dur + longer, tid=20, **ids))
        traces.append(of_pytorch(rank, events))
    out = written(tmp_path, traces)
    found = shown(plugin, out)
    # Then rank 0 communicates for 190 + 240 us and, on the host, 60; 50 + 90 + 150 of these beside kernels, and the 60
    # And rank 1 for 150 + 200 and 60; 50 + 50 + 150 of these beside kernels, and the 60
    communication, overlap = [430, 350], [290, 250]
    for rank, ours in enumerate(table(out, "overlap")):
        assert (ours["Computation"], ours["Communication"]) == (550, communication[rank])
        assert ours["Overlap"] == overlap[rank]
        both = overlap[rank] + 60
        alone = communication[rank] + 60 - both
        worker = f"trace_worker_{rank}"
        rest = 1000 - 550 - alone
        assert found["distributed"]["overlap"]["3"][worker] == [550 - both, both, alone, rest]
        (step,) = found[worker]
        assert (step["Kernel"], step["Communication"]) == (550, alone)
        # Of each collective the time that the shortest of all ranks took is transfer
        assert operations(found, worker) == [["nccl:all_reduce", 2, communication[rank] + 60, 410]]
        assert found["distributed"]["wait"]["3"][worker] == [410, communication[rank] + 60 - 410]
    assert [each["comm_active_atime"] for each in table(out, "stats_summary")] == communication


def test_collectives_without_ids(plugin: Path, tmp_path: Path) -> None:
    # Given kernels without an id, and collectives on the host: from 250 to 400 and from 700 to 880, or 920 on rank 0
    traces: list[Any] = []
    for rank, longer in ((0, 40), (1, 0)):
        events = multiplications(with_ids=False)
        events += [
            event("gloo:all_reduce", "user_annotation", ts, dur) for ts, dur in ((250, 150), (700, 180 + longer))
        ]
        traces.append(of_pytorch(rank, events))
    out = written(tmp_path, traces)
    found = shown(plugin, out)
    # Then 50 + 50 + 150 us of 150 + 180, or 220, are beside kernels
    for rank, communication in ((0, 370), (1, 330)):
        worker = f"trace_worker_{rank}"
        alone = communication - 250
        assert found["distributed"]["overlap"]["3"][worker] == [300, 250, alone, 1000 - 550 - alone]
        assert found[worker][0]["Kernel"] == table(out, "overlap")[rank]["Computation"] == 550
        assert operations(found, worker) == [["gloo:all_reduce", 2, communication, 330]]
        assert table(out, "stats_summary")[rank]["comm_active_atime"] == communication


def test_collectives_of_the_aiu(plugin: Path, tmp_path: Path) -> None:
    # Given six all-reduces of 100 us, 1040 to 1140, between kernels of 1000 to 1040 and 1160 to 1200, a ms apart
    out = written(tmp_path, [all_reduces(6, rank) for rank in (0, 1)])
    found = shown(plugin, out)
    # Then all is as it is in the tables, and each collective is one
    ours = table(out, "stats_summary")
    for rank in (0, 1):
        worker = f"trace_worker_{rank}"
        computes, both, talks, _ = found["distributed"]["overlap"]["0"][worker]
        assert (computes, both, talks) == (480, 0, 600)
        assert (found[worker][0]["Kernel"], found[worker][0]["Communication"]) == (480, 600)
        assert operations(found, worker) == [["gloo:all_reduce", 6, 600, 600]]
        assert ours[rank]["comm_active_atime"] == 600
    assert ours[0]["comp_active_atime"] == 480
