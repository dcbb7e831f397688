"""How long `iaprof report` takes, and how much memory, from 1 to 300 million stall records, beside only reading them.

The captures are made here (synthetic.py): 2,000 kernels with the code of a real one, a launch for each 100 records (so
100 million records have 1 million launches), stacks of 20 frames, a million records a second.

    .venv/bin/python tests/bench/bench_report.py [--millions 1,20,100] [--rounds 5] [--format folded,html]

`multiple` is the CPU time of the report, of all its processes, divided by that of a process that reads the columns that
the report reads of each stall record, and adds them up, with Arrow and NumPy. Both are measured by turns. The script
fails if a multiple is beyond its limit, some 25 % above what was measured when the limit was set.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import IAPROF, Ended, Memory, machine, print_table, run, scaled, wait_for

LIMITS: dict[tuple[str, str], float] = {
    ("folded", "1"): 4.6, ("folded", "20"): 4.6, ("folded", "100"): 3.2,
    ("html", "1"): 9.1, ("html", "20"): 6.4, ("html", "100"): 5.7,
}  # fmt: skip
"""The largest multiple, by format and millions of records."""

READING = """
import sys
import pyarrow.parquet as pq
file, total = pq.ParquetFile(sys.argv[1]), 0
names = ("time_ns", "begin_ns", "stream", "w0", "w1")
for group in range(file.num_row_groups):
    if file.read_row_group(group, columns=["kind"]).column(0)[0].as_py() == "stall":
        for chunk in file.read_row_group(group, columns=[f"stall.{name}" for name in names]).column(0).chunks:
            for column in map(chunk.field, names):
                total += int((column.flatten() if column.type.num_fields else column).to_numpy().sum())
print(total)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", default="1,20,100", help="records of each capture, in millions")
    parser.add_argument("--rounds", type=int, default=5, help="how often each report is made; the median counts")
    parser.add_argument("--format", default="folded,html", help="of the reports")
    arguments = parser.parse_args()
    print(machine())
    rows, beyond = [], []
    formats = arguments.format.split(",")
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-", dir="/var/tmp") as name:
        for millions in arguments.millions.split(","):
            records = int(float(millions) * 1e6)
            capture = Path(name) / "capture.parquet"
            make(capture, records)
            for found in measure(capture, records, formats, arguments.rounds):
                rows.append(found.row(records, capture.stat().st_size))
                if found.multiple > LIMITS.get((found.format, millions), float("inf")):
                    beyond.append(f"{found.format} of {millions} M records: {found.multiple:.2f} times")
    heads = [
        "records",
        "takes",
        "most",
        "CPU",
        "reading",
        "multiple",
        "memory",
        "output",
        "lines",
        "B/record",
        "format",
    ]
    print_table(f"iaprof report, runs of each: {arguments.rounds}", heads, rows)
    if beyond:
        sys.exit("more CPU time than the limit, as a multiple of only reading: " + "; ".join(beyond))


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


@dataclass(frozen=True)
class Measured:
    """The reports of a capture in one format."""

    format: str
    runs: list[Ended]
    reading_s: float  # CPU time
    memory: int
    output: int  # bytes
    lines: int

    @property
    def cpu_s(self) -> float:
        return statistics.median(one.cpu_s for one in self.runs)

    @property
    def multiple(self) -> float:
        return self.cpu_s / self.reading_s

    def row(self, records: int, size: int) -> list[str]:
        return [
            f"{records / 1e6:g} M",
            f"{statistics.median(one.wall_s for one in self.runs):.2f} s",
            f"{max(one.wall_s for one in self.runs):.2f} s",
            f"{self.cpu_s:.2f} s",
            f"{self.reading_s:.2f} s",
            f"{self.multiple:.2f}",
            scaled(self.memory),
            scaled(self.output),
            f"{self.lines:,}",
            f"{size / records:.2f}",
            self.format,
        ]


def measure(capture: Path, records: int, formats: Sequence[str], rounds: int) -> list[Measured]:
    """Reads the capture and makes its reports, by turns."""
    reading: list[float] = []
    runs: dict[str, list[Ended]] = {each: [] for each in formats}
    memory = dict.fromkeys(formats, 0)
    for _ in range(rounds):
        reading.append(run([sys.executable, "-c", READING, capture], capture.with_name("errors")).cpu_s)
        for each in formats:
            one, most = report(capture, each)
            runs[each].append(one)
            memory[each] = max(memory[each], most)
    found = []
    for each in formats:
        output = capture.with_name(each)
        with output.open("rb") as file:
            lines = sum(1 for _ in file)
        size = output.stat().st_size
        output.unlink()
        found.append(Measured(each, runs[each], statistics.median(reading), memory[each], size, lines))
    return found


def report(capture: Path, format_: str) -> tuple[Ended, int]:
    """Makes a report; returns what it used, and the most memory of all its processes."""
    output, errors = capture.with_name(format_), capture.with_name("errors")
    command: list[str | Path] = [*IAPROF, "report", "--force", f"--format={format_}", "-o", output, capture]
    started = time.monotonic()
    with errors.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file)
        watch = Memory(process.pid)
        watch.start()
        one = wait_for(process, started)
        watch.stop()
    if one.code != 0:
        sys.exit(f"iaprof report ended with {one.code}: {errors.read_text()}")
    return one, watch.most()


if __name__ == "__main__":
    main()
