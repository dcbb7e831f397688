# SPDX-License-Identifier: Apache-2.0
"""Closed command lists that are executed again and again on Intel's real runtime; the stand-in's GPU has their kernels.

Counts are compared with the program's own and with those of uprobes that only count; stalls with the stand-in's ledger.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

import elf_sections
from driver.driver import DEVICES, LIBRARIES, Driver, compile_workload, zebin
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.report.join.executions import read_fillings, read_launches
from integration.recording import BARE, IAPROF
from programs.counting import Calls, Place
from standin.hardware import Hardware, Ledger
from waiting import until

pytestmark = pytest.mark.bpf

ROUNDS = 40
CALLS = ("zeCommandQueueExecuteCommandLists", "zeCommandListImmediateAppendCommandListsExp")
FILLED = {"multiply_basic": "fill_first", "multiply_local_access": "fill_first",
          "multiply_local_access_and_tiling": "fill_second", "attention_scores": "fill_again"}  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """A capture of lists.c, what the program says of itself, how often others saw it call, and the stalls' truth."""

    capture: Path
    told: dict[str, Any]
    calls: dict[str, int]
    ledger: Ledger

    def report(self, *options: str) -> str:
        words = [*IAPROF, "report", str(self.capture), "--frames=cpu,function", *options]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout

    def stalls(self, *options: str) -> dict[str, Counter[str]]:
        """Samples by kernel and the one function of the program that fills or executes."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for line in self.report(*options).splitlines():
            frames, count = line.rsplit(" ", 1)
            cpu, gpu = frames.split(";-;")
            places = [frame for frame in cpu.split(";") if frame.startswith(("fill_", "execute_"))]
            (kernel,) = [frame.split("_[")[0] for frame in gpu.split(";") if frame.split("_[")[0] in FILLED] or [gpu]
            found[kernel][places[0] if places else cpu] += int(count)
        return found

    def truth(self, side: int) -> dict[str, Counter[str]]:
        """The same as the stand-in has it: 0 for who filled, 1 for who executed."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for row in self.ledger.rows:
            if row.captured:
                found[row.kernel][row.stack.split("|")[side]] += row.captured
        return found

    def ran(self) -> Counter[str]:
        """How often each kernel of the program was launched: others on the machine may launch some, too."""
        rows = read_launches(CaptureReader(self.capture), ("time_ns", "pid", "list", "name", "flags")).to_pylist()
        found: Counter[str] = Counter()
        for row in rows:
            if row["pid"] == self.told["pid"] and not row["flags"] & LaunchFlags.CARRIED:
                found[row["name"]] += row["count"]
        return found

    def unknown(self) -> int:
        """Executions by the program of lists of which nothing is known."""
        reader = CaptureReader(self.capture)
        found = read_fillings(reader, reader.table("launch", ("time_ns", "pid", "list")))
        assert found is not None
        known, events = found
        return int((events["pid"].to_numpy()[known.unknown] == self.told["pid"]).sum())

    def executions(self) -> list[dict[str, Any]]:
        """The rows of its executions."""
        rows = CaptureReader(self.capture).table("command_list").to_pylist()
        return [row for row in rows if row["event"] == "execute" and row["pid"] == self.told["pid"]]

    def launches(self) -> dict[str, int]:
        """Of each kernel, as `iaprof top` says."""
        words = [*IAPROF, "top", str(self.capture), "--json"]
        done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300)
        return {entry["kernel"]: entry["launches"] for entry in json.loads(done.stdout)["entries"]}

    def info(self) -> dict[str, Any]:
        """What `iaprof info` counts, and its warnings."""
        words = [*IAPROF, "info", str(self.capture), "--json"]
        told: dict[str, Any] = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=300).stdout)
        return told


@pytest.fixture(scope="module")
def program(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_workload("lists.c", "libze_loader.so.1", driver.folder, tmp_path_factory.mktemp("lists") / "lists")


def places(loader: Path) -> list[Place]:
    """The loader's own functions that execute lists: each call passes there once."""
    with loader.open("rb") as file:
        elf = ELFFile(file)
        symbols = {symbol.name: symbol["st_value"] for symbol in elf_sections.symbols(elf).iter_symbols()}
        (code,) = [each for each in elf.iter_segments("PT_LOAD") if each["p_flags"] & 1]
        return [Place(name, loader, symbols[name] - code["p_vaddr"] + code["p_offset"]) for name in CALLS]


def modules(device: str) -> list[str]:
    return [str(zebin(device, name)) for name in ("matmul", "attention")]


def record(driver: Driver, device: str, way: str, folder: Path, program: Path) -> Recording:
    # A loader that nobody else uses: Linux counts the calls of all processes.
    loader = Path(
        shutil.copy((driver.folder / LIBRARIES / "libze_loader.so.1").resolve(), folder / "libze_loader.so.1")
    )
    words = ["env", f"LD_PRELOAD={loader}", str(program), str(ROUNDS), *modules(device)]
    with Hardware(folder / "gpu", device) as hardware, Calls(places(loader)) as calls:
        command = [*IAPROF, "record", "-o", "capture", *BARE, f"--launches={way}", "--", *words]
        done = _run(command, folder, driver.environment(device) | hardware.env())
    counted = {place.name: count for place, count in calls.by_place().items()}
    return Recording(folder / "capture", json.loads(done), counted, hardware.ledger())


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(
    scope="module",
    params=[*((device, "attach") for device in DEVICES), ("bmg", "inject"), ("lnl", "inject")],
    ids=lambda case: "-".join(case),
)
def recording(
    driver: Driver, program: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Recording:
    device, way = request.param
    return record(driver, device, way, tmp_path_factory.mktemp(device), program)


def test_every_execution_is_recorded_once(recording: Recording) -> None:
    rows = recording.executions()
    assert len(rows) == recording.told["executions"] == ROUNDS * 7
    assert len({(row["tid"], row["time_ns"]) for row in rows}) == recording.told["calls"]
    # and as often as the loader was called
    assert recording.calls == {CALLS[0]: ROUNDS * 5, CALLS[1]: ROUNDS}
    assert sum(recording.calls.values()) == recording.told["calls"]
    assert not [loss for loss in CaptureReader(recording.capture).header["losses"] if loss["what"] == "lost"]


def test_every_kernel_was_launched_as_often_as_its_list_was_executed(recording: Recording) -> None:
    kernels = recording.told["kernels"]
    assert recording.ran() == kernels
    assert recording.unknown() == 0
    # and reports say so, who may have launches of other programs besides
    assert all(recording.launches()[kernel] >= count for kernel, count in kernels.items())
    counts = recording.info()["counts"]
    assert counts["launches"] >= sum(kernels.values())
    assert counts["executions"] >= recording.told["executions"]


def test_stalls_have_the_stack_that_appended(recording: Recording) -> None:
    assert recording.ledger.records_captured > 1000
    assert recording.stalls() == recording.truth(0)
    assert {kernel: set(found) for kernel, found in recording.stalls().items()} == {
        kernel: {filled} for kernel, filled in FILLED.items()
    }


def test_stalls_have_the_stack_that_executed_if_asked_for(recording: Recording) -> None:
    found, truth = recording.stalls("--stack-of=execute"), recording.truth(1)
    # then all of what only one place executes
    assert found["attention_scores"] == truth["attention_scores"] == {"execute_here": truth["attention_scores"].total()}
    # and of what several do, each as much as it executed: those that follow at once share a read
    for kernel in ("multiply_basic", "multiply_local_access", "multiply_local_access_and_tiling"):
        assert found[kernel].keys() == truth[kernel].keys()
        assert found[kernel].total() == truth[kernel].total()
        for place, samples in truth[kernel].items():
            assert abs(found[kernel][place] - samples) < 0.2 * truth[kernel].total(), (kernel, place, found, truth)


def test_lists_from_before_the_recorder_are_counted_and_said(driver: Driver, program: Path, tmp_path: Path) -> None:
    # given lists that were filled before the recorder came
    go = tmp_path / "go"
    with Hardware(tmp_path / "gpu", "bmg") as hardware:
        environment = driver.environment("bmg") | hardware.env()
        words = [str(program), "--wait-file", str(go), str(ROUNDS), *modules("bmg")]
        running = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            until((tmp_path / "go.ready").exists, running)
            script = f"touch {go}; until grep -q '^State:.Z' /proc/{running.pid}/status; do sleep 0.05; done"
            # when
            _run([*IAPROF, "record", "-o", "capture", *BARE, "--", "sh", "-c", script], tmp_path, environment)
        finally:
            go.touch()
            printed, _ = running.communicate()
    recording = Recording(tmp_path / "capture", json.loads(printed), {}, hardware.ledger())
    # then what was appended since is known, and how often the others were executed
    assert recording.ran() == {"attention_scores": recording.told["kernels"]["attention_scores"]}
    assert recording.unknown() == ROUNDS * 6
    unknown = recording.info()["counts"]["unknown_executions"]
    assert unknown >= ROUNDS * 6
    said = f"{unknown:,} executions of command lists that were filled before the recording"
    assert any(said in warning for warning in recording.info()["parts"][0]["warnings"])
    assert recording.stalls()["attention_scores"] == recording.truth(0)["attention_scores"]


def test_lists_that_were_filled_in_the_file_before_launch_what_they_hold(
    driver: Driver, program: Path, tmp_path: Path
) -> None:
    # given lists that are filled, and another file that was begun then
    go, capture = tmp_path / "go", tmp_path / "cap.parquet"
    with Hardware(tmp_path / "gpu", "bmg") as hardware:
        environment = driver.environment("bmg") | hardware.env()
        words = [*IAPROF, "record", "-o", str(capture), *BARE, "--launches=attach", "--"]
        recorder = subprocess.Popen(
            [*words, str(program), "--wait-file", str(go), str(ROUNDS), *modules("bmg")],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            until((tmp_path / "go.ready").exists, recorder)
            recorder.send_signal(signal.SIGUSR2)
            until(lambda: list(tmp_path.glob("cap.*-*.parquet")), recorder)
        finally:
            go.touch()
            printed, _ = recorder.communicate()
    # when, then
    recording = Recording(capture, json.loads(printed), {}, hardware.ledger())
    assert recording.ran() == recording.told["kernels"]
    assert (len(recording.executions()), recording.unknown()) == (recording.told["executions"], 0)
    assert recording.stalls() == recording.truth(0)
    # and the file before has what was appended, of which nothing ran
    (before,) = tmp_path.glob("cap.*-*.parquet")
    earlier = Recording(before, recording.told, {}, recording.ledger)
    assert (earlier.ran(), earlier.executions()) == ({}, [])
