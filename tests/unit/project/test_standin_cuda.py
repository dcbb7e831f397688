# SPDX-License-Identifier: Apache-2.0
"""tests/standin/cuda: what an injected library is told of a program is what the ledger has."""

import ctypes
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from standin.cuda import runtime
from standin.cuda.runtime import REDUCE, SCALE, Ledger, is_reason

PERIOD = 14
SAMPLES_PER_MS = 1.5e6 / 2**PERIOD * 16


@dataclass
class Run:
    """What one program did, as the library in it was told, and as it was; by process."""

    code: int
    told: list[dict[str, Any]]
    ledgers: list[Ledger]
    output: str
    errors: str

    @property
    def ledger(self) -> Ledger:
        (ledger,) = self.ledgers
        return ledger

    @property
    def drained(self) -> dict[str, Any]:
        (told,) = self.told
        return told


@dataclass
class Runner:
    folder: Path

    def __call__(
        self, *words: str | float | Path, faults: Collection[str] = (), settings: Mapping[str, str] | None = None
    ) -> Run:
        programs = runtime.build()
        ledger = self.folder / "ledger"
        environment = os.environ | programs.env(ledger, faults, programs.drainer) | dict(settings or {})
        done = subprocess.run(
            programs.command(*words), env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return Run(done.returncode, told, runtime.read_ledgers(ledger), done.stdout, done.stderr)


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def load(name: str = "kernels") -> tuple[str, Path]:
    return "load", runtime.cubin(name)


def test_samples_and_executions_are_those_of_the_ledger(run: Runner) -> None:
    done = run(*load(), "launch", REDUCE, "A", 300, 500, "launch", SCALE, "B", 100, 300, "sync")
    ledger, told = done.ledger, done.drained
    assert done.code == 0
    assert ledger.launches == {(REDUCE, 1): 300, (SCALE, 2): 100}
    assert ledger.by_kernel() == told["kernels"]
    assert ledger.handed() == told["samples"] == told["told"] == sum(each.samples for each in ledger.executions)
    assert ledger.handed() == pytest.approx(180 * SAMPLES_PER_MS, rel=0.01)
    assert ledger.by_kernel()[REDUCE] == pytest.approx(150 * SAMPLES_PER_MS, rel=0.01)
    assert told["records"] == told["launches"] == len(ledger.executions) == 400
    assert all(each.told for each in ledger.executions)
    assert told["record_ns"] == sum(each.end - each.begin for each in ledger.executions) == 180_000_000
    assert ledger.made_by_site() == {
        (kernel, 1 if kernel == REDUCE else 2): count for kernel, count in told["kernels"].items()
    }
    assert not ledger.unread
    assert not ledger.lost
    size = runtime.cubin().stat().st_size
    assert [(cubin.size, cubin.unloaded) for cubin in ledger.cubins] == [(size, False)]
    assert (told["cubins"], told["cubin_bytes"]) == (1, size)


def test_the_same_samples_are_at_the_same_instructions(run: Runner, tmp_path: Path) -> None:
    def rows(name: str) -> list[tuple[str, int, int]]:
        (tmp_path / name).mkdir()
        ledger = Runner(tmp_path / name)(*load(), "launch", REDUCE, "A", 1, 100_000, "sync").ledger
        return [(row.kernel, row.pc, row.reason) for row in ledger.samples]

    first = rows("first")
    assert first == rows("second")
    assert len({pc for _, pc, _ in first}) > 50
    assert all(pc % 16 == 0 and 0 <= pc < 2304 for _, pc, _ in first)


def test_kinds_of_launches(run: Runner) -> None:
    words: list[str | int] = []
    for how in ("plain", "ex", "cooperative", "ptsz", "ex-ptsz"):
        words += ["how", how, "launch", REDUCE, "A", 10, 50]
    done = run(*load(), *words, "sync")
    assert done.ledger.launches == {(REDUCE, 1): 50}
    assert done.drained["launches"] == done.drained["records"] == 50


def test_one_launch_of_a_graph_executes_all_its_kernels(run: Runner) -> None:
    done = run(*load(), "graph", REDUCE, 5, 20, 100, "sync")
    executions = done.ledger.executions
    assert done.ledger.calls["cuGraphLaunch"] == 20
    assert done.ledger.captured == {REDUCE: 5}
    assert len(executions) == 100
    assert len({each.correlation for each in executions}) == 20
    assert len({each.node for each in executions}) == 5
    assert done.drained["launches"] == 20 + 5  # those into the graph
    assert done.drained["records"] == 100


def test_kernels_of_a_stream_take_turns_and_streams_do_not_wait(run: Runner) -> None:
    executions = run(*load(), "threads", 3, REDUCE, "A", 20, 10_000, "sync").ledger.executions
    streams = {each.stream for each in executions}
    assert len(streams) == 3
    for stream in streams:
        times = [(each.begin, each.end) for each in executions if each.stream == stream]
        assert len(times) == 20
        assert all(begin > end for (_, end), (begin, _) in itertools.pairwise(times))
    begins = [min(each.begin for each in executions if each.stream == stream) for stream in streams]
    ends = [max(each.end for each in executions if each.stream == stream) for stream in streams]
    assert max(begins) < min(ends)


def test_libraries_modules_and_contexts(run: Runner) -> None:
    other = runtime.cubin("kernels-lineinfo")
    words = ("context", "library", other, "launch", REDUCE, "B", 20, 500, "unload", "destroy", "use", 0)
    done = run(*load(), "launch", REDUCE, "A", 20, 500, *words, "sync", "copy", 100, 3)
    ledger = done.ledger
    assert sorted((each.context, each.unloaded) for each in ledger.cubins) == [(1, False), (2, True)]
    assert {each.context for each in ledger.executions} == {1, 2}
    assert len({each.crc for each in ledger.cubins}) == 2
    assert ledger.handed() == done.drained["samples"] == sum(each.samples for each in ledger.executions)
    assert (ledger.calls["cuMemcpyHtoD_v2"], ledger.calls["cuMemcpyDtoH_v2"]) == (3, 3)


def test_two_gpus(run: Runner) -> None:
    words = (
        "device",
        1,
        "context",
        *load("kernels-lineinfo"),
        "launch",
        REDUCE,
        "B",
        400,
        500,
        "sync",
        "use",
        0,
        "sync",
    )
    done = run(*load(), "launch", REDUCE, "A", 400, 500, *words, settings={"STANDIN_CUDA_DEVICES": "2"})
    first, second = sorted(done.ledger.contexts, key=lambda each: each.device)
    assert (first.device, second.device) == (0, 1)
    assert first.handed == pytest.approx(200 * SAMPLES_PER_MS, rel=0.01)
    assert second.handed == pytest.approx(200 * SAMPLES_PER_MS, rel=0.01)
    assert first.handed + second.handed == done.drained["samples"]
    assert {(each.context, each.device) for each in done.ledger.executions} == {(first.id, 0), (second.id, 1)}


def test_functions_by_name_are_the_exported_ones() -> None:
    programs = runtime.build()
    cuda = ctypes.CDLL(str(programs.folder / runtime.DRIVER))
    found = ctypes.c_void_p()
    for name, version, flags, exported in (
        ("cuLaunchKernel", 13000, 0, "cuLaunchKernel"),
        ("cuLaunchKernel", 13000, 2, "cuLaunchKernel_ptsz"),
        ("cuMemcpyHtoD", 12000, 2, "cuMemcpyHtoD_v2_ptds"),
        ("cuCtxCreate", 13000, 0, "cuCtxCreate_v4"),
        ("cuCtxCreate", 12000, 0, "cuCtxCreate_v2"),
    ):
        result = cuda.cuGetProcAddress_v2(name.encode(), ctypes.byref(found), version, ctypes.c_uint64(flags), None)
        assert result == 0
        assert found.value == ctypes.cast(getattr(cuda, exported), ctypes.c_void_p).value
    assert cuda.cuGetProcAddress_v2(b"cuNothing", ctypes.byref(found), 13000, ctypes.c_uint64(0), None) == 500


def test_children_are_processes_of_their_own(run: Runner) -> None:
    done = run("fork", 2, *load(), "launch", REDUCE, "A", 20, 500, "sync")
    assert len(done.ledgers) == len(done.told) == 3
    assert sorted(each.handed() for each in done.ledgers) == sorted(told["samples"] for told in done.told)


def test_a_child_of_a_process_that_uses_cuda_cannot_use_it(run: Runner) -> None:
    done = run("init", "fork", 1, *load(), "launch", REDUCE, "A", 20, 500, "sync", settings={"DRAINER_MS": "5"})
    assert len(done.ledgers) == 1
    assert "prog: primary_retain" in done.errors


MANY = ("launch", REDUCE, "A", 800, 500, "sync")  # 0.4 s


def test_all_samples_are_made_handed_out_dropped_or_lost(run: Runner) -> None:
    done = run(*load(), *MANY, faults=["dropped", "nonuser", "full"], settings={"DRAINER_MS": "10"})
    (context,) = done.ledger.contexts
    told = done.drained
    assert context.handed == told["samples"] == sum(row.samples for row in done.ledger.samples if is_reason(row.reason))
    assert (context.dropped, context.nonuser) == (told["dropped"], told["nonuser"])
    assert told["told"] == told["samples"] + told["dropped"] + told["nonuser"]
    assert context.full == context.failures + told["full"] == told["failures"] > 0
    assert context.lost == sum(row.samples for row in done.ledger.lost if is_reason(row.reason)) > 0
    made = context.handed + context.dropped + context.lost
    assert made == pytest.approx(400 * SAMPLES_PER_MS, rel=0.01)
    assert context.dropped == pytest.approx(made / 5, rel=0.01)
    assert context.nonuser == pytest.approx(made / 20, rel=0.01)


def test_samples_that_a_module_takes_with_it(run: Runner) -> None:
    done = run(*load(), "launch", REDUCE, "A", 100, 500, "unload", faults=["unload"])
    (context,) = done.ledger.contexts
    assert context.handed == done.drained["samples"]
    assert context.lost > 0
    assert context.handed + context.lost == sum(each.samples for each in done.ledger.executions)


def test_launches_that_fail(run: Runner) -> None:
    done = run(*load(), "fail", REDUCE, 7, "launch", REDUCE, "A", 3, 500, "sync")
    assert done.ledger.failed_calls == {"cuLaunchKernel": 7}
    assert done.ledger.calls["cuLaunchKernel"] == 3
    assert done.ledger.launches == {(REDUCE, 1): 3}
    assert done.drained["launches"] == 3


def test_little_room_for_rows(run: Runner) -> None:
    few = run(*load(), *MANY, settings={"DRAINER_ROWS": "7"})
    assert few.ledger.handed() == few.drained["samples"] == pytest.approx(400 * SAMPLES_PER_MS, rel=0.01)
    assert few.drained["calls"] > 50


def test_what_is_decoded_after_a_module_was_unloaded_is_handed_out(run: Runner) -> None:
    done = run(*load(), "launch", REDUCE, "A", 100, 500, "unload", *load(), "launch", REDUCE, "A", 100, 500, "sync")
    assert done.ledger.handed() == done.drained["samples"] == pytest.approx(100 * SAMPLES_PER_MS, rel=0.01)
    assert [each.unloaded for each in sorted(done.ledger.cubins, key=lambda each: each.module)] == [True, False]
    assert {row.module for row in done.ledger.samples} == {1, 2}


@pytest.mark.parametrize("fault", ["getdata-fails", "getdata-fails-always"])
def test_calls_that_fail_lose_nothing_that_is_handed_out_later(run: Runner, fault: str) -> None:
    done = run(*load(), *MANY, faults=[fault])
    (context,) = done.ledger.contexts
    assert context.failures == done.drained["failures"] > 1
    assert context.handed == done.drained["samples"] == pytest.approx(400 * SAMPLES_PER_MS, rel=0.01)
    assert context.lost == 0


NONSENSE = ("name", "reason", "reasons", "pc", "function", "crc", "count", "remaining")


@pytest.mark.parametrize("fault", [*(f"nonsense-{kind}" for kind in NONSENSE), "nonsense"])
def test_nonsense_is_beside_what_makes_sense(run: Runner, fault: str) -> None:
    done = run(*load(), *MANY, faults=[fault])
    (context,) = done.ledger.contexts
    assert context.nonsense == done.drained["nonsense"] > 0
    assert context.handed == done.drained["samples"] == pytest.approx(400 * SAMPLES_PER_MS, rel=0.01)


@pytest.mark.parametrize("fault", ["no-permission", "not-supported"])
def test_sampling_that_is_refused(run: Runner, fault: str) -> None:
    done = run(*load(), *MANY, faults=[fault])
    assert done.code == 0
    assert "drainer: Enable: CUPTI_ERROR_" in done.errors
    assert done.ledger.handed() == 0
    assert done.drained["records"] == 800


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("no-configuration", "SetConfigurationAttribute: CUPTI_ERROR_INVALID_OPERATION"),
        ("no-reasons", "GetStallReasons: CUPTI_ERROR_UNKNOWN"),
        ("no-activity", "ActivityEnable: CUPTI_ERROR_NOT_SUPPORTED"),
        ("second-subscriber", "Subscribe: CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"),
    ],
)
def test_calls_that_are_refused(run: Runner, fault: str, error: str) -> None:
    done = run(*load(), "launch", REDUCE, "A", 10, 500, "sync", faults=[fault])
    assert (done.code, done.errors) == (0, f"drainer: {error}\n")
    assert done.ledger.launches == {(REDUCE, 1): 10}


@pytest.mark.parametrize("fault", ["cubin-truncated", "cubin-damaged", "cubin-empty", "cubin-brief"])
def test_cubins_that_a_callback_is_shown(run: Runner, fault: str) -> None:
    done = run(*load(), *MANY, faults=[fault])
    size = runtime.cubin().stat().st_size
    shown = {"cubin-truncated": size // 2, "cubin-empty": 0}.get(fault, size)
    assert done.drained["cubin_bytes"] == shown
    assert (done.drained["nonsense"] == 0) == (fault == "cubin-brief")  # the others have another CRC
    assert done.ledger.handed() == pytest.approx(400 * SAMPLES_PER_MS, rel=0.01)


@pytest.mark.parametrize("fault", ["activity-dropped", "activity-nonsense"])
def test_activity_records_that_are_no_use(run: Runner, fault: str) -> None:
    done = run(*load(), "launch", REDUCE, "A", 400, 100, "sync", faults=[fault])
    ledger, told = done.ledger, done.drained
    assert sum(each.told for each in ledger.executions) == told["records"] == 360
    assert told["record_ns"] == 36_000_000
    bad = (ledger.dropped_records, told["nonsense_records"])
    assert bad == ((40, 0) if fault == "activity-dropped" else (0, 40))


def test_ends(run: Runner) -> None:
    for end, code in (("kill", -signal.SIGKILL), ("abort", -signal.SIGABRT), ("vanish", 0), ("7", 7)):
        done = run(*load(), "launch", REDUCE, "A", 100, 500, "sync", "stop", end)
        assert done.code == code
        assert done.ledgers[-1].launches == {(REDUCE, 1): 100}
        for path in run.folder.glob("ledger.*"):
            path.unlink()


def test_a_process_that_is_told_to_end_writes_its_ledger(tmp_path: Path) -> None:
    programs = runtime.build()
    words = programs.command(*load(), "say", "ready", "repeat", 1000, "launch", REDUCE, "A", 10, 1000, "sync", "end")
    environment = os.environ | programs.env(tmp_path / "ledger")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.terminate()
    (ledger,) = runtime.read_ledgers(tmp_path / "ledger")
    assert process.returncode == 0
    assert sum(ledger.launches.values()) < 10_000


def test_a_second_profiler_is_refused(run: Runner) -> None:
    done = run(*load(), "profile", "launch", REDUCE, "A", 1, 1)
    assert "subscribe 39\n" in done.output
