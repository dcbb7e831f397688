"""Damaged debug ELFs through the reader of GPU modules, for a while: it answers each time, and in time.

    .venv/bin/python tests/soak/soak_decoder.py [SECONDS] [--seed N] [--case N]

`--case` repeats a single one. Prints how it went, every failure as it comes, and ends with 1 when there was one. That
the child process died, or ran out of its time or memory, is not a failure: that is what it is for.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import machine, print_table
from iaprof.gpu.intel.instruction_set import Platform
from iaprof.report.gpu.module import GpuModule, GpuModuleLoader
from soak.mutation import chance, mutate
from standin.runtime import debug_elf

PLATFORMS = {"bmg": Platform.XE2, "lnl": Platform.XE2, "pvc": Platform.XE_HPC, "ptl": Platform.XE3}
LONGEST_S = 45.0  # a stage's limit is 40 s: more than one that runs into it is not expected of one file
SLOW_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, nargs="?", default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int)
    arguments = parser.parse_args()
    print(machine())
    whole = {
        (device, module): debug_elf(device, module).read_bytes()
        for device in PLATFORMS
        for module in ("attention", "matmul")
    }
    kinds: collections.Counter[str] = collections.Counter()
    failures = cases = 0
    slowest = (0.0, 0)
    end = time.monotonic() + arguments.seconds
    case = arguments.case or 0
    with GpuModuleLoader() as modules:
        while time.monotonic() < end:
            rng = chance(arguments.seed, case)
            device, module = rng.choice(sorted(whole))
            elf = mutate(whole[device, module], rng, list(whole.values()))
            began = time.monotonic()
            try:
                read = modules.load(elf, rng.choice((PLATFORMS[device], *PLATFORMS.values(), None)))
                use(read)
            except Exception:  # noqa: BLE001 - whatever comes is what is looked for
                failures += 1
                print(f"--seed {arguments.seed} --case {case}:\n{traceback.format_exc()}", flush=True)
            else:
                kinds.update({kind(problem) for problem in read.problems} or {"read without a problem"})
            took = time.monotonic() - began
            slowest = max(slowest, (took, case))
            if took > SLOW_S:
                print(f"--seed {arguments.seed} --case {case}: {took:.1f} s for {len(elf):,} bytes", flush=True)
            failures += took > LONGEST_S
            cases += 1
            case += 1
            if arguments.case is not None:
                print("\n".join(read.problems))
                break
    rows = [[kind_, f"{count:,}"] for kind_, count in kinds.most_common(12)]
    print_table(f"{cases:,} damaged ELFs, seed {arguments.seed}", ["what was said of them", "ELFs"], rows)
    print(f"\n  slowest: {slowest[0]:.2f} s (case {slowest[1]}); failures: {failures}")
    return 1 if failures else 0


def use(module: GpuModule) -> None:
    """Looks at everything that a report looks at."""
    for kernel in module.kernels:
        if not kernel.frames_at(0):
            raise AssertionError("no frame")
        for instruction in kernel.instructions:
            if kernel.at(instruction.offset) is not instruction or not instruction.frames:
                raise AssertionError(f"instruction at {instruction.offset}")
        for offset in (-8, 0, 1, kernel.size, kernel.code_size, 1 << 40):
            kernel.at(offset)


def kind(problem: str) -> str:
    """The problem without its numbers and names."""
    return re.sub(r"0x[0-9a-f]+|\d+|'.*?'", "#", problem)[:90]


if __name__ == "__main__":
    sys.exit(main())
