# SPDX-License-Identifier: Apache-2.0
"""What a launch on Intel's real runtime costs the application, by the way in which launches are recorded.

The workload times loops of launches by itself, without a recorder and with one, in turn. It launches from as deep as
programs in Python do: 35 frames. Of the stacks in the captures 99.9 % have to be whole; the driver is as
Debian compiles it, without frame pointers. It computes nothing here, but does for a launch what it does on hardware:
`immediate` submits it, `regular` appends it to a list, and `arguments` submits it by
zeCommandListAppendLaunchKernelWithArguments.

    sudo .venv/bin/python tests/bench/bench_driver.py [--rounds 7] [--launches 20000]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import machine, needs_root, print_table
from driver.driver import Driver, Kernel, build, read_ledger, run_workload, zebin
from driver.recording import launched, record, recorded_launches
from iaprof.formats.capture.reader import CaptureReader
from iaprof.record.kernels.drivers import Injection

DEVICE = "bmg"
LISTS = ("immediate", "regular", "arguments")  # ways of workload.c
TURNS = 3  # of a process that runs
FRAMES = 35  # of each stack
LEAST_WHOLE = 0.999  # of them; when launches begin, the learner may be late
DEEPER = 28  # calls for that
MOST_NS = 3000  # that a launch may take more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured, in turn")
    parser.add_argument("--launches", type=int, default=20_000, help="in each loop")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-") as name:
        measure(build(Path(name)), Path(name), arguments.rounds, arguments.launches)


def measure(driver: Driver, folder: Path, rounds: int, launches: int) -> None:
    options: list[str | int] = [
        "--launches",
        launches,
        "--rounds",
        TURNS,
        "--ways",
        ",".join(LISTS),
        "--deeper",
        DEEPER,
    ]
    module = zebin(DEVICE, "attention")
    # The stand-in's GPU is not told: that would take longer than the launch.
    command = ["env", "-u", "STANDIN_DIR", *driver.command([module], *options)]
    times: dict[str, list[Kernel]] = defaultdict(list)
    missing: dict[str, int] = defaultdict(int)
    stacks = Counter[tuple[int, str]]()
    for _ in range(rounds):
        times["not recorded"] += driver.run(DEVICE, [module], *options, folder=folder)
        for way in ("attach", "inject"):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                recording = record(driver, DEVICE, Path(place), way, command)
                times[f"recorded by {way}"] += recording.kernels
                found = recorded_launches(recording)
                missing[f"recorded by {way}"] += (launched(recording.kernels) - found).total()
                stacks.update(ends_of(recording.capture, {kernel.pid for kernel in recording.kernels}))
        times["injected, no recorder"] += run_injected(driver, folder, command)
    rows, late = [], []
    for what, kernels in times.items():
        row = [what]
        for each in LISTS:
            ns = statistics.median(kernel.ns[each] for kernel in kernels)
            alone = statistics.median(kernel.ns[each] for kernel in times["not recorded"])
            late += [f"{what}, {each}"] if ns - alone > MOST_NS else []
            row += [f"{ns:,.0f}", f"{ns - alone:+,.0f}" if kernels is not times["not recorded"] else ""]
        rows.append([*row, f"{missing[what]:,}" if what in missing else ""])
    version = next(line for line in (driver.folder / "packages").read_text().splitlines() if "libze-intel-gpu" in line)
    print_table(
        f"A launch with {version}: medians of {rounds} x {TURNS} loops of {launches:,}, in turn",
        ["ns per launch", *(head for each in LISTS for head in (each, "added")), "lost"],
        rows,
    )
    told = ", ".join(f"{depth} frames {ended} ({count:,})" for (depth, ended), count in sorted(stacks.items()))
    print(f"\n  stacks of recorded launches: {told}")
    if stacks[FRAMES, "whole"] < LEAST_WHOLE * stacks.total():
        sys.exit("stacks are not whole, or not as deep as they should be: these figures are worth nothing")
    if late:
        sys.exit(f"a launch takes more than {MOST_NS:,} ns longer: {'; '.join(late)}")


def ends_of(capture: Path, pids: Collection[int]) -> Counter[tuple[int, str]]:
    """Launches of these processes, by the depth of their stack and how it ended."""
    reader = CaptureReader(capture)
    ends = {row["id"]: (len(row["ips"]), row["ended"]) for row in reader.table("stack").to_pylist()}
    launches = reader.table("launch", ("pid", "stack")).to_pylist()
    return Counter(ends.get(row["stack"], (0, "none")) for row in launches if row["pid"] in pids)


def run_injected(driver: Driver, folder: Path, command: Sequence[str]) -> list[Kernel]:
    """The workload with the injected library in it, which nobody listens to."""
    injection = Injection(())
    try:
        environment = injection.environment(driver.environment(DEVICE))
        return read_ledger(run_workload(command, environment, folder), folder)
    finally:
        injection.close()


if __name__ == "__main__":
    main()
