"""Profiles made by hand, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from iaprof.formats.profile import Code, Gauges, Kernel, Launch, Profile
from iaprof.gpu.intel.reasons import REASONS


class Row(NamedTuple):
    """Stalls of one instruction, launched from one place, in one interval."""

    interval: int
    launch: Launch | None
    kernel: Kernel | None
    code: Code
    offset: int
    counts: Sequence[int]
    device: str = ""


def counts(**reasons: int) -> list[int]:
    """A count per reason; all others are 0."""
    return [reasons.get(reason, 0) for reason in REASONS]


def profile(
    rows: Sequence[Row], intervals: Sequence[float] = (0.0,), gauges: dict[int, Gauges] | None = None
) -> Profile:
    """A profile with these rows."""
    launches = list(dict.fromkeys(row.launch for row in rows))
    kernels = list(dict.fromkeys(row.kernel for row in rows))
    codes = list(dict.fromkeys(row.code for row in rows))
    devices = list(dict.fromkeys(row.device for row in rows))
    return Profile(
        launches,
        kernels,
        codes,
        np.array([row.interval for row in rows], np.int64),
        np.array([launches.index(row.launch) for row in rows], np.int64),
        np.array([kernels.index(row.kernel) for row in rows], np.int64),
        np.array([codes.index(row.code) for row in rows], np.int64),
        np.array([row.offset for row in rows], np.uint64),
        np.array([row.counts for row in rows], np.uint64).reshape(-1, len(REASONS)),
        np.array([devices.index(row.device) for row in rows], np.int64),
        REASONS,
        intervals,
        devices,
        gauges or {},
    )


def rows(found: Profile) -> list[Row]:
    """The rows of a profile."""
    columns = (found.interval, found.launch, found.kernel, found.code, found.offset, found.counts, found.device)
    return [
        Row(
            interval,
            found.launches[launch],
            found.kernels[kernel],
            found.codes[code],
            offset,
            tuple(each),
            found.devices[device],
        )
        for interval, launch, kernel, code, offset, each, device in zip(*(c.tolist() for c in columns), strict=True)
    ]
