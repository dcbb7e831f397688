"""The `cpu_sample` rows of a capture."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS


def cpu_sample_rows(
    samples: NDArray[np.void], stacks: NDArray[np.uint64], kernel_stacks: NDArray[np.uint64]
) -> pa.StructArray:
    """Rows of kind `cpu_sample`.

    Args:
        samples: CPU_SAMPLE[n].
        stacks: uint64[n], the ids of their stacks in the capture.
        kernel_stacks: uint64[n], likewise of their stacks in the Linux kernel.
    """
    columns = [*(samples[name] for name in ("time", "pid", "tid", "cpu")), stacks, kernel_stacks]
    arrays = [pa.array(np.ascontiguousarray(column)) for column in columns]
    return pa.StructArray.from_arrays(arrays, fields=list(KINDS["cpu_sample"]))
