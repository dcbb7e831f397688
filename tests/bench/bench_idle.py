"""What a recorder costs that has nothing to record, and how soon it records and has finished.

Idle: the CPU clocks of the recorder and of the processes that it started are read 20 s apart while nothing of ours
runs. What else runs on the machine shows: the side-band tells of every process, and CPU samples are taken of all.
Processes: what each of the recorder's had used when recording had begun, and its memory. Start: from exec until both
launches and stalls of a program that runs already are recorded. End: from SIGINT to a finished capture.

    sudo .venv/bin/python tests/bench/bench_idle.py [--seconds 20] [--times 5]
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

from bench.measuring import IAPROF, Part, Recorder, machine, needs_root, print_table, wait_for
from iaprof.formats.capture.reader import CaptureReader
from standin import runtime
from standin.hardware import Hardware

IDLE = (
    ("nothing but stalls and launches", ("--metric-interval", "0", "--cpu-freq", "0"), 0.05),
    ("with the defaults", (), 0.6),
)
START_S, END_S = 0.45, 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of idling")
    parser.add_argument("--times", type=int, default=5, help="starts and ends that are measured")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-", dir="/var/tmp") as name:
        found = [idle(Path(name), what, options, most, arguments.seconds) for what, options, most in IDLE]
        heads = ["idle", f"CPU in {arguments.seconds:g} s", "at most", "wake-ups/s", "processes that forked"]
        print_table("Nothing to record", heads, [row for row, _ in found])
        show_processes(found[0][1])
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


def show_processes(parts: Sequence[Part]) -> None:
    """What each of the recorder's processes has used."""
    rows = [
        [part.name, f"{part.cpu_s:.2f} s", f"{part.peak_bytes / 1e6:.1f} MB", f"{part.share_bytes / 1e6:.1f} MB"]
        for part in parts
    ]
    cpu, share = sum(part.cpu_s for part in parts), sum(part.share_bytes for part in parts)
    rows.append(["together", f"{cpu:.2f} s", "", f"{share / 1e6:.1f} MB"])
    print_table("Its processes when recording has begun", ["", "CPU", "most resident", "proportional share"], rows)


def idle(
    folder: Path, what: str, options: Sequence[str], most: float, seconds: float
) -> tuple[list[str], Sequence[Part]]:
    """A row of the table, and the recorder's processes when it had begun."""
    capture = folder / "idle.parquet"
    with Hardware(folder / "gpu") as hardware, Recorder(hardware, capture, options) as recorder:
        parts = recorder.parts()
        before, woken = recorder.cpu_s(), switches(recorder.process.pid)
        time.sleep(seconds)
        spent, woken = recorder.cpu_s() - before, switches(recorder.process.pid) - woken
        recorder.stop()
    forks = CaptureReader(capture).table("process", ("event",))["event"].to_pylist().count("fork")
    return [what, f"{spent:.3f} s", f"{most * seconds / 30:.2f} s", f"{woken / seconds:.0f}", str(forks)], parts


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
