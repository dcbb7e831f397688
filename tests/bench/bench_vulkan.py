# SPDX-License-Identifier: Apache-2.0
"""What a dispatch on Mesa's Vulkan driver costs the application: CPU time, not recorded and recorded in turn.

compute.c dispatches in a loop, from so deep that stacks have 16 frames; all of them have to be whole. The driver
records commands, and submits them to the stand-in's render node, which computes nothing.

    sudo .venv/bin/python tests/bench/bench_vulkan.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import IAPROF, machine, needs_root, print_table
from driver.test_vulkan_recording import record_command
from driver.vulkan import DEVICES, Mesa, build
from iaprof.bpf.driver_layout import CACHE
from iaprof.formats.capture.reader import CaptureReader

DEVICE = "bmg"
FRAMES, DEEPER = 16, 6  # of each stack, and calls for that
DISPATCHES = 20_000  # of each of four shaders
MOST_NS = 2_500  # that a dispatch may take more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured, in turn")
    rounds = parser.parse_args().rounds
    needs_root("recording")
    print(machine())
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-") as name, build(Path(name)) as drivers:
        rows = [measure(mesa, Path(name) / release, rounds) for release, mesa in drivers.items()]
    heads = ("Mesa", "not recorded", "recorded", "more")
    print_table("nanoseconds of CPU per dispatch, medians", heads, [tuple(map(str, row)) for row in rows])
    if any(row[-1] > MOST_NS for row in rows):
        sys.exit(f"a dispatch may take {MOST_NS} ns more")


def measure(mesa: Mesa, folder: Path, rounds: int) -> tuple[str, int, int, int]:
    environment = os.environ | {"LD_PRELOAD": str(mesa.with_devices(DEVICES[DEVICE]))}
    subprocess.run([*IAPROF, "calibrate", str(mesa.library)], env=environment, check=True, capture_output=True)
    options = ("--rounds", 10, "--submits", 1, "--dispatches", DISPATCHES // 10, "--depth", DEEPER)
    alone, recorded = [], []
    try:
        for number in range(rounds):
            alone.append(mesa.run(DEVICE, _made(folder / f"{number}"), *options).ns)
            into = _made(folder / f"{number}-recorded")
            # The stand-in's GPU is not told: that would take longer than the dispatch.
            command = ["env", "-u", "STANDIN_DIR", *mesa.command(DEVICE, into, *options)]
            printed, _, _ = record_command(mesa, DEVICE, into, command)
            recorded.append(json.loads(printed)["ns"])
            _check(into / "capture", json.loads(printed)["pid"])
    finally:
        (CACHE / f"{mesa.build_id}.json").unlink()
    before, now = round(statistics.median(alone)), round(statistics.median(recorded))
    return mesa.release, before, now, now - before


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _check(path: Path, pid: int) -> None:
    capture = CaptureReader(path)
    stacks = {row["id"]: row for row in capture.table("stack", ("id", "ips", "ended")).to_pylist()}
    launches = capture.table("launch", ("pid", "stack")).to_pylist()
    of_program = [stacks.get(row["stack"]) for row in launches if row["pid"] == pid]
    if not of_program or any(each is None or each["ended"] != "whole" for each in of_program):
        sys.exit("a dispatch has no whole stack")
    if any(each is not None and len(each["ips"]) != FRAMES for each in of_program):
        sys.exit(f"stacks do not have {FRAMES} frames")


if __name__ == "__main__":
    main()
