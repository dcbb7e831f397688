"""The `cpu_sample` rows of a capture."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import make_rows
from iaprof.formats.header.left_out import OTHER, RECORDER, TOTALS
from iaprof.record.left_out import Whose

_WHY = {Whose.RECORDER: RECORDER, Whose.OTHER: OTHER}
_LEFT_OUT = pa.array([_WHY.get(each) for each in Whose], pa.string())


def counts_left_out(whose: NDArray[np.uint8]) -> Counter[str]:
    """Returns the members of the header's `totals` that count samples left out; `whose`: uint8[n] of Whose."""
    numbers = ((TOTALS[why], int(np.count_nonzero(whose == each))) for each, why in _WHY.items())
    return Counter({name: number for name, number in numbers if number})


def cpu_sample_rows(
    samples: NDArray[np.void],
    stacks: NDArray[np.uint64],
    kernel_stacks: NDArray[np.uint64],
    whose: NDArray[np.uint8],
) -> pa.StructArray:
    """Rows of kind `cpu_sample`.

    Args:
        samples: CPU_SAMPLE[n].
        stacks: uint64[n], the ids of their stacks in the capture.
        kernel_stacks: uint64[n], likewise of their stacks in the Linux kernel.
        whose: uint8[n] of Whose.
    """
    columns = {
        "time_ns": samples["time"],
        **{name: samples[name] for name in ("pid", "tid", "cpu")},
        "stack": stacks,
        "kernel_stack": kernel_stacks,
    }
    arrays = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return make_rows("cpu_sample", {**arrays, "left_out": _LEFT_OUT.take(pa.array(whose))})
