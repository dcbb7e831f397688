"""How long `iaprof report` takes, and how much memory: captures with 1, 4 and 16 million stall records.

The captures are made here (synthetic.py): 2,000 kernels with the code of a real one, records at all their instructions
by Zipf's law (1.3), 200,000 launches from 64 stacks of four processes, ten seconds.

    .venv/bin/python tests/bench/bench_report.py [--millions 1,4,16] [--rounds 1]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import IAPROF, machine, print_table, run, scaled

FORMATS = ("folded", "iaprof")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", default="1,4,16", help="records of each capture, in millions")
    parser.add_argument("--rounds", type=int, default=1, help="how often each report is made; the median counts")
    arguments = parser.parse_args()
    print(machine())
    rows = []
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-", dir="/var/tmp") as name:
        for word in arguments.millions.split(","):
            records = int(float(word) * 1e6)
            capture = Path(name) / "capture.parquet"
            make(capture, records)
            for format_ in FORMATS:
                rows.append(measure(capture, records, format_, arguments.rounds))
    heads = ["report", "takes", "CPU", "records/s", "peak memory", "output", "capture", "B/record"]
    print_table(f"iaprof report, runs of each: {arguments.rounds}", heads, rows)


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
    runs = []
    for _ in range(rounds):
        runs.append(run(command, errors))
        if runs[-1].code != 0:
            sys.exit(f"iaprof report ended with {runs[-1].code}: {errors.read_text()}")
    wall = statistics.median(one.wall_s for one in runs)
    size = capture.stat().st_size
    return [
        f"{records / 1e6:g} M, {format_}",
        f"{wall:.2f} s",
        f"{statistics.median(one.cpu_s for one in runs):.2f} s",
        f"{records / wall / 1e6:.2f} M",
        scaled(max(one.peak_bytes for one in runs)),
        scaled(output.stat().st_size),
        scaled(size),
        f"{size / records:.2f}",
    ]


if __name__ == "__main__":
    main()
