# SPDX-License-Identifier: Apache-2.0
"""Stalls in the drivers' own kernels, which copy and fill: dpnp's own tests, and clpeak's test of transfers.

The stand-in's GPU stalls in each kernel that the driver says it dispatches, where the driver says that it lies:
dispatched.c asks it. What iaprof knows of drivers has no part in that.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from iaprof.formats.unrecorded_copies import CLAUSE
from programs.programs import LEVEL_ZERO_V1, LEVEL_ZERO_V2, Programs, Run
from programs.recording import Recording, ledger, record
from standin.hardware import Ledger

# Adapter v2 has the copy engine copy, where there is one, if nobody forbids it: no kernel runs then.
ADAPTERS = {
    "level-zero-v1": LEVEL_ZERO_V1,
    "level-zero-v2": LEVEL_ZERO_V2 | {"UR_L0_V2_FORCE_DISABLE_COPY_OFFLOAD": "1"},
}
FILES = ("test_copy.py", "test_fill.py", "test_ndarray.py", "test_arraymanipulation.py")
OWN = {f"CopyBufferToBuffer{part}Region" for part in ("Middle", "Side")} | {
    f"FillBufferImmediate{part}" for part in ("", "LeftOver")
}
OWN_OF_OPENCL = {"CopyBufferToBufferMiddle"}  # clpeak's buffers are aligned: nothing is left over
UNKNOWN = "[unknown kernel]"

Stalls = Counter[tuple[str, int]]
"""How many, by kernel and offset."""


def copies(programs: Programs, adapter: str, folder: Path) -> Run:
    """Tests of dpnp that copy and fill."""
    run = programs.python("with_dpnp_tests.py", ADAPTERS[adapter], *(programs.dpnp_tests / name for name in FILES))
    return run.with_settings(PrintKernelDispatchParameters="1", PROGRAMS_DISPATCHED=str(folder / "dispatched"))


def transfers(programs: Programs, folder: Path) -> Run:
    """clpeak, which measures how fast buffers are written and read: without a copy engine, as that runs no kernel."""
    return programs.program("clpeak", "--transfer-bandwidth", "--iters", "1").with_settings(
        PrintTimestampPacketUsage="1",
        EnableBlitterForEnqueueOperations="0",
        PROGRAMS_DISPATCHED=str(folder / "dispatched"),
    )


def produced(folder: Path) -> Stalls:
    """The GPU's stalls that a recorder got."""
    stalls: Stalls = Counter()
    for row in Ledger.read(folder / "gpu" / "ledger.tsv").rows:
        if row.captured:
            stalls[row.kernel, row.offset] += row.captured
    return stalls


def reported(recording: Recording) -> Stalls:
    """The same as a report has them, which knows the launch of each whose kernel it knows."""
    stalls: Stalls = Counter()
    report = recording.told("report", "--frames=cpu,function,offset")
    assert "[launched before recording]" not in report
    assert "[launch not recorded]" not in report
    for line in report.splitlines():
        frames, count = line.rsplit(" ", 1)
        *_, kernel, offset = (frame.removesuffix("_[g]").removesuffix("_[G]") for frame in frames.split(";"))
        stalls[kernel, int(offset, 16)] += int(count)
    return stalls


def of(names: set[str], stalls: Stalls) -> Stalls:
    """Those of some kernels."""
    return Counter({place: count for place, count in stalls.items() if place[0] in names})


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_copies_and_fills_of_dpnp(programs: Programs, adapter: str, tmp_path: Path) -> None:
    recording = record(programs, copies(programs, adapter, tmp_path), tmp_path)

    # what the driver said that it dispatched is what was recorded, its own kernels included
    assert recording.code == 0, recording.said
    dispatched = ledger(tmp_path / "dispatched")
    assert set(dispatched) > OWN
    assert recording.recorded_names == dispatched
    # and each is at the call that copies or fills
    transfers = {row["stack"] for row in recording.table("transfer")}
    assert {row["stack"] for row in recording.recorded if row["name"] in OWN} <= transfers
    # and each stall is at its instruction
    stalls, reports = produced(tmp_path), reported(recording)
    assert {kernel for kernel, _ in stalls} > OWN
    assert of({UNKNOWN}, reports) == Counter()
    assert of(OWN, reports) == of(OWN, stalls)
    assert reports.total() == stalls.total()


def test_transfers_of_clpeak(programs: Programs, tmp_path: Path) -> None:
    """Copies of OpenCL are not recorded, so stalls of the kernels that do them are at no kernel, which is said."""
    recording = record(programs, transfers(programs, tmp_path), tmp_path)

    assert recording.code == 0, recording.said
    assert set(ledger(tmp_path / "dispatched")) == OWN_OF_OPENCL
    assert recording.recorded == []
    stalls, reports = produced(tmp_path), reported(recording)
    assert {kernel for kernel, _ in stalls} == OWN_OF_OPENCL
    assert {kernel for kernel, _ in reports} == {UNKNOWN}
    assert reports.total() == stalls.total()
    assert CLAUSE in " ".join(recording.told("info").split())
