# SPDX-License-Identifier: Apache-2.0
"""Recording what Mesa copies, blits and clears by kernels of its own: the capture says what the batches say."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from driver.test_vulkan_recording import WINDOW, calibrated, record_command, record_running
from driver.vulkan import DEVICES, RELEASES, Mesa, read_primitives
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from integration.recording import IAPROF
from standin.hardware import Ledger

pytestmark = pytest.mark.bpf
__all__ = ["calibrated"]  # a fixture

ROUNDS, SUBMITS = 3, 2
# What operate.c does in a round, by functions of these names.
OPERATIONS = {
    "fill": "blorp clear",
    "update": "blorp copy",
    "copy": "blorp copy",
    "copy_image": "blorp copy",
    "blit": "blorp blit",
    "clear": "blorp clear",
    "upload": "blorp copy",
    "download": "blorp copy",
    "resolve": "blorp blit",
}
_DONE_BY = re.compile(";do_([a-z_]+);")


@dataclass(frozen=True)
class Operated:
    """A capture of operate.c, and the truth."""

    capture: Path
    pid: int
    kernels: list[tuple[str, int]]  # function, and its kernel in the batches
    ledger: Ledger

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The program's rows."""
        rows = CaptureReader(self.capture).table("launch").to_pylist()
        return [row for row in rows if row["pid"] == self.pid]


def record(mesa: Mesa, device: str, folder: Path) -> Operated:
    """Records operate.c in `folder`; it has to work."""
    options = ("--rounds", ROUNDS, "--submits", SUBMITS)
    printed, _, ledger = record_command(mesa, device, folder, mesa.operate_command(device, folder, *options))
    primitives = read_primitives(folder)
    assert len(primitives) == ROUNDS * SUBMITS * len(OPERATIONS), "one for each submission"
    functions = [name for name in OPERATIONS for _ in range(SUBMITS)] * ROUNDS
    kernels = [(name, primitive.fragment or 0) for name, primitive in zip(functions, primitives, strict=True)]
    return Operated(folder / "capture", json.loads(printed)["pid"], kernels, ledger)


@pytest.fixture(scope="module", params=[(release, device) for release in RELEASES for device in DEVICES], ids="-".join)
def operated(request: pytest.FixtureRequest, calibrated: dict[str, Mesa], tmp_path_factory: Any) -> Operated:
    release, device = request.param
    return record(calibrated[release], device, tmp_path_factory.mktemp("operated"))


def test_every_operation_is_a_launch_of_the_kernel_in_the_batch(operated: Operated) -> None:
    found = Counter((row["name"], row["address"] - WINDOW) for row in operated.launches)
    truth = Counter((OPERATIONS[function], kernel) for function, kernel in operated.kernels)
    assert {key: SUBMITS * count for key, count in found.items()} == truth
    assert {row["flags"] & ~LaunchFlags.PRESUMED for row in operated.launches} == {int(LaunchFlags.OWN)}
    # and reports count them
    words = [*IAPROF, "top", str(operated.capture), "--json", "--limit=0"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    reported: Counter[str] = Counter()
    for entry in json.loads(done.stdout)["entries"]:
        reported[re.sub(" .code .*", "", entry["kernel"])] += entry["launches"]
    assert +reported == Counter(OPERATIONS[function] for function, _ in operated.kernels)


def test_each_has_the_stack_of_its_call(operated: Operated) -> None:
    stacks = {row["id"]: row for row in CaptureReader(operated.capture).table("stack").to_pylist()}
    assert {stacks[row["stack"]]["ended"] for row in operated.launches} == {"whole"}
    words = [*IAPROF, "report", str(operated.capture), "--frames=cpu,function"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    seen: set[str] = set()
    for text in done.stdout.splitlines():
        (function,) = _DONE_BY.findall(text)
        kernel = text.rsplit(" ", 1)[0].rsplit(";", 1)[-1]
        assert kernel.startswith(OPERATIONS[function]), text
        seen.add(function)
    assert seen == set(OPERATIONS)


def test_stalls_are_at_decoded_instructions_of_these_kernels(operated: Operated) -> None:
    words = [*IAPROF, "report", str(operated.capture), "--frames=function,instruction,reason,offset"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    names = {kernel: OPERATIONS[function] for function, kernel in operated.kernels}
    reported: Counter[tuple[str, str, int]] = Counter()
    for text in done.stdout.splitlines():
        frames, count = text.rsplit(" ", 1)
        kernel, instruction, reason, offset = (frame.removesuffix("_[g]") for frame in frames.split(";")[-4:])
        assert not instruction.startswith("["), text
        reported[re.sub(" .code .*", "", kernel.removesuffix("_[G]")), reason, int(offset, 16)] += int(count)
    produced: Counter[tuple[str, str, int]] = Counter()
    for row in operated.ledger.rows:
        if row.captured:
            produced[names[int(row.kernel, 16)], row.reason, row.offset] += row.captured
    assert operated.ledger.records_captured > 1000
    assert reported == produced


def test_each_kernel_is_described_once(operated: Operated) -> None:
    # as many kernels as the batches have, and none unfinished
    kernels = CaptureReader(operated.capture).table("kernel").to_pylist()
    assert len([row for row in kernels if row["pid"] == operated.pid]) == len(
        {kernel for _, kernel in operated.kernels}
    )
    assert CaptureReader(operated.capture).table("loss").to_pylist() == []


def test_every_part_of_a_recording_has_the_code_of_these_kernels(calibrated: dict[str, Mesa], tmp_path: Path) -> None:
    # given a program whose driver gives each kernel to the GPU once, in its first round
    mesa = calibrated["unstable"]
    command = mesa.operate_command("bmg", tmp_path, "--seconds", 5)
    # when
    record_command(mesa, "bmg", tmp_path, command, "--switch-output=1s")
    # then
    parts = sorted(each for each in tmp_path.glob("capture*") if each.is_file())
    assert len(parts) > 3
    names: set[str] = set()
    for part in parts[1:]:
        names |= {row["name"] for row in CaptureReader(part).table("launch").to_pylist()}
        words = [*IAPROF, "report", str(part), "--frames=function,instruction"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        frames = [line.rsplit(" ", 1)[0].split(";")[-2:] for line in done.stdout.splitlines()]
        assert all(kernel.startswith("blorp ") and not at.startswith("[") for kernel, at in frames), frames
    assert names == set(OPERATIONS.values())


@pytest.mark.parametrize("release", RELEASES)
def test_a_program_that_already_copies_has_names_and_no_instructions(
    calibrated: dict[str, Mesa], release: str, tmp_path: Path
) -> None:
    # given: a program that has all of its kernels
    mesa = calibrated[release]
    command = mesa.operate_command("bmg", tmp_path, "--seconds", 30)
    # when
    capture, pid = record_running("bmg", tmp_path, command, "draws")
    # then
    rows = [row for row in capture.table("launch").to_pylist() if row["pid"] == pid]
    primitives = read_primitives(tmp_path)
    functions = [name for name in OPERATIONS for _ in range(2)]
    truth = {
        (OPERATIONS[functions[number % len(functions)]], primitive.fragment)
        for number, primitive in enumerate(primitives)
    }
    assert {(row["name"], row["address"] - WINDOW) for row in rows} == truth
    assert all(row["size"] for row in rows)
    assert pid not in {row["pid"] for row in capture.table("kernel").to_pylist()}
