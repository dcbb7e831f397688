# SPDX-License-Identifier: Apache-2.0
"""What a copy or fill on Intel's real runtime costs the application, by the way in which they are recorded.

tests/driver/copies.c copies and fills in every way and times its calls by itself, in turn: alone, recorded, and with
the injected library in it but no recorder. On `immediate` each call is submitted, by kernels of the runtime's own; on
`engine` it is appended to a list for a copy engine.

    sudo .venv/bin/python tests/bench/bench_copies.py [--rounds 5] [--calls 2000]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import machine, needs_root, print_table
from driver import copies
from driver.copies import Copies, read_copies
from driver.driver import Driver, build, run_workload
from driver.recording import run_recorder
from iaprof.formats.capture.reader import CaptureReader
from iaprof.record.kernels.drivers import Injection
from standin.hardware import Hardware

DEVICE = "bmg"
LISTS = ("immediate", "engine")
MOST_NS = {
    "recorded by attach": 4000,
    "recorded by inject": 3000,
    "injected, no recorder": 300,
}  # that one may take more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, in turn")
    parser.add_argument("--calls", type=int, default=2000, help="in each way")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-") as name:
        measure(build(Path(name)), Path(name), arguments.rounds, arguments.calls)


def measure(driver: Driver, folder: Path, rounds: int, calls: int) -> None:
    command = [str(copies.build(driver, folder)), "--calls", str(calls)]
    times: dict[str, list[list[Copies]]] = defaultdict(list)
    missing: dict[str, int] = defaultdict(int)
    for _ in range(rounds):
        times["not recorded"].append(read_copies(run_workload(command, driver.environment(DEVICE), folder)))
        for way in ("attach", "inject"):
            with tempfile.TemporaryDirectory(dir=folder) as place, Hardware(Path(place) / "gpu", DEVICE) as hardware:
                done = run_recorder(Path(place), driver.environment(DEVICE) | hardware.env(), way, command)
                ledger = read_copies(done.stdout)
                times[f"recorded by {way}"].append(ledger)
                rows = CaptureReader(Path(place) / "capture").table("transfer", ("pid",))["pid"].to_pylist()
                missing[f"recorded by {way}"] += sum(line.calls for line in ledger) - rows.count(ledger[0].pid)
        times["injected, no recorder"].append(run_injected(driver, folder, command))
    rows, late = [], []
    for what, ledgers in times.items():
        row = [what]
        for name in LISTS:
            ns, alone = ns_a_call(ledgers, name, calls), ns_a_call(times["not recorded"], name, calls)
            late += [f"{what}, {name}"] if ns - alone > MOST_NS.get(what, 0) else []
            row += [f"{ns:,.0f}", f"{ns - alone:+,.0f}" if what in MOST_NS else ""]
        rows.append([*row, f"{missing[what]:,}" if what in missing else ""])
    print_table(
        f"A copy or fill: medians of {rounds} loops of {calls:,} in each way, and their mean",
        ["ns per call", *(head for each in LISTS for head in (each, "added")), "lost"],
        rows,
    )
    if any(missing.values()):
        sys.exit("not every copy and fill is recorded")
    if late:
        sys.exit(f"a copy or fill takes longer than it may: {'; '.join(late)}")


def ns_a_call(ledgers: list[list[Copies]], name: str, calls: int) -> float:
    """The mean of the ways that work on a list, of each the median."""
    by_way: dict[str, list[float]] = defaultdict(list)
    for ledger in ledgers:
        for line in ledger:
            if line.list == name and line.calls == calls:
                by_way[line.way].append(line.ns)
    return statistics.mean(statistics.median(each) for each in by_way.values())


def run_injected(driver: Driver, folder: Path, command: list[str]) -> list[Copies]:
    """The program with the injected library in it, and no recorder."""
    injection = Injection(())
    try:
        return read_copies(run_workload(command, injection.environment(driver.environment(DEVICE)), folder))
    finally:
        injection.close()


if __name__ == "__main__":
    main()
