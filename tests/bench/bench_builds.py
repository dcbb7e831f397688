"""CPU samples of a build: most of its processes end after a few samples, before anyone has seen what they had mapped.

gcc compiles small C files, two at a time, without a recorder and with one at several rates, by turns: each file takes a
compiler driver, a compiler and an assembler. The capture says how their stacks ended.

    sudo .venv/bin/python tests/bench/bench_builds.py [--files 100] [--turns 3] [--hz 99 499]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import Ended, Recorder, machine, needs_root, print_table, run, scaled
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.stack_counts import recorded
from standin.hardware import Hardware

LEAST_WHOLE, FINISHING_S = 0.97, 10.0
FUNCTIONS = 12  # in a file: it takes some 50 ms
SOURCE = """\
static double f{n}(double *x, int n) {{
    double sum = {n};
    for (int i = {n}; i < n; i++) {{
        for (int j = 0; j < i; j++) sum += x[i] * x[j] - (double)(i % (j + {n} + 1));
        x[i] = sum > 1e9 ? sum / (i + 1) : sum;
    }}
    return sum;
}}
"""


@dataclass(frozen=True)
class Built:
    """A build, and what its recording has."""

    build: Ended
    finishing_cpu_s: float = 0.0
    recording_cpu_s: float = 0.0  # of the recorder and its learner, from when it recorded
    spool_bytes: int = 0
    samples: int = 0
    whole: int = 0
    late: int = 0  # finished when the recording had ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100, help="C files")
    parser.add_argument("--turns", type=int, default=3, help="builds of each kind")
    parser.add_argument("--hz", type=int, nargs="+", default=[99, 499], help="samples a second")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    found: dict[int, list[Built]] = {0: [], **{hz: [] for hz in arguments.hz}}
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-") as name, Hardware(Path(name) / "gpu") as hardware:
        folder = Path(name)
        for number in range(arguments.files):
            functions = [SOURCE.format(n=number + each) for each in range(FUNCTIONS)]
            calls = "+".join(f"f{number + each}(x, n)" for each in range(FUNCTIONS))
            text = "".join(functions) + f"double all{number}(double *x, int n) {{ return {calls}; }}\n"
            (folder / f"{number}.c").write_text(text)
        build(folder)  # so that the files of the compiler are in memory
        for _ in range(arguments.turns):
            for hz, of_hz in found.items():
                of_hz.append(recorded_build(folder, hardware, hz) if hz else Built(build(folder)))
    heads = ["wall", "CPU", "recorder", "samples", "whole", "at least", "late", "finishing CPU", "at most", "spool"]
    rows = [row(hz, of_hz) for hz, of_hz in found.items()]
    print_table(f"A build of {arguments.files} files with gcc, two at a time", ["samples/s", *heads], rows)
    every = [each for hz, of_hz in found.items() if hz for each in of_hz]
    if min(each.whole / each.samples for each in every) < LEAST_WHOLE:
        sys.exit(f"less than {LEAST_WHOLE:.0%} of the stacks are whole")
    if max(each.finishing_cpu_s for each in every) > FINISHING_S:
        sys.exit(f"finishing took more than {FINISHING_S:g} s of CPU")


def row(hz: int, builds: list[Built]) -> list[str]:
    """Of the table: medians, and of whole stacks the smallest share."""
    wall, cpu = (statistics.median(getattr(each.build, name) for each in builds) for name in ("wall_s", "cpu_s"))
    cells = [f"{hz or 'none'}", f"{wall:.2f} s", f"{cpu:.2f} s"]
    if not hz:
        return cells + [""] * 8
    return [
        *cells,
        f"{statistics.median(each.recording_cpu_s for each in builds):.2f} s",
        f"{statistics.median(each.samples for each in builds):,.0f}",
        f"{100 * min(each.whole / each.samples for each in builds):.2f} %",
        f"{100 * LEAST_WHOLE:g} %",
        f"{statistics.median(each.late for each in builds):,.0f}",
        f"{statistics.median(each.finishing_cpu_s for each in builds):.2f} s",
        f"{FINISHING_S:g} s",
        scaled(statistics.median(each.spool_bytes for each in builds)),
    ]


def build(folder: Path) -> Ended:
    script = 'cd "$0" && seq 0 $(($(ls *.c | wc -l) - 1)) | xargs -P2 -I% gcc -O2 -c %.c -o %.o'
    ended = run(["sh", "-c", script, folder], folder / "errors")
    if ended.code:
        raise RuntimeError((folder / "errors").read_text())
    return ended


def recorded_build(folder: Path, hardware: Hardware, hz: int) -> Built:
    capture = folder / "build.parquet"
    with Recorder(hardware, capture, ("--metric-interval", "0", "--cpu-freq", str(hz))) as recorder:
        before = recorder.cpu_s()
        built = build(folder)
        used = recorder.cpu_s() - before
        recorder.stop()
    header = CaptureReader(capture).header
    cost = header["cost"]
    counts = recorded(header)["cpu_samples"]
    return Built(built, cost["finish_cpu_s"], used, cost["spool_bytes"], counts.stacks, counts.whole, counts.late)


if __name__ == "__main__":
    main()
