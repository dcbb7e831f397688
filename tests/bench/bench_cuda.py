#!/usr/bin/env python3
"""What recording adds to a program of an NVIDIA GPU: runs it alternately alone and recorded.

    sudo tests/bench/bench_cuda.py [--pairs 20] [--options "--rate 1048576"] -- python3 train.py

The program prints its own figure, such as the time of a step in ms, as NAME_MS 12.3 or NAME_US 12.3; the first one
counts. Without a program, as `make bench` runs it, it measures nothing. docs/overhead.md has its tables.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FIGURE = re.compile(r"\b(\w+_(?:MS|US)) ([0-9.]+)")


def figure(words: list[str]) -> float:
    """Runs a program and returns the figure that it prints."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    found = FIGURE.search(done.stdout)
    if done.returncode or not found:
        sys.exit(f"bench_cuda: {shlex.join(words)} ended with {done.returncode} and printed no figure:\n{done.stderr}")
    return float(found[2])


def facts(capture: Path) -> dict[str, Any]:
    """Returns what `iaprof info` says of a capture."""
    done = subprocess.run(
        [sys.executable, "-m", "iaprof", "info", "--json", capture], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Prints a line for each pair, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="how often the program runs in each way")
    parser.add_argument("--options", default="--cpu-freq 0", help="of iaprof record")
    parser.add_argument("program", nargs="*", help="the program and its arguments, after --")
    arguments = parser.parse_args()
    if not arguments.program:
        print("bench_cuda needs a GPU of NVIDIA's and a program: nothing was measured")
        return
    alone: list[float] = []
    recorded: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        capture = Path(folder, "cap")
        record = [sys.executable, "-m", "iaprof", "record", "-f", "-q", "-o", str(capture)]
        record += [*shlex.split(arguments.options), "--", *arguments.program]
        for pair in range(arguments.pairs):
            for words, figures in ((arguments.program, alone), (record, recorded))[:: 1 if pair % 2 else -1]:
                figures.append(figure(words))
            print(f"alone {alone[-1]:9.3f}   recorded {recorded[-1]:9.3f}", flush=True)
        ratios = [new / old - 1 for old, new in zip(alone, recorded, strict=True)]
        print(
            f"median {statistics.median(alone):.3f} alone, {statistics.median(recorded):.3f} recorded; "
            f"ratio {statistics.median(ratios):+.1%}, {min(ratios):+.1%} to {max(ratios):+.1%}"
        )
        found = facts(capture)
        print(json.dumps({name: found.get(name) for name in ("counts", "cost", "losses")}, default=str)[:2000])


if __name__ == "__main__":
    main()
