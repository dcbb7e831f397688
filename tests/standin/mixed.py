# SPDX-License-Identifier: Apache-2.0
"""A workload whose stalls are hard to join to launches: what attribution is measured with.

    with mixed.hardware(tmp_path / "gpu") as hardware:
        record(hardware, capture, "--", *mixed.command(seconds=4))

Three processes launch kernels of 10 us to 50 ms into a queue each, of which the GPU executes the launches one after the
other; the processes take turns of 1 ms. Each goes through phases (Mixed in workload.cpp): layers that launch one kernel
in order and then wait, two places of which one launches nine of ten, places that take turns, and pauses. Between phases
a module goes and another is compiled, at the same address or another.

Where modules lie, relative to where they would by themselves:

    process   -0x2000   +0          +0x2000     +0x4000     coming and going, either module
    0                   matmul      attention               -0x10000, -0x20000
    1         matmul    attention                           -0x10000, -0x20000
    2                               matmul      attention   +0, -0x10000

So there are kernels that no other process has an address of, others that overlap in part, and the same kernel at the
same address in two processes. All is drawn from a seed: runs are alike, but not equal, as the clock has a say.
"""

import os
import shlex
from pathlib import Path

from standin import runtime
from standin.hardware import Hardware

DEVICE = "bmg"
RATE = 20_000  # records per second of execution and XeCore; with fewer, more of the error is the noise of sampling
MODULES = ("matmul", "attention")
DELTAS = (0, -0x2000, 0x2000)  # of the processes' modules, from where STANDIN_ADDRESS_DELTA (ze.c) places them


def hardware(folder: Path, seed: int = 1) -> Hardware:
    """The GPU; its ledger tells what executed when, and each record whose it is."""
    return Hardware(folder, DEVICE, in_order=True, rate=RATE, seed=seed)


def command(seconds: float, seed: int = 1) -> list[str]:
    """The command line that runs the three processes."""
    elfs = [runtime.debug_elf(DEVICE, module) for module in MODULES]
    base = int(os.environ.get("STANDIN_ADDRESS_DELTA", "0"), 0)
    lines = []
    for process, delta in enumerate(DELTAS):
        words = runtime.command(elfs, "--mixed", len(DELTAS) * seed + process, "--seconds", seconds)
        lines.append(f"STANDIN_ADDRESS_DELTA={base + delta} {shlex.join(words)} &")
    return ["sh", "-c", " ".join([*lines, "wait"])]
