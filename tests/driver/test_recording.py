# SPDX-License-Identifier: Apache-2.0
"""Recording programs on Intel's real runtime, which has no probes: capture and report say what happened."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from driver.driver import Driver, of_an_unknown_build, zebin
from driver.recording import (
    EACH_WAY,
    Recording,
    code,
    launched,
    modules,
    produced_stalls,
    record,
    record_running,
    recorded_code,
    recorded_launches,
    reported_stalls,
)
from iaprof.bpf.driver_layout import CACHE, find_layout
from iaprof.formats.capture.reader import CaptureReader
from integration.recording import IAPROF

pytestmark = pytest.mark.bpf

COUNTS = ("--processes", 2, "--threads", 2, "--rounds", 2, "--launches", 5)
CASES = [
    ("known", "attach", "bmg", "attach"),
    ("known", "auto", "lnl", "attach"),
    ("known", "running", "pvc", "attach"),
    ("known", "attach", "ptl", "attach"),
    ("known", "inject", "ptl", "inject"),
    ("unknown", "auto", "bmg", "inject"),
]
"""Whether the driver's build is known, how it is recorded, its device; the way in which launches are had then."""


@pytest.fixture(scope="module")
def known(driver: Driver) -> Driver:
    """The driver that there is, which may be newer than the layouts that ship: Debian unstable goes on."""
    if find_layout(driver.build_id) is None:
        subprocess.run([*IAPROF, "calibrate", driver.library], check=True)
    return driver


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case[:3]))
def recording(known: Driver, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Two processes with two threads, each kernel launched in one of seven ways, and all again with new modules."""
    build, how, device, _ = request.param
    folder = tmp_path_factory.mktemp(device)
    driver = of_an_unknown_build(known, folder) if build == "unknown" else known
    command = driver.command(modules(driver, device), *COUNTS, *EACH_WAY)
    if how == "running":
        return record_running(driver, device, folder, command)
    return record(driver, device, folder, how, command)


def test_launches_are_had_in_the_best_way(recording: Recording, request: pytest.FixtureRequest) -> None:
    *_, way = request.node.callspec.params["recording"]
    libraries = CaptureReader(recording.capture).header["libraries"]
    names = {"attach": "libze_intel_gpu.so", "inject": "libiaprof_inject.so"}
    assert way in {library["way"] for library in libraries if names[way] in library["path"]}


def test_the_hardware_executes_what_the_program_launches(recording: Recording) -> None:
    executed: Counter[tuple[int, str, int]] = Counter()
    for launch in recording.ledger.launches:
        executed[launch.pid, launch.kernel, launch.address] += launch.count
    expected: Counter[tuple[int, str, int]] = Counter()
    for kernel in recording.kernels:
        expected[kernel.pid, kernel.name, kernel.function_pointer] += sum(kernel.launches.values())
    assert executed == expected


def test_every_launch_is_recorded_with_its_kernel(recording: Recording) -> None:
    assert recorded_launches(recording) == launched(recording.kernels)


def test_every_kernel_s_code_is_recorded_where_it_was(recording: Recording) -> None:
    assert code(recording.kernels) <= recorded_code(recording)


def test_every_stall_is_at_its_instruction_line_and_call_path(recording: Recording) -> None:
    assert recording.ledger.records_captured > 10_000
    assert reported_stalls(recording) == produced_stalls(recording)


def test_no_handle_is_strange(recording: Recording) -> None:
    losses = CaptureReader(recording.capture).table("loss").to_pylist()
    assert [loss for loss in losses if loss["what"] in ("unreadable", "incomplete")] == []


def test_a_driver_of_an_unknown_build_is_told_in_a_sentence(driver: Driver, tmp_path: Path) -> None:
    # given
    unknown = of_an_unknown_build(driver, tmp_path)
    # when
    recording = record(unknown, "bmg", tmp_path, "attach", driver.command([zebin("bmg", "attention")]))
    # then
    told = [line for line in recording.said.splitlines() if str(unknown.library) in line]
    losses = [loss["detail"] for loss in CaptureReader(recording.capture).table("loss").to_pylist()]
    assert len(told) == 1
    assert told[0].removeprefix("iaprof: ") in losses
    assert "--launches=inject" in told[0]
    # and the stalls are there without their launches
    assert recorded_launches(recording).total() == 0
    assert CaptureReader(recording.capture).header["totals"]["stalls"] == recording.ledger.records_captured > 0


@pytest.fixture
def misled(known: Driver, tmp_path: Path) -> Iterator[Driver]:
    """A driver whose layout has the addresses where something else is."""
    layout = find_layout(known.build_id)
    assert layout is not None
    *start, end = layout.address[0].path
    elsewhere = replace(layout.address[0], path=(*start, end + 8))
    driver = of_an_unknown_build(known, tmp_path)
    file = CACHE / f"{driver.build_id}.json"
    CACHE.mkdir(parents=True, exist_ok=True)
    file.write_text(replace(layout, build_id=driver.build_id, address=(elsewhere, *layout.address[1:])).to_json())
    yield driver
    file.unlink()


def test_a_wrong_layout_gives_launches_without_kernels(misled: Driver, tmp_path: Path) -> None:
    recording = record(misled, "bmg", tmp_path, "attach", misled.command([zebin("bmg", "matmul")], "--launches", 5))
    # then they are recorded and counted, but no kernel is at an address where it is not
    count = launched(recording.kernels).total()
    losses = CaptureReader(recording.capture).table("loss").to_pylist()
    assert {(address, size, name) for _, _, address, size, name in recorded_launches(recording)} == {(0, 0, "")}
    assert recorded_launches(recording).total() == count
    assert [loss["count"] for loss in losses if loss["what"] == "unreadable"] == [count]
