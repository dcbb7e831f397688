"""What importing traces costs: CPU seconds, time and memory, of the AIU's runtime and of PyTorch.

.venv/bin/python tests/bench/bench_traces.py [EVENTS]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import machine, print_table


def of_the_runtime(count: int) -> Iterator[dict[str, Any]]:
    """Operations with four device slices each, and a round trip."""
    chosen = random.Random(1)
    windows = (" DmaI", 0.0, 10), (" Cmpt Prep", 10.0, 20), (" Cmpt Exec", 30.0, 50), (" DmaO", 80.0, 5)
    for number in range(count // 5):
        ts, cycles = 1e9 + 100.25 * number, 1_000_000 + 100_000 * number
        counters = [(cycles + offset) & 0xFFFF_FFFF for offset in (0, 10_000, 30_000, 80_000, 85_000)]
        texts = {f"TS{n}": (hex if number % 2 else str)(value) for n, value in enumerate(counters, 1)}
        args = {**texts, "Power": hex(chosen.randrange(1 << 32))}
        for suffix, offset, dur in windows:
            name = f"mm_{chosen.randrange(400)}{suffix}"
            yield {"name": name, "ph": "X", "pid": 0, "tid": 71 + number % 4, "ts": round(ts + offset, 3),
                   "dur": round(dur + chosen.random(), 3), "args": args}  # fmt: skip
        yield {"name": "Flex RoundTrip", "ph": "X", "pid": 0, "tid": 9, "ts": ts, "dur": 99.5, "args": {}}


def of_pytorch(count: int) -> Iterator[dict[str, Any]]:
    """Operations, each with its launch, its kernel and a flow between them."""
    chosen = random.Random(1)
    host, device = {"pid": 4000, "tid": 4000}, {"pid": 0, "tid": 7}
    for number in range(count // 5):
        ts = 4824381735614.123 + 25.125 * number
        shapes = {"Input type": ["float", "float", ""], "Input Dims": [[chosen.randrange(64), 4096], [4096, 4096], []]}
        flow = {"id": number, "cat": "ac2g", "name": "ac2g"}
        kernel = {"External id": number, "device": 0, "stream": 7, "correlation": number, "grid": [52, 1, 1],
                  "block": [128, 1, 1], "blocks per SM": 0.481481, "registers per thread": 32}  # fmt: skip
        yield {"ph": "X", "cat": "cpu_op", "name": f"aten::op{chosen.randrange(100)}", **host, "ts": round(ts, 3),
               "dur": round(20 * chosen.random(), 3), "args": {"External id": number, **shapes}}  # fmt: skip
        yield {"ph": "X", "cat": "cuda_runtime", "name": "aiuLaunchSuperNode", **host, "ts": round(ts + 3, 3),
               "dur": 3.125, "args": {"External id": number, "cbid": 211, "correlation": number}}  # fmt: skip
        yield {"ph": "s", **flow, **host, "ts": round(ts + 3, 3)}
        yield {"ph": "X", "cat": "kernel", "name": f"kernel_{chosen.randrange(300)}<4, float>(int, float*)", **device,
               "ts": round(ts + 9, 3), "dur": round(5 * chosen.random(), 3), "args": kernel}  # fmt: skip
        yield {"ph": "f", "bp": "e", **flow, **device, "ts": round(ts + 9, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", nargs="?", type=int, default=1_000_000)
    events = parser.parse_args().events
    print(machine())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, made in (("AIU's runtime", of_the_runtime), ("PyTorch", of_pytorch)):
            path = Path(folder) / "trace.json"
            start = '{"deviceProperties": [], "traceEvents": [' if made is of_pytorch else "["
            with path.open("w") as file:
                for number, event in enumerate(made(events)):
                    file.write(f"{',' if number else start}\n{json.dumps(event)}")
                file.write("]}" if made is of_pytorch else "]")
            before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            command = [sys.executable, "-m", "iaprof", "import", str(path), "-fqo", f"{folder}/run.parquet"]
            subprocess.run(command, check=True)
            took, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            size = path.stat().st_size / 1e6
            rows.append([name, f"{size:,.0f} MB", f"{took:.2f} s", f"{cpu:.2f} s", f"{after.ru_maxrss / 1024:.0f} MiB"])
    print_table(f"Import of {events:,} events", ["of", "file", "time", "CPU", "largest process"], rows)


if __name__ == "__main__":
    main()
