"""How much CPU each stage of a time line needs, for a million slices of the AIU's runtime.

.venv/bin/python tests/bench/bench_timeline_clocks.py [--slices 1000000] [--overlap tid] [--all-overlap]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.made_traces import wrapping
from bench.measuring import machine, print_table
from iaprof.timelines import registry
from iaprof.timelines.options import Options, Overlap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=1_000_000)
    parser.add_argument("--overlap", type=Overlap, default=Overlap.TID, choices=list(Overlap))
    parser.add_argument("--all-overlap", action="store_true", help="each slice overlaps the one before in part")
    parser.add_argument("--all-options", action="store_true", help="run stages that options must ask for, too")
    arguments = parser.parse_args()
    print(machine())
    trace = wrapping(arguments.slices, all_overlap=arguments.all_overlap)
    options = Options(overlap=arguments.overlap)
    if arguments.all_options:
        options = Options(
            overlap=arguments.overlap, align_jobs=True, drop_globals=True, dilate_ranks=True, most_extra_tids=-1
        )
    rows, before = [], time.process_time()

    def after(_: int, stage: registry.Stage) -> None:
        nonlocal before
        used = time.process_time() - before
        rows.append([stage.name, f"{used:.3f} s"])
        before = time.process_time()

    begin = time.process_time()
    registry.run(trace, options, [True] * len(registry.STAGES), after)
    rows.append(["all", f"{time.process_time() - begin:.3f} s"])
    print_table(f"Stages, {arguments.slices:,} slices", ["stage", "CPU"], rows)
    for message in trace.messages.said:
        print(f"  {message.level.name} {message.stage} {message.text}")


if __name__ == "__main__":
    main()
