"""What a call costs the application that waits for the GPU and returns at once, while waits are recorded.

A program calls the functions of a driver that is played (tests/integration/handles), in a loop, and measures itself, in
turn without probes and with them: with a timeout of 0, which is a poll, and with none, which is a short wait. The
probes are those of a recorder, without the recorder: what is measured is the time of the program's thread.

    sudo .venv/bin/python tests/bench/bench_waits.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import machine, needs_root, print_table
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.probes.library_file import LibraryFile
from integration.handles.driver import Built, build

CALLS = 100_000
MOST_NS = {"poll": 500, "short": 1500}  # that a call may take more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured, in turn")
    arguments = parser.parse_args()
    needs_root("probing")
    print(machine())
    times: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-") as name:
        built = build(Path(name) / "played")
        for _ in range(arguments.rounds):
            for mode in MOST_NS:
                times.setdefault((mode, False), []).append(ns_a_call(built, mode))
                times.setdefault((mode, True), []).append(probed(built, mode))
    medians = {key: statistics.median(each) for key, each in times.items()}
    rows = [
        [mode, *(f"{each:.0f}" for each in (before, after, after - before)), f"{most:,}"]
        for mode, most in MOST_NS.items()
        for before, after in [(medians[mode, False], medians[mode, True])]
    ]
    heads = ["call", "not recorded", "recorded", "added", "at most"]
    print_table(f"ns of a call: medians of {arguments.rounds} times {CALLS:,}, in turn", heads, rows)
    late = [mode for mode, most in MOST_NS.items() if medians[mode, True] - medians[mode, False] > most]
    if late:
        sys.exit(f"a call takes longer than it may: {', '.join(late)}")


def ns_a_call(built: Built, mode: str) -> float:
    """As the program measures it."""
    words = [str(built.waiting), mode, str(CALLS), "0" if mode == "short" else "1000000000", "1"]
    done = subprocess.run(words, input="\n", capture_output=True, text=True, check=True)
    _, begin, end, _ = map(int, done.stdout.splitlines()[1].split())
    return (end - begin) / CALLS


def probed(built: Built, mode: str) -> float:
    """The same with probes in the driver."""
    probes = LaunchProbes(waits=True)
    try:
        with built.library.open("rb") as file:
            library = LibraryFile(file)
            offsets = [library.offset(entry.address, executable=True) for entry in built.with_waits.entries]
            probes._attach_layout(file.fileno(), built.with_waits, offsets)
        return ns_a_call(built, mode)
    finally:
        probes.close()


if __name__ == "__main__":
    main()
