"""What functions of Python in stacks cost: a launch from 31 of them, and a program that is sampled.

First a program launches in a loop below 31 functions of Python and measures itself, while it is recorded. By turns, BPF
knows its interpreter and does not: everything else is the same. Then it does so in a thread that runs no Python, as
PyTorch's for gradients.

Next a program launches from paths of which no two are the same: what does it take to finish such a recording?

Then, with --torch, PyTorch computes with small operators, by turns without a recorder and with one that takes CPU
samples 99 times a second. Each pair gives a ratio of times.

    sudo .venv/bin/python tests/bench/bench_python.py [--rounds 100] [--torch PYTHON [--pairs 20]]
"""

from __future__ import annotations

import argparse
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import Recorder, machine, map_of, needs_root, print_table
from iaprof.bpf.maps import delete_element, read_element, write_element
from iaprof.formats.capture.reader import CaptureReader
from pythons.interpreters import HERE
from standin import runtime
from standin.hardware import Hardware

FRAMES, MOST_NS, MOST_NS_IN_THREAD = 31, 1500, 500
LAUNCHES = 2000  # of a turn
PATHS_S, LEAST_PATHS, MOST_FINISH_US, MOST_FINISH_MB = 10, 50_000, 50, 400
STEPS, MOST_SLOWER = 30_000, 0.01  # of a turn; by which a sampled program may be slower
OPTIONS = ("--cpu-freq", "0", "--metric-interval", "0")
PYTHONS = {"map_type": "9", "key_size": "4", "value_size": "72"}  # the map of interpreters, by process
CHANGES = {"map_type": "2", "key_size": "4", "value_size": "8", "max_entries": "2"}  # tells BPF to look at it
KNOWN_S = 30.0
LAUNCHING = """\
import ctypes, sys
calls = ctypes.CDLL(sys.argv[1])
calls.launches_take.restype = calls.launches_take_in_a_thread.restype = ctypes.c_double
assert not calls.prepare(sys.argv[2].encode(), sys.argv[3].encode())
count, functions = map(int, sys.argv[4:6])
def deeper(n):
    if n:
        return deeper(n - 1)
    while sys.stdin.readline():
        print(calls.launches_take(count), flush=True)
while sys.argv[6] == "in a thread" and sys.stdin.readline():
    print(calls.launches_take_in_a_thread(functions, count), flush=True)
deeper(functions - 2)
"""
PATHS = """\
import ctypes, random, sys, time
calls = ctypes.CDLL(sys.argv[1])
calls.launches_take.restype = ctypes.c_double
assert not calls.prepare(sys.argv[2].encode(), sys.argv[3].encode())
for number in range(8):
    exec(f"def f{number}(n, path): return FUNCTIONS[path & 7](n - 1, path >> 3) if n else calls.launches_take(1)")
FUNCTIONS = [globals()[f"f{number}"] for number in range(8)]
paths, end = random.Random(1), time.monotonic() + int(sys.argv[4])
while time.monotonic() < end:
    f0(30, paths.getrandbits(90))
"""
TORCH = """\
import os, sys, time, torch
os.sched_setaffinity(0, {int(sys.argv[1])})
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()) for _ in range(8)))
numbers = torch.rand(4, 32)
def step():
    with torch.no_grad():
        return float(model(numbers).sum())
def turn():
    begin = time.perf_counter()
    for _ in range(int(sys.argv[2])):
        step()
    return time.perf_counter() - begin
turn()
print("ready", flush=True)
while sys.stdin.readline():
    print(turn(), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="turns of each kind")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has PyTorch")
    parser.add_argument("--pairs", type=int, default=20, help="of turns of PyTorch")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-") as name, Hardware(Path(name) / "gpu") as hardware:
        os.environ["STANDIN_DUMP_DIR"] = name
        added = launches(Path(name), hardware, arguments.rounds, "of Python")
        added_in_thread = launches(Path(name), hardware, arguments.rounds, "in a thread")
        finish_us, finish_mb = finished(Path(name), hardware)
        interval = sampled(Path(name), hardware, arguments.torch, arguments.pairs) if arguments.torch else None
    if added > MOST_NS:
        sys.exit(f"{FRAMES} frames of Python add more than {MOST_NS} ns to a launch")
    if added_in_thread > MOST_NS_IN_THREAD:
        sys.exit(f"in a thread without Python, a launch takes {MOST_NS_IN_THREAD} ns longer in a process with Python")
    if finish_us > MOST_FINISH_US or finish_mb > MOST_FINISH_MB:
        sys.exit(f"finishing takes more than {MOST_FINISH_US} us a stack or {MOST_FINISH_MB} MB")
    if interval is not None and interval[0] > 1 + MOST_SLOWER:
        sys.exit(f"a program that is sampled is more than {MOST_SLOWER:.0%} slower")


def kernel_of(folder: Path) -> list[str]:
    """What a program needs to launch: a library, which is built, an ELF file, and its kernel."""
    library, linked = folder / "libcalls.so", runtime.build().library
    words = ("cc", *runtime.COMMON, "-O2", "-fPIC", "-shared", f"-I{runtime.SOURCES}")
    source = HERE / "programs" / "launching_calls.c"
    subprocess.run([*words, source, linked, f"-Wl,-rpath,{linked.parent}", "-o", library], check=True)
    return [str(library), str(runtime.debug_elf("bmg", "attention")), "attention_scores"]


def finished(folder: Path, hardware: Hardware) -> tuple[float, float]:
    """Prints what finishing takes where each launch has a stack of its own; gives CPU us a stack, and MB."""
    capture = folder / "paths.parquet"
    with Recorder(hardware, capture, OPTIONS) as recorder:
        subprocess.run([sys.executable, "-c", PATHS, *kernel_of(folder), str(PATHS_S)], check=True)
        recorder.stop()
    header = CaptureReader(capture).header
    stacks, cpu_s = int(header["totals"]["stacks"]), float(header["cost"]["finish_cpu_s"])
    peak = float(header["cost"]["finish_peak_bytes"]) / 1e6
    cells = [f"{stacks:,}", f"{cpu_s:,.1f} s", f"{cpu_s / stacks * 1e6:,.0f} us", f"{peak:,.0f} MB"]
    heads = ["stacks of 31 frames of Python", "stacks", "finishing, CPU", "a stack", "memory"]
    print_table(f"a program that launches for {PATHS_S} s", heads, [["each launch from another path", *cells]])
    if stacks < LEAST_PATHS:
        sys.exit("they are too few: these figures are worth nothing")
    return cpu_s / stacks * 1e6, peak


def launches(folder: Path, hardware: Hardware, rounds: int, functions: str) -> float:
    """Prints what a launch takes where BPF knows the interpreter, and where not; gives what this adds, ns.

    Args:
        folder: for files.
        hardware: to launch on.
        rounds: turns of each kind.
        functions: those above the launch: `of Python`, or of C, `in a thread`.
    """
    capture = folder / "cap.parquet"
    told = [*kernel_of(folder), LAUNCHES, FRAMES, functions]
    program = Program([sys.executable, "-c", LAUNCHING, *map(str, told)])
    with Recorder(hardware, capture, OPTIONS) as recorder:
        program.turn()  # its rules are learnt
        pythons, key = map_of(recorder.process.pid, **PYTHONS), struct.pack("<I", program.pid)
        changes = map_of(recorder.process.pid, **CHANGES)
        interpreter = known(pythons, key)
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * rounds):
            is_known = bool(number & 1)
            if is_known:
                write_element(pythons, key, interpreter)
            else:
                delete_element(pythons, key)
            write_element(changes, struct.pack("<I", 0), struct.pack("<Q", 2**32 + number))
            times[is_known].append(program.turn())
        os.close(pythons)
        os.close(changes)
        program.end()
        recorder.stop()
    reader = CaptureReader(capture)
    depths = {row["id"]: len(row["python"] or ()) for row in reader.table("stack").to_pylist()}
    found = [depths.get(row["stack"], 0) for row in reader.table("launch").to_pylist() if row["pid"] == program.pid]
    without, having = (statistics.median(times[which]) for which in (False, True))
    is_thread = functions == "in a thread"
    most, frames = (MOST_NS_IN_THREAD, 0) if is_thread else (MOST_NS, FRAMES)
    cells = [f"{without:,.0f}", f"{having:,.0f}", f"{having - without:,.0f}", f"{most:,}"]
    heads = ["functions", "interpreter not known", "known", "added", "at most"]
    print_table(
        f"ns of a launch: medians of {rounds} turns of {LAUNCHES:,}", heads, [[f"{FRAMES} {functions}", *cells]]
    )
    print(f"\n  {found.count(frames):,} of {len(found):,} launches have {frames} frames of Python")
    if found.count(frames) < 0.99 * rounds * LAUNCHES:
        sys.exit("they have not: these figures are worth nothing")
    return having - without


def known(pythons: int, key: bytes) -> bytes:
    """What BPF knows of a process's interpreter, once it does."""
    deadline = time.monotonic() + KNOWN_S
    while (found := read_element(pythons, key, int(PYTHONS["value_size"]))) is None:
        if time.monotonic() > deadline:
            sys.exit("the interpreter was not found")
        time.sleep(0.05)
    return found


def sampled(folder: Path, hardware: Hardware, python: str, pairs: int) -> tuple[float, float]:
    """Prints by how much a program with PyTorch is slower while it is sampled; gives the 95 % interval of the ratio."""
    cpu, capture = max(os.sched_getaffinity(0)), folder / "torch.parquet"
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {cpu})  # with the recorder, which inherits it
    program = Program([python, "-c", TORCH, str(cpu), str(STEPS)])
    program.wait()
    ratios, samples, having = [], 0, 0
    for _ in range(pairs):
        alone = program.turn()
        with Recorder(hardware, capture, ("--metric-interval", "0", "--cpu-freq", "99")) as recorder:
            program.turn()
            ratios.append(program.turn() / alone)
            recorder.stop()
        reader = CaptureReader(capture)
        python_of = {row["id"]: row["python_ended"] for row in reader.table("stack").to_pylist()}
        stacks = [row["stack"] for row in reader.table("cpu_sample").to_pylist() if row["pid"] == program.pid]
        samples, having = samples + len(stacks), having + sum(python_of.get(stack) == "whole" for stack in stacks)
    program.end()
    mean = statistics.mean(ratios)
    half = 2.09 * statistics.stdev(ratios) / len(ratios) ** 0.5  # Student's t for 19 degrees of freedom
    heads = ["PyTorch", "pairs", "slower", "95 % interval", "at most", "samples", "with Python"]
    cells = [f"{pairs}", f"{mean - 1:.2%}", f"{mean - half - 1:.2%} - {mean + half - 1:.2%}", f"{MOST_SLOWER:.0%}"]
    print_table("CPU samples at 99 Hz", heads, [["small operators", *cells, f"{samples:,}", f"{having / samples:.1%}"]])
    return mean - half, mean + half


class Program:
    """A program that measures itself each time that it is told to."""

    def __init__(self, words: list[str]) -> None:
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def wait(self) -> str:
        """The next line that it prints."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the program ended")
        return line

    def turn(self) -> float:
        """What it measures."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self.wait())

    def end(self) -> None:
        """Ends it."""
        self._process.communicate()


if __name__ == "__main__":
    main()
