# SPDX-License-Identifier: Apache-2.0
"""Stalls in the drivers' own kernels, which copy and fill: in dpnp's own tests, and in clpeak's test of transfers.

The stand-in's GPU stalls in each kernel that the driver says it dispatches, where the driver says that it lies:
dispatched.c asks it. What iaprof knows of drivers has no part in that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from programs.programs import LEVEL_ZERO_V1, LEVEL_ZERO_V2, OPENCL, Programs, Run
from programs.recording import Recording, ledger, record
from standin.hardware import Ledger

# Where there is a copy engine, adapter v2 and OpenCL have it copy if nobody forbids that: no kernel runs then.
ADAPTERS = {
    "level-zero-v1": LEVEL_ZERO_V1,
    "level-zero-v2": LEVEL_ZERO_V2 | {"UR_L0_V2_FORCE_DISABLE_COPY_OFFLOAD": "1"},
}
BY_KERNELS = {"EnableBlitterForEnqueueOperations": "0"}  # of OpenCL
LEVEL_ZERO_PRINTS, OPENCL_PRINTS = "PrintKernelDispatchParameters", "PrintTimestampPacketUsage"
FILES = ("test_copy.py", "test_fill.py", "test_ndarray.py", "test_arraymanipulation.py")
OWN = ("CopyBufferToBuffer", "FillBuffer")  # how names of the drivers' own kernels begin; of nobody else's here
LEAST = 4  # of them are dispatched where dpnp copies and fills
UNKNOWN = "[unknown kernel]"

Stalls = Counter[tuple[str, int]]
"""How many, by kernel and offset."""


def dpnp(programs: Programs, settings: Mapping[str, str]) -> Run:
    """Tests of dpnp that copy and fill."""
    return programs.python("with_dpnp_tests.py", settings, *(programs.dpnp_tests / name for name in FILES))


def seen(run: Run, setting: str, folder: Path) -> Run:
    """The same, with a GPU that is told what the driver dispatches: because of `setting` it prints a line for each."""
    files = {"PROGRAMS_DISPATCHED": str(folder / "dispatched"), "PROGRAMS_LEDGER": str(folder / "ledger")}
    return run.with_settings(**files, **{setting: "1"})


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


def own(stalls: Stalls) -> Stalls:
    """Those of the drivers' own kernels."""
    return Counter({(kernel, offset): count for (kernel, offset), count in stalls.items() if kernel.startswith(OWN)})


def unknown(stalls: Stalls) -> int:
    """How many are at no known kernel."""
    return sum(count for (kernel, _), count in stalls.items() if kernel == UNKNOWN)


def assert_known(recording: Recording, folder: Path) -> None:
    """Each stall of the driver's own kernels is at its instruction, and none at no kernel."""
    stalls, reports = produced(folder), reported(recording)
    assert own(reports) == own(stalls)
    assert unknown(reports) == 0
    assert reports.total() == stalls.total()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_copies_and_fills_of_level_zero(programs: Programs, adapter: str, tmp_path: Path) -> None:
    run = seen(dpnp(programs, ADAPTERS[adapter]), LEVEL_ZERO_PRINTS, tmp_path)

    recording = record(programs, run, tmp_path)

    # what the driver said that it dispatched is what was recorded, its own kernels included
    assert recording.code == 0, recording.said
    dispatched = ledger(tmp_path / "dispatched")
    assert recording.all_recorded_names == dispatched
    assert len([name for name in dispatched if name.startswith(OWN)]) >= LEAST
    # and each of its own is at a call that copies or fills (OpenCL's are also at calls that map memory)
    transfers = {row["stack"] for row in recording.table("transfer")}
    assert {row["stack"] for row in recording.all_recorded if row["name"].startswith(OWN)} <= transfers
    assert_known(recording, tmp_path)


@pytest.mark.parametrize("name", ["clpeak", "dpnp"])
def test_copies_and_fills_of_opencl(programs: Programs, name: str, tmp_path: Path) -> None:
    run = (
        dpnp(programs, OPENCL) if name == "dpnp" else programs.program("clpeak", "--transfer-bandwidth", "--iters", "1")
    )

    recording = record(programs, seen(run, OPENCL_PRINTS, tmp_path).with_settings(**BY_KERNELS), tmp_path)

    # of the kernels that the driver dispatched, those that were looked for are recorded
    assert recording.code == 0, recording.said
    dispatched = ledger(tmp_path / "dispatched")
    assert dispatched <= recording.all_recorded_names
    assert len(dispatched) >= (LEAST if name == "dpnp" else 1)
    assert all(name.startswith(OWN) for name in dispatched)
    assert_known(recording, tmp_path)
