"""How long the stages of a time line take that measure and classify, on a million made-up slices.

.venv/bin/python tests/bench/bench_timeline_tables.py [--slices 1000000] [--ranks 4]
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.made_traces import KERNELS, WORD, chains
from bench.measuring import print_table
from iaprof.timelines.options import CounterTrack, Options
from iaprof.timelines.registry import STAGES, Stage, run
from iaprof.timelines.trace import Trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    made = chains(arguments.slices, arguments.ranks)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        lines = "".join(f"k_{number % WORD}_{number}-opCatBmm_fp16 {100 * number}\n" for number in range(KERNELS))
        log.write_text(f"~~~~ Ideal/Total Cycles ~~~~\n{lines}====== Perf Summary End ======\n")
        options = {
            "without -R": Options(tracks=frozenset(CounterTrack), compiler_logs=(str(log),), power_statistics=True),
            "with -R, merged": Options(
                tracks=frozenset(CounterTrack), flows=True, collectives=True, merge_sends=True, keep_names=False
            ),
        }
        for name, asked in options.items():
            copied = chains(arguments.slices, arguments.ranks)
            begun = [time.process_time()]

            def after(
                _: int, stage: Stage, name: str = name, copied: Trace = copied, begun: list[float] = begun
            ) -> None:
                now = time.process_time()
                rows.append([name, stage.name, f"{now - begun[0]:.2f}", str(len(copied.slices))])
                begun[0] = time.process_time()

            run(copied, asked, [True] * len(STAGES), after)
            print(name, {key: table.num_rows for key, table in copied.tables.items()}, dict(copied.made))
            for message in copied.messages.said[:5]:
                print("   ", message.text)
    print_table("CPU seconds of stages", ["options", "stage", "CPU s", "slices after it"], rows)
    total = sum(float(row[2]) for row in rows if row[0] == "without -R")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{len(made.slices)} slices: {total:.1f} CPU s without -R; peak of all {peak:.0f} MiB")


if __name__ == "__main__":
    main()
