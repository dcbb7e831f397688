"""How long `iaprof report` takes, and how much memory, from 1 to 300 million stall records.

The captures are made here (synthetic.py): 2,000 kernels with the code of a real one, a launch for each 100 records (so
100 million records have 1 million launches), stacks of 20 frames, a million records a second.

    .venv/bin/python tests/bench/bench_report.py [--millions 1,10,100,300] [--rounds 3] [--format folded]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import IAPROF, Memory, machine, print_table, scaled, wait_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", default="1,10,100,300", help="records of each capture, in millions")
    parser.add_argument("--rounds", type=int, default=3, help="how often each report is made; the median counts")
    parser.add_argument("--format", default="folded", help="of the report")
    arguments = parser.parse_args()
    print(machine())
    rows = []
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-", dir="/var/tmp") as name:
        for word in arguments.millions.split(","):
            records = int(float(word) * 1e6)
            capture = Path(name) / "capture.parquet"
            make(capture, records)
            rows.append(measure(capture, records, arguments.format, arguments.rounds))
    heads = ["records", "takes", "most", "CPU", "records/s", "memory", "output", "lines", "capture", "B/record"]
    print_table(f"iaprof report --format={arguments.format}, runs of each: {arguments.rounds}", heads, rows)


def make(path: Path, records: int) -> None:
    """Writes the capture in a process of its own: its memory must not count as that of what starts here."""
    process = multiprocessing.get_context("spawn").Process(target=_write, args=(path, records))
    process.start()
    process.join()
    if process.exitcode != 0:
        sys.exit("the capture could not be made")


def _write(path: Path, records: int) -> None:
    from bench.synthetic import write_capture

    write_capture(path, records)


def measure(capture: Path, records: int, format_: str, rounds: int) -> list[str]:
    output, errors = capture.with_name("report"), capture.with_name("errors")
    command: list[str | Path] = [*IAPROF, "report", "--force", f"--format={format_}", "-o", output, capture]
    runs, memory = [], 0
    for _ in range(rounds):
        started = time.monotonic()
        with errors.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file)
            watch = Memory(process.pid)
            watch.start()
            runs.append(wait_for(process, started))
            watch.stop()
        memory = max(memory, watch.most())
        if runs[-1].code != 0:
            sys.exit(f"iaprof report ended with {runs[-1].code}: {errors.read_text()}")
    wall = statistics.median(one.wall_s for one in runs)
    size = capture.stat().st_size
    with output.open("rb") as file:
        lines = sum(1 for _ in file)
    return [
        f"{records / 1e6:g} M",
        f"{wall:.2f} s",
        f"{max(one.wall_s for one in runs):.2f} s",
        f"{statistics.median(one.cpu_s for one in runs):.2f} s",
        f"{records / wall / 1e6:.2f} M",
        scaled(memory),
        scaled(output.stat().st_size),
        f"{lines:,}",
        scaled(size),
        f"{size / records:.2f}",
    ]


if __name__ == "__main__":
    main()
