"""How often stalls find the right process, kernel and stack, by how long a kernel may run after its launch (--horizon).

The stand-in's mixed workload (tests/standin/mixed.py says what it does) is recorded with each seed and reported with
each horizon. tests/standin/quality.py says what is compared.

    sudo .venv/bin/python tests/bench/bench_attribution.py [--seeds 1,2] [--seconds 4] [--horizons 0.05,...]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import IAPROF, machine, needs_root, print_table
from standin import mixed, quality, runtime
from standin.hardware import Ledger

HORIZONS = "0.05,0.1,0.25,0.5,1,2,4"
WAYS = (*quality.METHODS, "oracle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2", help="of the workload; one recording each")
    parser.add_argument("--seconds", type=float, default=4, help="length of a recording")
    parser.add_argument("--horizons", default=HORIZONS, help="seconds")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    workloads, places, stacks, all_stacks = [], [], [], []
    for seed in map(int, arguments.seeds.split(",")):
        with tempfile.TemporaryDirectory(prefix="iaprof-bench-", dir="/var/tmp") as name:
            capture = Path(name) / "capture"
            ledger = make(capture, arguments.seconds, seed)
            stalls = quality.read_stalls(capture)
            with_jobs = capture.with_name("with-jobs")
            quality.write_part(capture, None, with_jobs, quality.jobs_of(ledger))
            workloads.append([f"seed {seed}", *described(quality.describe(stalls, ledger), len(stalls))])
            for horizon in arguments.horizons.split(","):
                option = f"--horizon={horizon}"
                measured = quality.measure(capture, ledger, report, option)
                head, where = f"seed {seed}, {horizon} s", measured.places
                shares = [f"{100 * where.labelled / where.stalls:.1f} %", f"{100 * where.right_share:.3f} %"]
                judged, _ = quality.judge(with_jobs, stalls, ledger, report, option)
                shares += [f"{100 * judged.labelled / judged.stalls:.1f} %", f"{100 * judged.right_share:.3f} %"]
                places.append([head, *shares])
                stacks.append([head, *errors(measured.errors, measured.compared)])
                split = quality.errors(capture, stalls, ledger, report, option, "--split-ambiguous")
                all_stacks.append([head, *errors(split, len(stalls))])
    heads = ["recording", "stalls", "pairs", "with a choice", "mixed", "delay", "99 %", "longest", "durations"]
    print_table("The workload; pairs of a read and a kernel with stalls in it", heads, workloads)
    print_table(
        "Process and kernel", ["horizon", "labelled", "of others, right", "with jobs", "of others, right"], places
    )
    print_table("Stacks, without what is labelled: stalls in the wrong place", ["horizon", *WAYS, "ratio"], stacks)
    print_table("Stacks of all stalls, with --split-ambiguous", ["horizon", *WAYS, "ratio"], all_stacks)


def make(capture: Path, seconds: float, seed: int) -> Ledger:
    """Records the workload."""
    with mixed.hardware(capture.with_name("gpu"), seed) as hardware:
        # So that the library is probed before the program maps it.
        library = {"LD_LIBRARY_PATH": str(runtime.build().library.parent)}
        words = [*IAPROF, "record", "--quiet", "--symbols", "none", "-o", str(capture), "--"]
        environment = os.environ | hardware.env() | library
        subprocess.run([*words, *mixed.command(seconds, seed)], env=environment, stdout=subprocess.DEVNULL, check=True)
    return hardware.ledger()


def report(capture: Path, *options: str) -> str:
    """Folded stacks."""
    command = [*IAPROF, "report", "--quiet", *options, str(capture)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def described(workload: quality.Workload, stalls: int) -> list[str]:
    """A workload as cells of a table."""
    middle, late, longest = workload.delay_ms
    return [
        f"{stalls:,}",
        f"{workload.pairs:,}",
        f"{100 * workload.with_choice / workload.pairs:.0f} %",
        f"{100 * workload.with_mixture / workload.pairs:.0f} %",
        f"{middle:.0f} ms",
        f"{late:.0f} ms",
        f"{longest:.0f} ms",
        f"{workload.duration_ms[0]:.2f} - {workload.duration_ms[1]:.0f} ms",
    ]


def errors(found: dict[str, float], stalls: int) -> list[str]:
    """Errors as cells of a table, and how many times less proportional has than latest."""
    shares = [f"{100 * found[way] / max(stalls, 1):.1f} %" for way in WAYS]
    return [*shares, f"{found['proportional'] / max(found['latest'], 1):.2f}"]


if __name__ == "__main__":
    main()
