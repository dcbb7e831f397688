"""Metrics of NVIDIA's GPUs, with the package nvidia-ml-py on the stand-in for NVML."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture.reader import CaptureReader
from integration.recording import BARE, CUDA_IN_TURN, iaprof
from standin.cuda.machine import Machine
from standin.cuda.runtime import REDUCE, SCALE, cubin

pytest.importorskip("pynvml")
pytestmark = CUDA_IN_TURN
WATTS = 200  # nvml.c
FIRST, SECOND = 2000, 1000
WORK = ("load", cubin(), "launch", REDUCE, "A", FIRST, 500, "sync", "launch", SCALE, "B", SECOND, 500, "sync")
NAMES = {
    "frequency-actual-MHz": 1500, "frequency-memory-MHz": 3200, "busy-compute-percent": 50, "busy-memory-percent": 20,
    "power-card-W": WATTS, "temperature-gpu-C": 41, "memory-used-MiB": 3072,
}  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    tmp_path.chmod(0o755)
    yield Machine(tmp_path / "machine")


def record(machine: Machine, *options: str, **more: str) -> tuple[Path, str]:
    """Records; returns the capture, and what was said."""
    path = machine.folder / "cap"
    command = machine.programs.command(*WORK)
    done = iaprof("record", "-v", "-o", path, *BARE, *options, "--", *command, env=machine.env() | more)
    assert done.code == 0, done.err
    return path, done.err


def values(path: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in CaptureReader(path).table("metric").to_pylist():
        if row["stream"] is not None:
            assert row["stream"] == 0
            found.setdefault(row["name"], []).append(row["value"])
    return found


def energy(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    done = iaprof("top", path, "--by", "energy", "--json", "-n0", "-q")
    assert done.code == 0, done.err
    said: Any = json.loads(done.out)
    return {each["kernel"]: each["joules"] for each in said["entries"]}, said["energy"]


def expected(path: Path) -> list[float]:
    """Joules of the work's two kernels, one after the other, in the time between the first energy and the last one."""
    capture = CaptureReader(path)
    measured = [row["time_ns"] for row in capture.table("metric").to_pylist() if row["name"] == "energy-card-J"]
    ran = sorted(zip(*(capture.table("execution")[name].to_pylist() for name in ("time_ns", "end_ns")), strict=True))
    times = [max(min(end, measured[-1]) - max(begin, measured[0]), 0) for begin, end in ran]
    assert len(times) == FIRST + SECOND
    return [WATTS * sum(part) / 1e9 for part in (times[:FIRST], times[FIRST:])]


def test_metrics_and_the_energy_of_each_kernel(machine: Machine) -> None:
    # given a program with 1 s of one kernel and 0.5 s of another one, on a GPU that always draws the same
    path, _ = record(machine)
    # when
    found = values(path)
    kernels, parts = energy(path)
    # then
    assert {name: set(each) for name, each in found.items() if name != "energy-card-J"} == {
        name: {value} for name, value in NAMES.items()
    }
    assert 8 <= len(found["power-card-W"]) <= 30
    reduce, scale = (next(joules for name, joules in kernels.items() if part in name) for part in ("reduce", "scale"))
    assert [reduce, scale] == pytest.approx(expected(path), rel=0.15)
    assert sum(parts[f"{name}_joules"] for name in ("selected", "not_selected", "busy_without_stalls", "idle")) == (
        pytest.approx(parts["total_joules"])
    )


def test_a_gpu_that_nvml_does_not_know_is_recorded_without_metrics(machine: Machine) -> None:
    path, said = record(machine, STANDIN_NVML_UNKNOWN="0000:1b:00.0")
    assert values(path) == {}
    assert said.count("nothing is measured: NVML says 'Not Found'") == 1
    assert CaptureReader(path).count("pc_sample") > 0


def test_a_gpu_that_is_lost_for_nvml(machine: Machine) -> None:
    lost = machine.folder / "lost"
    machine.folder.mkdir(exist_ok=True)
    lost.touch()
    path, said = record(machine, STANDIN_NVML_LOST=str(lost))
    assert values(path) == {}
    assert "NVML says 'GPU is lost'" in said
    assert CaptureReader(path).count("pc_sample") > 0


def test_a_slow_library_is_read_seldom_and_no_sample_is_lost(machine: Machine) -> None:
    # given 20 ms for each answer: 100 ms for all of them
    path, _ = record(machine, STANDIN_NVML_US="20000")
    assert len(values(path).get("power-card-W", [])) <= 1
    assert not {each["what"] for each in CaptureReader(path).header["losses"]} & {"lost", "overflow", "gap", "dropped"}


def test_without_metrics_nvml_is_not_opened(machine: Machine) -> None:
    path, _ = record(machine, "--metric-interval", "0", STANDIN_NVML_US="3000000")
    assert values(path) == {}
