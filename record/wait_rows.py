"""Waits for the GPU as rows of a capture."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture import KINDS
from iaprof.formats.waits import FUNCTIONS, UNKNOWN_FUNCTION, WaitFlags
from iaprof.record.launch_rows import decoded_texts

_FLAGS = int(sum(WaitFlags))


def wait_rows(waits: NDArray[np.void], stacks: NDArray[np.uint64]) -> pa.StructArray:
    """Rows of kind `wait`.

    Args:
        waits: WAIT[n].
        stacks: uint64[n], the ids in the capture of their stacks.
    """
    numbers, which = np.unique(waits["function"], return_inverse=True)
    functions = pa.array([FUNCTIONS.get(number, UNKNOWN_FUNCTION) for number in numbers.tolist()], pa.string())
    columns = [
        *(pa.array(np.ascontiguousarray(waits[name])) for name in ("begin", "end", "waited", "count", "pid", "tid")),
        decoded_texts(waits["comm"]),
        functions.take(pa.array(which)),
        pa.array(np.ascontiguousarray(waits["handle"])),
        pa.array(stacks),
        pa.array(waits["flags"] & np.uint32(_FLAGS)),
    ]
    return pa.StructArray.from_arrays(columns, fields=list(KINDS["wait"]))
