# SPDX-License-Identifier: Apache-2.0
"""Stacks of dispatches, draws and the driver's own operations on Mesa: each is the one that gdb sees there."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from driver.test_vulkan_recording import calibrated
from driver.vulkan import RELEASES, Mesa
from iaprof.bpf.driver_layout import Action
from iaprof.formats.capture.reader import CaptureReader
from integration.recording import BARE, IAPROF
from programs.gdb import behind_probes
from stacks.debugger import read_stops, under_gdb
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf
__all__ = ["calibrated"]  # a fixture


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("program", ["compute", "draw"])
def test_stacks_are_gdb_s(calibrated: dict[str, Mesa], release: str, program: str, tmp_path: Path) -> None:
    # given: a program that changes its shaders from draw to draw, so that each has a stack of its own, under gdb
    mesa = calibrated[release]
    if program == "draw":
        command = mesa.draw_command("bmg", tmp_path, "--secondary", "--mesh", "--names", "--draws", 1, "--rounds", 3)
    else:
        command = mesa.command("bmg", tmp_path, "--secondary", "--dispatches", 2, "--rounds", 3)
    start = next(number for number, word in enumerate(command) if program in Path(word).name and "=" not in word)
    places = behind_probes(mesa.library, (Action.LAUNCH, Action.DRAW, Action.OPERATION))
    words, settings = under_gdb(command[start:], tmp_path / "stops", {mesa.library: list(places)})
    for setting in command[1:start]:
        words[1:1] = ["-ex", f"set environment {setting}"]
    beside = tmp_path / "driver"
    beside.mkdir()
    (beside / mesa.library.name).symlink_to(mesa.library)
    # when
    with Hardware(tmp_path / "gpu", "bmg") as hardware:
        environment = os.environ | hardware.env() | settings | {"LD_LIBRARY_PATH": str(beside)}
        record = [*IAPROF, "record", "-o", str(tmp_path / "capture"), *BARE, "--", "env", "-u", "LD_LIBRARY_PATH"]
        done = subprocess.run([*record, *words], env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    # then
    capture = CaptureReader(tmp_path / "capture")
    stops = list(read_stops(tmp_path / "stops"))
    stacks = {row["id"]: row for row in capture.table("stack").to_pylist()}
    calls: dict[int, set[int]] = defaultdict(set)  # stacks by time: a draw launches several shaders
    for row in capture.table("launch").to_pylist():
        if row["pid"] == stops[0].pid:
            calls[row["time_ns"]].add(row["stack"])
    assert len(stops) == len(calls) > 20
    mappings = [row for row in capture.table("mapping").to_pylist() if row["path"] == str(mesa.library.resolve())]
    (base,) = {row["start"] - row["offset"] for row in mappings if row["pid"] == stops[0].pid}
    for (_, (stack,)), stop in zip(sorted(calls.items()), stops, strict=True):
        pcs = [stop.pcs[0] - places[stop.pcs[0] - base], *stop.pcs[1:]]
        assert (stacks[stack]["ips"], stacks[stack]["ended"]) == (pcs, "whole")
