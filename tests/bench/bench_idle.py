"""What a recorder costs that has nothing to record, and how soon it records and has finished.

Idle: the recorder's CPU clock is read 30 s apart while nothing of ours runs (what else runs on the machine shows: the
side-band tells of every process). Start: from exec until both launches and stalls of a program that runs already are
recorded. End: from SIGINT to a finished capture.

    sudo .venv/bin/python tests/bench/bench_idle.py [--seconds 30] [--times 7]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import IAPROF, Recorder, machine, needs_root, print_table, wait_for
from iaprof.formats.capture import CaptureReader
from standin import runtime
from standin.hardware import Hardware

IDLE = (
    ("nothing but stalls and launches", ("--metric-interval", "0", "--cpu-freq", "0"), 0.05),
    ("with the defaults", (), 0.6),
)
START_S, END_S = 0.5, 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="of idling")
    parser.add_argument("--times", type=int, default=7, help="starts and ends that are measured")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-", dir="/var/tmp") as name:
        rows = [idle(Path(name), what, options, most, arguments.seconds) for what, options, most in IDLE]
        heads = ["idle", f"CPU in {arguments.seconds:g} s", "at most", "wake-ups/s", "processes that forked"]
        print_table("Nothing to record", heads, rows)
        measured = [start_and_end(Path(name)) for _ in range(arguments.times)]
    rows = [
        ["exec to recording", *_spread([start for start, _ in measured]), f"{START_S:.2f} s"],
        ["Ctrl-C to a finished capture", *_spread([end for _, end in measured]), f"{END_S:.2f} s"],
    ]
    print_table(f"Start and end, of {arguments.times}", ["", "median", "least", "most", "at most"], rows)
    for column, most in enumerate((START_S, END_S)):
        if statistics.median(times[column] for times in measured) > most:
            sys.exit(f"{rows[column][0]}: the median is more than {most:g} s")


def _spread(values: Sequence[float]) -> list[str]:
    return [f"{value:.2f} s" for value in (statistics.median(values), min(values), max(values))]


def idle(folder: Path, what: str, options: Sequence[str], most: float, seconds: float) -> list[str]:
    """A row of the table."""
    capture = folder / "idle.parquet"
    with Hardware(folder / "gpu") as hardware, Recorder(hardware, capture, options) as recorder:
        before, woken = recorder.cpu_s(), switches(recorder.process.pid)
        time.sleep(seconds)
        spent, woken = recorder.cpu_s() - before, switches(recorder.process.pid) - woken
        recorder.stop()
    forks = CaptureReader(capture).table("process", ("event",))["event"].to_pylist().count("fork")
    return [what, f"{spent:.3f} s", f"{most * seconds / 30:.2f} s", f"{woken / seconds:.0f}", str(forks)]


def switches(pid: int) -> int:
    """How often a process went to sleep by itself."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("voluntary_ctxt_switches:")[2].split()[0])


def start_and_end(folder: Path) -> tuple[float, float]:
    """Seconds from exec to recording, and from SIGINT to the end of the process."""
    capture = folder / "short.parquet"
    with Hardware(folder / "gpu") as hardware:
        program = subprocess.Popen(
            runtime.command([runtime.debug_elf("bmg", "matmul")], "--seconds", 60, "--rate", 2000),
            env=os.environ | {"STANDIN_DUMP_DIR": str(folder), "STANDIN_DIR": str(hardware.folder)},
            stdout=subprocess.DEVNULL,
        )
        time.sleep(0.3)
        began_ns = time.monotonic_ns()
        words = [*IAPROF, "record", "--quiet", "--force", "-o", str(capture)]
        recorder = subprocess.Popen(words, env=os.environ | hardware.env(), stdin=subprocess.DEVNULL)
        time.sleep(3)
        told = time.monotonic()
        recorder.send_signal(signal.SIGINT)
        ended = wait_for(recorder, told)
        program.terminate()
        program.wait()
    if ended.code:
        raise RuntimeError("the recorder failed; what it said is above")
    reader = CaptureReader(capture)
    first_launch = min(reader.table("launch", ("time_ns",))["time_ns"].to_pylist())
    first_stall = min(reader.table("stall", ("begin_ns",))["begin_ns"].to_pylist())
    recording = max(first_launch, first_stall)
    return (recording - began_ns) / 1e9, ended.wall_s


if __name__ == "__main__":
    main()
