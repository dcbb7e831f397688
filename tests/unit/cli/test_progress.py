"""The status line: its numbers and its width."""

from __future__ import annotations

import dataclasses

from iaprof.cli.terminal.progress import describe
from iaprof.record.session import Status

STATUS = Status(
    seconds=12.4, records=600_000, launches=24_000, lost=0, losses=0, kernels=32, matched=31, bytes=1_100_000_000,
    cpu_s=0.2, paused=False,
)  # fmt: skip


def test_rates_are_since_the_last_status() -> None:
    before = dataclasses.replace(STATUS, seconds=11.9, records=0, launches=0, cpu_s=0.1935)
    line = describe(STATUS, before)
    assert line == "0:12  lost 0  1.2M records/s  48k launches/s  31/32 kernels  1.1 GB  cpu 1.3 %"


def test_the_first_line_and_one_with_everything() -> None:
    status = dataclasses.replace(STATUS, seconds=3725, paused=True, lost=1_234_567, losses=3)
    assert describe(status, None) == (
        "62:05 paused  lost 1.2M  161 records/s  6 launches/s  31/32 kernels  1.1 GB  cpu 0.0 %"
    )
    gap = dataclasses.replace(STATUS, losses=2)
    assert "lost something 2 times" in describe(gap, None)
    assert len(describe(gap, None)) < 100
