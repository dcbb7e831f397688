"""A run of PyTorch, seen twice: as its profiler's trace, and as a capture of stalls, with clocks that differ.

The operators and their times are those of a real trace. It was recorded without a GPU, so launches are added in the
form in which Kineto writes them: a call of the runtime, and a kernel with the same correlation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unit.capturing import capture, launch, record, stall

DATA = Path(__file__).parent / "data"
TRACE: dict[str, Any] = json.loads((DATA / "cpu.pt.trace.json").read_text())
CLOCKS: dict[str, int] = json.loads((DATA / "monotonic_wall.json").read_text())
PID = 27091
BASE_NS = int(TRACE["baseTimeNanoseconds"])
WALL_NS = CLOCKS["realtime_ns"] - CLOCKS["monotonic_ns"]
"""What the wall clock was ahead of CLOCK_MONOTONIC."""
ADDMM, RELU, MM = "gemm_kernel", "_ZN2at13relu_functionEv", "at::mm_kernel(float)"
LAUNCHED = (
    (4568708871060.0, ADDMM),
    (4568708871150.0, RELU),
    (4568708871186.0, ADDMM),
    (4568708871470.0, MM),
    (4568708871489.0, MM),
)
"""When, in us of the trace, and which kernel: in addmm, clamp_min, addmm, and twice in mm of AddmmBackward0."""
DEMANGLED = {RELU: "at::relu_function()"}
ADDRESSES = {ADDMM: 0x10000, RELU: 0x20000, MM: 0x30000}


def monotonic_ns(trace_us: float) -> int:
    """What CLOCK_MONOTONIC showed at a time of the trace."""
    return BASE_NS + round(trace_us * 1000) - WALL_NS


def calls(launched: Any = LAUNCHED, pid: int = PID, first: int = 1) -> list[dict[str, Any]]:
    """Launches as Kineto writes them: each call takes 2 us, the launch is in its middle."""
    events = []
    for number, (time, kernel) in enumerate(launched, first):
        call = {"ph": "X", "cat": "xpu_runtime", "name": "urEnqueueKernelLaunch", "pid": pid, "tid": pid,
                "ts": time - 1, "dur": 2.0, "args": {"correlation": number}}  # fmt: skip
        run = {"ph": "X", "cat": "kernel", "name": DEMANGLED.get(kernel, kernel), "pid": 0, "tid": 7, "ts": time + 20,
               "dur": 5.0, "args": {"correlation": number, "device": 0}}  # fmt: skip
        events += [call, run]
    return events


def trace(path: Path, more: Any = (), **members: Any) -> Path:
    """Writes the trace with more events; members that are None are left out."""
    whole = {**TRACE, **members, "traceEvents": [*TRACE["traceEvents"], *more]}
    path.write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))
    return path


def header(**more: Any) -> dict[str, Any]:
    """The header of a capture that began 10 s before the trace and lasted 20 s."""
    begin = monotonic_ns(LAUNCHED[0][0]) - 10_000_000_000
    return {
        "clock": {"monotonic_ns": begin, "realtime_ns": begin + WALL_NS},
        "clock_end": {"monotonic_ns": begin + 20_000_000_000, "realtime_ns": begin + 20_000_000_000 + WALL_NS},
        "end_ns": begin + 20_000_000_000,
        "streams": [{"layout": "xe2", "ip_version": [20, 1, 0]}],
        "totals": {"stalls": 5},
        "losses": [],
        **more,
    }  # fmt: skip


def recorded(
    path: Path, launched: Any = LAUNCHED, pid: int = PID, processes: Sequence[tuple[int, int | None]] = (), **more: Any
) -> Path:
    """Writes the capture: each launch has a read of its own 1 us later, with as many samples as its number, from 1.

    `processes` have a pid, and one in their own namespace.
    """
    launches, stalls = [], []
    for number, (time, kernel) in enumerate(launched, 1):
        at = monotonic_ns(time)
        launches.append(launch(at, pid, ADDRESSES[kernel], stack=0, name=kernel))
        stalls.append(stall(at + 1000, record(ADDRESSES[kernel] + 8, sbid=number), begin_ns=at - 500))
    described = [
        {"time_ns": monotonic_ns(LAUNCHED[0][0]), "pid": own, "tid": own, "event": "described", "ns_pid": inner}
        for own, inner in processes
    ]
    kinds = {"process": described} if described else {}
    return capture(path, header(**more), launch=launches, stall=stalls, **kinds)
