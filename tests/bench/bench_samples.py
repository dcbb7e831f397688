"""What CPU samples cost, and how many of their stacks are whole, in a program that computes with NumPy.

The program, NumPy as its wheel comes, takes singular values and sorts, on one CPU. The recorder samples it. The BPF
programs add up how many samples they took and how long these took, for each CPU: read a thousand times a second, most
of these counts have grown by one sample, whose time is the difference. So there is a time for each sample, and their
median. The capture says how the stacks ended.

    sudo .venv/bin/python tests/bench/bench_samples.py [--seconds 20] [--hz 49 199 499]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import Recorder, machine, map_of, needs_root, print_table
from iaprof.bpf.perf_event import possible_cpus
from iaprof.bpf.syscall import BPF_MAP_LOOKUP_ELEM, bpf
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import Counter as Counted
from standin.hardware import Hardware

MEDIAN_NS, LEAST_WHOLE = 4000, 0.98
FULL_HZ = 499  # for MEDIAN_NS; with fewer samples what the programs need is less often in the CPU's caches
COPIED_NS = 15_000  # less than it takes to copy a stack, more than it takes to walk one
PROGRAM = """\
import numpy, os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
generator = numpy.random.default_rng(1)
matrix, numbers = generator.random((300, 300)), generator.random(1_000_000)
print("ready", flush=True)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    numpy.linalg.svd(matrix)
    numpy.sort(numbers)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of sampling, at each rate")
    parser.add_argument("--hz", type=int, nargs="+", default=[49, 199, 499], help="samples a second")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    cpu = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {cpu})  # with the recorder, which inherits it
    rows, remarks = [], []
    for hz in arguments.hz:
        with tempfile.TemporaryDirectory(prefix="iaprof-bench-") as name, Hardware(Path(name) / "gpu") as hardware:
            found = sample(Path(name) / "samples.parquet", hardware, cpu, hz, arguments.seconds)
        rows.append(row(hz, found, arguments.seconds))
        remarks.append(remark(hz, found))
    heads = ["samples", "median us", "at most", "10 - 90 %", "mean", "whole stacks", "at least", "learner"]
    print_table("CPU samples of NumPy: svd and sort", ["samples/s", *heads], rows)
    print("\n" + "\n".join(remarks))
    if found.whole < LEAST_WHOLE:
        sys.exit(f"less than {LEAST_WHOLE:.0%} of the stacks are whole")
    if hz >= FULL_HZ and statistics.median(found.times_ns) > MEDIAN_NS:
        sys.exit(f"the median at {hz} samples/s is more than {MEDIAN_NS / 1000:g} us")


def row(hz: int, found: Sampled, seconds: float) -> list[str]:
    """Of the table."""
    times = found.times_ns
    low, *_, high = statistics.quantiles(times, n=10)
    return [
        f"{hz}",
        f"{found.ends.total():,}",
        f"{statistics.median(times) / 1000:.1f}",
        f"{MEDIAN_NS / 1000:.1f}" if hz >= FULL_HZ else "",
        f"{low / 1000:.1f} - {high / 1000:.1f}",
        f"{statistics.mean(times) / 1000:.1f}",
        f"{100 * found.whole:.2f} %",
        f"{100 * LEAST_WHOLE:g} %",
        f"{100 * found.learner_s / seconds:.2f} %",
    ]


def remark(hz: int, found: Sampled) -> str:
    """How the stacks ended, and how many were copied."""
    ends = ", ".join(f"{count:,} {ended}" for ended, count in found.ends.most_common())
    copied = sum(each > COPIED_NS for each in found.times_ns)
    slow = f"{copied:,} of {len(found.times_ns):,} took longer than {COPIED_NS / 1000:g} us, most as they were copied"
    return f"  {hz}: {ends}; {slow}"


@dataclass(frozen=True)
class Sampled:
    """The samples of a program."""

    times_ns: list[int]  # in BPF, of those that were seen one by one
    ends: Counter[str]  # all of them, by how the stacks of the program ended
    learner_s: float  # CPU

    @property
    def whole(self) -> float:
        """The share of whole stacks."""
        return self.ends["whole"] / self.ends.total()


def sample(capture: Path, hardware: Hardware, cpu: int, hz: int, seconds: float) -> Sampled:
    options = ("--metric-interval", "0", "--cpu-freq", str(hz))
    with Recorder(hardware, capture, options) as recorder:
        words = [sys.executable, "-c", PROGRAM, str(cpu), str(seconds)]
        program = subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
        assert program.stdout is not None
        program.stdout.readline()
        before = sum(part.cpu_s for part in recorder.parts()[2:])
        times = times_of(recorder.process.pid, program, cpu)
        learner_s = sum(part.cpu_s for part in recorder.parts()[2:]) - before
        recorder.stop()
    reader = CaptureReader(capture)
    ends = dict(zip(*(reader.table("stack").column(name).to_pylist() for name in ("id", "ended")), strict=True))
    samples = reader.table("cpu_sample", ("pid", "stack")).to_pylist()
    found = Counter(ends.get(row["stack"], "none") for row in samples if row["pid"] == program.pid)
    return Sampled(times, found, learner_s)


def times_of(recorder: int, program: subprocess.Popen[bytes], cpu: int) -> list[int]:
    """Until the program ends: the time of each sample on a CPU, ns, in BPF."""
    counters = PerCpu(recorder)
    times, last = [], counters.read(cpu)
    try:
        while program.poll() is None:
            time.sleep(0.001)
            now = counters.read(cpu)
            samples, ns = (int(now[which] - last[which]) for which in (Counted.SAMPLES, Counted.SAMPLE_NS))
            if samples and not ns:
                continue  # it is not over yet
            if samples == 1:
                times.append(ns)
            last = now
    finally:
        counters.close()
    return times


class PerCpu:
    """The counters of a recorder's BPF programs, for each CPU."""

    def __init__(self, recorder: int) -> None:
        """Takes a descriptor of that map from the recorder."""
        self._values = np.zeros((len(possible_cpus()), len(Counted)), np.uint64)
        self._fd = map_of(recorder, map_type="6", value_size=str(8 * len(Counted)), max_entries="1")

    def read(self, cpu: int) -> NDArray[np.uint64]:
        """Those of a CPU."""
        key = ctypes.c_uint32(0)
        bpf(BPF_MAP_LOOKUP_ELEM, struct.pack("<IxxxxQQQ", self._fd, ctypes.addressof(key), self._values.ctypes.data, 0))
        values: NDArray[np.uint64] = self._values[cpu].copy()
        return values

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self._fd)


if __name__ == "__main__":
    main()
