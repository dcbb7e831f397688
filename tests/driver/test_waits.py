# SPDX-License-Identifier: Apache-2.0
"""Waits in Intel's real driver: as many as the program made, and as the kernel's own uprobe events count."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from driver.counters import counted, counting
from driver.driver import DEVICES, Driver, compile_workload, run_workload
from driver.opencl import OpenCL
from iaprof.bpf.probes.library_file import LibraryFile
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.waits import WaitFlags, WaitTotals
from integration.recording import BARE, IAPROF
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf
WAITS, THREADS = 1000, 3


@pytest.fixture(scope="module")
def program(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_workload(
        "waiting.c", "libze_loader.so.1", driver.folder, tmp_path_factory.mktemp("waiting") / "waiting"
    )


@pytest.mark.parametrize(
    ("device", "way"), [*((device, "attach") for device in DEVICES), ("bmg", "inject"), ("pvc", "inject")]
)
def test_each_wait_is_counted_once(driver: Driver, program: Path, device: str, way: str, tmp_path: Path) -> None:
    # given a copy of the driver: perf counts what the whole machine does in a file
    (tmp_path / "driver").mkdir()
    copy = Path(shutil.copy(driver.library, tmp_path / "driver"))
    driver = replace(driver, library=copy)
    environment = driver.environment(device)
    # given where the loader's table leads, as the driver itself says
    *_, places = map(json.loads, run_workload([str(program), "1", "1"], environment, tmp_path).splitlines())
    with driver.library.open("rb") as file:
        library = LibraryFile(file)
        offsets = {name: library.offset(address, executable=True) for name, address in places.items()}
    # when
    with Hardware(tmp_path / "gpu", device) as hardware, contextlib.ExitStack() as counters:
        by_perf = {name: counters.enter_context(counting(driver.library, at)) for name, at in offsets.items()}
        words = [
            *IAPROF,
            "record",
            "-o",
            "capture",
            "--waits",
            *BARE,
            f"--launches={way}",
            "--",
            program,
            WAITS,
            THREADS,
        ]
        done = subprocess.run(
            list(map(str, words)),
            cwd=tmp_path,
            env=environment | hardware.env(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        seen = {name: counted(fds) for name, fds in by_perf.items()}
    told = [json.loads(line) for line in done.stdout.splitlines()][:-1]
    # then as often as the program says, by thread and function, and as perf counts
    capture = CaptureReader(tmp_path / "capture")
    rows = [row for row in capture.table("wait").to_pylist() if row["pid"] == told[0]["pid"]]
    waits: Counter[tuple[int, str]] = Counter()
    waited: Counter[tuple[int, str]] = Counter()
    for row in rows:
        waits[row["tid"], row["function"]] += row["count"]
        waited[row["tid"], row["function"]] += row["waited_ns"]
    assert waits == {(each["tid"], each["function"]): WAITS for each in told}
    assert len(told) == 5 * THREADS
    polls = WAITS * THREADS
    assert seen == {name: WAITS * THREADS + (polls if name == "zeEventHostSynchronize" else 0) for name in offsets}
    assert capture.header["probes"]["wait_polls"] >= polls  # of all programs
    # and for less time than the program measured around them
    for each in told:
        assert waited[each["tid"], each["function"]] <= each["ns"]
    # and stacks lead to the program's start, but for those of the time in which rules were learnt
    stacks = {row["id"]: row for row in capture.table("stack").to_pylist()}
    lost = [loss for loss in capture.header["losses"] if loss["source"] == "stacks"]
    with_stack = [row for row in rows if row["stack"] in stacks]
    assert len(with_stack) == len(rows) or lost
    assert {stacks[row["stack"]]["ended"] for row in with_stack} <= {"whole", "unfinished"}
    assert "whole" in {stacks[row["stack"]]["ended"] for row in with_stack}
    totals = WaitTotals.from_header(capture.header)
    assert totals is not None
    everybody = capture.table("wait").to_pylist()
    assert totals.waits == sum(row["count"] for row in everybody)
    assert totals.short == sum(row["count"] for row in everybody if row["flags"] & WaitFlags.ADDED_UP)
    assert not [loss for loss in capture.header["losses"] if loss["source"] == "waits"]


@pytest.mark.parametrize("way", ["attach", "inject"])
def test_opencls_waits_are_counted_once(opencl: OpenCL, way: str, tmp_path: Path) -> None:
    program = compile_workload("waiting_opencl.c", "libOpenCL.so.1", opencl.driver.folder, tmp_path / "waiting")
    with Hardware(tmp_path / "gpu", "bmg") as hardware:
        environment = opencl.environment("bmg") | hardware.env() | {"LD_LIBRARY_PATH": str(opencl.library.parent)}
        words = [*IAPROF, "record", "-o", "capture", "--waits", *BARE, f"--launches={way}", "--"]
        words += [str(program), str(WAITS)]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    rows = [
        row for row in CaptureReader(tmp_path / "capture").table("wait").to_pylist() if row["pid"] == told[0]["pid"]
    ]
    for each in told:
        own = [row for row in rows if row["function"] == each["function"]]
        assert sum(row["count"] for row in own) == each["waits"] == WAITS
        assert sum(row["waited_ns"] for row in own) <= each["ns"]
        assert each["handle"] in {row["handle"] for row in own}
