# SPDX-License-Identifier: Apache-2.0
"""tests/standin/cuda: what an injected library is told of a program is what the ledger has."""

import itertools
import json
import os
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from standin.cuda import runtime
from standin.cuda.runtime import REDUCE, SCALE, Ledger

PERIOD = 14
SAMPLES_PER_MS = 1.5e6 / 2**PERIOD * 16


@dataclass
class Run:
    """What one program did, as the library in it was told, and as it was; by process."""

    code: int
    told: list[dict[str, Any]]
    ledgers: list[Ledger]
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
        return Run(done.returncode, told, runtime.read_ledgers(ledger), done.stderr)


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
    assert told["records"] == told["launches"] == told["matched"] == len(ledger.executions) == 400
    assert told["record_ns"] == sum(each.end - each.begin for each in ledger.executions) == 180_000_000
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
    assert done.drained["launches"] == done.drained["matched"] == 50


def test_one_launch_of_a_graph_executes_all_its_kernels(run: Runner) -> None:
    done = run(*load(), "graph", REDUCE, 5, 20, 100, "sync")
    executions = done.ledger.executions
    assert done.ledger.graph_launches == 20
    assert len(executions) == 100
    assert len({each.correlation for each in executions}) == 20
    assert len({each.node for each in executions}) == 5
    assert done.drained["launches"] == 20 + 5  # those into the graph
    assert done.drained["matched"] == 100


def test_kernels_of_a_stream_take_turns_and_streams_do_not_wait(run: Runner) -> None:
    executions = run(*load(), "threads", 3, REDUCE, "A", 20, 2000, "sync").ledger.executions
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
    assert ledger.copies == 6


def test_children_are_processes_of_their_own(run: Runner) -> None:
    done = run("fork", 2, *load(), "launch", REDUCE, "A", 20, 500, "sync")
    assert len(done.ledgers) == len(done.told) == 3
    assert sorted(each.handed() for each in done.ledgers) == sorted(told["samples"] for told in done.told)


def test_a_child_of_a_process_that_uses_cuda_cannot_use_it(run: Runner) -> None:
    done = run("init", "fork", 1, *load(), "launch", REDUCE, "A", 20, 500, "sync", settings={"DRAINER_MS": "5"})
    assert len(done.ledgers) == 1
    assert "prog: primary_retain" in done.errors
