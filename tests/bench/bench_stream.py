"""A flood of EU-stall records through `iaprof record`, and `cat` moving as many bytes through a pipe to /dev/null.

The stand-in's GPU makes the records: 5,000 addresses of one kernel, by Zipf's law (1.3), each counter
non-zero in about a quarter of the records and 7 at most. The recorder's CPU is what its capture's header says, less
what it had used when it began to record; an empty recording of two seconds stands in the first row. `cat` is measured
before and after each recording, the median counts. Finishing is from SIGINT to the end of the process.

Then 500 MB/s for 20 s: nothing may be lost, and memory has to stay flat. Memory is the proportional share (PSS) of all
of the recorder's processes together, the one that writes the capture included.

    sudo .venv/bin/python tests/bench/bench_stream.py [--rate 8000000] [--millions 2,8,16] [--sustained 20]
    ... --device max                  the same under Intel's i915, of one tile
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import Memory, Recorder, imports, machine, needs_root, print_table, scaled, wait_for
from iaprof.formats.capture.reader import CaptureReader
from iaprof.gpu.intel.records import RECORD_BYTES
from standin.hardware import Hardware

ADDRESSES = 5_000
ZIPF = 1.3
INSTRUCTION_BYTES = 16
CATS = 3  # before, and as many after
PIECE = 1 << 20  # bytes that `cat` is given at once
SUSTAINED = 500e6  # bytes per second
OPTIONS = ("--cpu-freq", "0", "--metric-interval", "0")  # what is measured here is the stream


@dataclass(frozen=True)
class Flooded:
    """One recording of a flood."""

    records: int  # that the GPU made
    recorded: int
    recording_s: float  # CPU
    finishing_s: float  # CPU
    finish_s: float  # by the clock
    cat_s: float  # CPU of `cat` for as many bytes
    recording_peak: int  # memory of all processes
    finishing_peak: int
    flat: tuple[int, int]  # memory after a quarter of the recording, and at its end
    spool: int
    capture: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=8e6, help="records per second")
    parser.add_argument("--millions", default="2,8,16", help="records of each recording, in millions")
    parser.add_argument("--sustained", type=float, default=20, help="seconds of 500 MB/s; 0 for none")
    parser.add_argument("--device", default="bmg", help="of the stand-in; max is under Intel's i915, others under xe")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    sizes = [int(float(word) * 1e6) for word in arguments.millions.split(",")]
    with tempfile.TemporaryDirectory(prefix="iaprof-bench-", dir="/var/tmp") as name:
        floods = [flood(Path(name), arguments.device, records, arguments.rate) for records in (0, *sizes)]
        steady = SUSTAINED / RECORD_BYTES
        seconds = arguments.sustained
        long = flood(Path(name), arguments.device, int(steady * seconds), steady) if seconds else None
    rows = []
    for done in floods:
        size = done.records * RECORD_BYTES
        each = done.records / 1e6
        rows.append(
            [
                f"{each:,.0f} M records" if done.records else "none",
                scaled(size),
                f"{done.records - done.recorded:,}",
                f"{done.recording_s:.2f} s",
                f"{done.cat_s:.2f} s" if done.records else "-",
                f"{done.recording_s / done.cat_s:.1f}" if done.records else "-",
                f"{(done.recording_s + done.finishing_s) / done.cat_s:.1f}" if done.records else "-",
            ]
        )
    heads = ["stream", "bytes", "lost", "CPU recording", "CPU of cat", "times cat", "with finishing"]
    print_table(
        f"CPU, at {arguments.rate / 1e6:g} M records/s ({scaled(arguments.rate * RECORD_BYTES)}/s)", heads, rows
    )
    rows = [
        [
            f"{done.records / 1e6:,.0f} M records" if done.records else "none",
            f"{done.finish_s:.2f} s",
            f"{done.finishing_s:.2f} s",
            f"{done.spool / done.records:.2f}" if done.records else "-",
            f"{done.capture / done.records:.2f}" if done.records else "-",
            scaled(done.recording_peak),
            scaled(done.finishing_peak),
        ]
        for done in floods
    ]
    heads = ["stream", "finish takes", "CPU of that", "B/record spool", "capture", "peak recording", "finishing"]
    print_table("Finishing, sizes (bytes per record) and memory of all processes", heads, rows)
    print(f"\n  importing pyarrow and numpy and doing nothing: {scaled(imports())}")
    if long is not None:
        row = [
            f"{arguments.sustained:g} s",
            scaled(long.records * RECORD_BYTES),
            f"{long.records - long.recorded:,}",
            f"{100 * long.recording_s / arguments.sustained:.1f} %",
            *map(scaled, long.flat),
            f"{long.finish_s:.2f} s",
        ]
        heads = ["sustained", "bytes", "lost", "of one core", "memory early", "at the end", "finish takes"]
        print_table(f"{scaled(SUSTAINED)}/s", heads, [row])


def flood(folder: Path, device: str, records: int, rate: float) -> Flooded:
    """Records `records` records that come evenly at `rate`; without records, an empty recording of two seconds."""
    capture = folder / "flood.parquet"
    with Hardware(folder / "gpu", device, gts=1, zipf=ZIPF, saturated=0) as hardware, hardware.runtime() as runtime:
        runtime.kernel("flooded", 0x10_0000, [INSTRUCTION_BYTES * number for number in range(ADDRESSES)])
        cats = [cat(records * RECORD_BYTES) for _ in range(CATS)]
        with Recorder(hardware, capture, OPTIONS) as recorder:
            memory = Memory(recorder.process.pid)
            memory.start()
            began = time.monotonic()
            if records:
                hardware.flood(records, records / rate)
                runtime.sync()
            else:
                time.sleep(2)
            told = time.monotonic()
            starting = recorder.starting_cpu_s
            spent = recorder.cpu_s() - starting
            ended = recorder.stop()
            memory.stop()
        cats += [cat(records * RECORD_BYTES) for _ in range(CATS)]
        hardware.stop()
    header = CaptureReader(capture).header
    made = hardware.ledger().records_produced
    cost = header["cost"]
    return Flooded(
        records=made,
        recorded=header["totals"].get("stalls", 0),
        recording_s=spent,
        finishing_s=ended.cpu_s - starting - spent - cost["compile_cpu_s"],
        finish_s=ended.wall_s,
        cat_s=statistics.median(cats),
        recording_peak=memory.most(end=told),
        finishing_peak=memory.most(begin=told),
        flat=(memory.most(end=began + (told - began) / 4), memory.most(begin=told - (told - began) / 4, end=told)),
        spool=cost["spool_bytes"],
        capture=capture.stat().st_size,
    )


def cat(size: int) -> float:
    """CPU seconds of `cat` that moves `size` bytes from a pipe to /dev/null."""
    piece = memoryview(bytes(range(256)) * (PIECE // 256))
    started = time.monotonic()
    with Path("/dev/null").open("wb") as nowhere:
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=nowhere)
    assert process.stdin is not None
    with process.stdin:
        while size > 0:
            size -= process.stdin.write(piece[:size])
    return wait_for(process, started).cpu_s


if __name__ == "__main__":
    main()
