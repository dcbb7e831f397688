"""Small captures that declare much, through every verb and format: CPU time and memory of each.

    .venv/bin/python tests/soak/soak_small_captures.py [SHAPE ...] [--verbs VERB,...] [--part N]

Each shape is less than 10 MB and has less than 10 million values. A verb that takes over 10 s of CPU time or 1 GB, or
does not end in one sentence, ends the script with 1. One sentence that refuses the shape is fine.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import machine, print_table, scaled
from iaprof.formats.writers.registry import WRITERS
from iaprof.timelines.outputs.formats import FORMATS
from unit.capturing import HEADER, capture
from unit.formats.test_hostile_captures import rows
from unit.memory_runs import Run, Runs
from unit.slow_captures import SLOW
from unit.slow_registry import SHAPES, TIME_LINES

MOST_S, MOST_BYTES, KILLED_S = 10, 1 << 30, 40
MOST_ON_DISK = 10_000_000
Words = list[str | Path]


def commands(path: Path, other: Path, folder: Path, time_lines: bool) -> dict[str, Words]:
    """Every verb that reads captures, and `report` in each of its formats."""
    write: Words = ["-q", "-f", "-o", folder / "out"]
    found: dict[str, Words] = {
        "info": ["info", path],
        "info --json": ["info", "--json", path],
        "diff": ["diff", "-q", other, path],
        "query": ["query", path, "SELECT * FROM (SUMMARIZE launches) UNION ALL SELECT * FROM (SUMMARIZE losses)"],
        "samples": ["query", path, "SELECT count(*) FROM samples"],
        "archive": ["archive", path, *write],
        "redact": ["archive", "--redact", path, *write],
        "merge": ["merge", path, other, *write],
    }
    if time_lines:
        found["timeline"] = ["timeline", "-q", path]
        found["timeline -o"] = ["timeline", "-q", path, "-f", "--html", "--pddf", "-o", folder / "lines"]
        found["diff"] = ["diff", "-q", path, path]
    else:
        by = ("kernel", "function", "instruction", "process", "launcher", "stack", "operator", "energy", "transfer",
              "wait")  # fmt: skip
        found |= {f"top {each}": ["top", "-q", "--by", each, path] for each in by}
        found |= {
            "annotate": ["annotate", path],
            "waits": ["report", "--waits", "--format=folded", path, *write],
            "cpu": ["report", "--cpu-samples", "--format=folded", path, *write],
            "intervals": ["report", "--per-interval", "--interval=0.01", "--format=folded", path, *write],
            "group": ["top", "-q", "--group-by", "host,pod", "--cache=none", path, other],
            "flame": ["flame", "-q", "-f", "-o", folder / "out.html", "--", path],  # as if it had recorded the shape
        }
        limited: Words = ["report", "--group-by", "host", "--percent-limit", "1", "--cache=none", "--format=folded"]
        found["rarer"] = [*limited, path, other, *write]
        by_label: Words = ["top", "-q", "--group-by", "label:k0,container", "--cache=none", path, other]
        found |= {
            "labels": by_label,
            "percentiles": [*by_label, "--percentiles"],
            "outliers": [*by_label, "--outliers"],
            "containers": ["top", "-q", "--group-by", "container,capture", "--cache=none", "--json", path, other],
        }
    formats = FORMATS if time_lines else WRITERS
    return found | {each: ["report", f"--format={each}", path, *write] for each in formats}


def trouble(run: Run) -> str:
    """Why a run is not as it should be; empty when it is."""
    if run.code not in (0, 1, 2) or "Traceback" in run.err:
        return "killed" if run.code in (-24, -9) else f"ended {run.code}: {run.err[-300:]}"
    if run.code and not re.search(r"^iaprof: [^\n]+\n\Z", run.err, re.MULTILINE):
        return f"no sentence: {run.err[-300:]}"
    return "slow" if run.cpu_s > MOST_S else "large" if run.peak > MOST_BYTES else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--verbs", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--part", type=int, default=1, help="make shapes of one PART-th of the values")
    arguments = parser.parse_args()
    print(machine(), flush=True)
    table, bad = [], 0
    with tempfile.TemporaryDirectory(prefix="iaprof-small-") as name:
        folder = Path(name)
        other = capture(folder / "other.parquet", HEADER | {"clock": {"monotonic_ns": 5, "realtime_ns": 77}}, **rows())
        unlimited, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (KILLED_S, most))  # inherited by each verb
        with Runs(folder) as runs:
            resource.setrlimit(resource.RLIMIT_CPU, (unlimited, most))
            for shape in arguments.shapes or [*SHAPES, *SLOW]:
                make, number = (SHAPES | SLOW)[shape]
                path = make(folder / "shape.parquet", number // arguments.part)
                assert path.stat().st_size < MOST_ON_DISK, shape
                for verb, words in commands(path, other, folder, shape in TIME_LINES).items():
                    if arguments.verbs and verb not in arguments.verbs:
                        continue
                    run = runs.run(*words)
                    why = trouble(run)
                    bad += bool(why)
                    said = why or (run.err.splitlines() or [""])[-1][:100] * (run.code != 0)
                    row = [shape, verb, f"{run.cpu_s:.1f} s", scaled(run.peak), said]
                    table.append(row)
                    print("  ".join(row), flush=True)
    print_table("Small captures", ["shape", "verb", "CPU", "memory", "said"], [row for row in table if row[-1]])
    print(f"\n  {bad} of {len(table)} runs took too much")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
