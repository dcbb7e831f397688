"""What a launch costs the application while it is recorded, and what launches cost the recorder.

The first table: one program that launches in a loop, measured by itself, in turn without a recorder and with one; the
last column is what was recorded of it, so that the stacks are as deep as they should be and nothing was lost. The
second: a program that launches at a steady rate, and the CPU clock of the recorder over some seconds of it.

    sudo .venv/bin/python tests/bench/bench_launches.py [--rounds 7] [--seconds 10]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import Recorder, machine, needs_root, print_table
from iaprof.formats.capture import CaptureReader
from standin import runtime
from standin.hardware import Hardware

FRAMES = (2, 16, 64, 127)
LAUNCHES = 20_000  # of each depth in each round
UNPROBED_NS = 100.0  # more than a launch takes that no recorder looks at
RATES = (0, 10_000, 50_000)
SETTLE_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured, in turn")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which the recorder's CPU is measured")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-") as name, Hardware(Path(name) / "gpu") as hardware:
        os.environ["STANDIN_DUMP_DIR"] = name
        measure_application(Path(name), hardware, arguments.rounds)
        measure_recorder(Path(name), hardware, arguments.seconds)


def measure_application(folder: Path, hardware: Hardware, rounds: int) -> None:
    program = compile_program(folder)
    elf = runtime.debug_elf("bmg", "attention")
    words = [str(program), str(elf), "attention_scores", str(LAUNCHES), *map(str, FRAMES)]
    without: dict[int, list[float]] = {frames: [] for frames in FRAMES}
    recorded: dict[int, list[float]] = {frames: [] for frames in FRAMES}
    probe_ns = probed = lost = 0
    depths: list[int] = []
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(rounds):
            take(process, without)
            capture = folder / "launches.parquet"
            with Recorder(hardware, capture) as recorder:
                take(process, recorded)
                recorder.stop()
            reader = CaptureReader(capture)
            probe_ns += reader.header["probes"]["probe_ns"]
            probed += reader.header["probes"]["launches"]
            ours = [pid == process.pid for pid in reader.table("launch", ("pid",))["pid"].to_pylist()]
            lost += len(FRAMES) * LAUNCHES - sum(ours)
            stacks = reader.table("stack", ("pid", "ips")).to_pylist()
            depths = sorted({len(stack["ips"]) for stack in stacks if stack["pid"] == process.pid})
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.wait()
    rows = []
    for frames in FRAMES:
        before, after = statistics.median(without[frames]), statistics.median(recorded[frames])
        low, *_, high = statistics.quantiles(recorded[frames], n=10)
        rows.append(
            [
                f"{frames} frames",
                f"{before:.1f}",
                f"{after:,.0f}",
                f"{low:,.0f} - {high:,.0f}",
                f"{after - before:,.0f}",
            ]
        )
    heads = ["ns per launch", "not recorded", "recorded", "10 - 90 %", "added"]
    title = f"A launch in the application: medians of {rounds} x 10 parts of {LAUNCHES // 10:,} launches, in turn"
    print_table(title, heads, rows)
    print(
        f"\n  recorded stacks: {', '.join(map(str, depths))} frames deep; launches lost: {lost:,}; "
        f"of the added time {probe_ns / max(1, probed):,.0f} ns on average in the BPF program"
    )
    if max(statistics.median(times) for times in without.values()) > UNPROBED_NS:
        print("  another recorder has run on this machine at the same time: these figures are worth nothing")


def compile_program(folder: Path) -> Path:
    """launching.c, with the stand-in's library beside it."""
    programs = runtime.build()
    output = folder / "launching"
    source = Path(__file__).with_name("launching.c")
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", *runtime.FRAMES, "-Wl,-z,now", f"-I{runtime.SOURCES}"]
    library = [str(programs.library), f"-Wl,-rpath,{programs.library.parent}"]
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", str(output), str(source), *library], check=True)
    return output


def take(process: subprocess.Popen[str], into: dict[int, list[float]]) -> None:
    """One round of the program."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the program has no pipes")
    process.stdin.write("\n")
    process.stdin.flush()
    for frames in FRAMES:
        parts = [float(word) for word in process.stdout.readline().split()]
        if not parts:
            raise RuntimeError("the program ended")
        into[frames] += parts


def measure_recorder(folder: Path, hardware: Hardware, seconds: float) -> None:
    rows = []
    others = 0
    for rate in RATES:
        capture = folder / f"rate-{rate}.parquet"
        with Recorder(hardware, capture) as recorder:
            program = launch_at(rate, seconds + 2 * SETTLE_S) if rate else None
            time.sleep(SETTLE_S)
            cpu, began = recorder.cpu_s(), time.monotonic()
            time.sleep(seconds)
            cpu, took = recorder.cpu_s() - cpu, time.monotonic() - began
            produced = 0
            if program is not None:
                out, _ = program.communicate()
                produced = sum(summary.launches for summary in runtime.read_summaries(out))
            ended = recorder.stop()
        reader = CaptureReader(capture)
        pid = program.pid if program is not None else -1
        pids = reader.table("launch", ("pid",))["pid"].to_pylist()
        mine = sum(p == pid for p in pids)
        others += reader.header["probes"]["launches"] - produced
        size = capture.stat().st_size / mine if mine else 0.0
        rows.append(
            [
                f"{rate:,} launches/s" if rate else "none",
                f"{produced / (seconds + 2 * SETTLE_S):,.0f}",
                f"{produced - mine:,}",
                f"{100 * cpu / took:.2f} %",
                f"{size:.1f}" if mine else "-",
                f"{ended.peak_bytes / 1e6:,.0f} MB",
            ]
        )
    heads = ["launches", "per second", "lost", "of one core", "bytes/launch", "peak memory"]
    print_table(f"The recorder, over {seconds:g} s of each", heads, rows)
    if others:
        print(f"\n  other programs on this machine launched at the same time, {others:,} times: measure again")


def launch_at(rate: int, seconds: float) -> subprocess.Popen[str]:
    options = ("--no-gpu", "--rate", rate, "--seconds", seconds, "--depth", 8)
    words = runtime.command([runtime.debug_elf("bmg", "matmul")], *options)
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    main()
