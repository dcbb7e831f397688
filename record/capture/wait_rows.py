"""The `wait` rows of a capture."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.capture.schema import make_rows
from iaprof.formats.header.waits import FUNCTIONS, UNKNOWN_FUNCTION, WaitFlags
from iaprof.record.capture.launch_rows import decoded_texts

_FLAGS = int(sum(WaitFlags))


def until_exits(waits: NDArray[np.void], processes: pa.Table) -> NDArray[np.void]:
    """Returns WAIT[n] in which waits that have not ended last until their thread's exit, if it has exited.

    Args:
        waits: WAIT[n]; it is not changed.
        processes: all `process` rows.
    """
    unended = np.flatnonzero(waits["flags"] & WaitFlags.NOT_ENDED)
    if not len(unended):
        return waits
    exits = processes.filter(pc.equal(processes["event"], "exit"))
    order = np.lexsort((exits["time_ns"].to_numpy(), exits["tid"].to_numpy()))
    times, tids = (exits[name].to_numpy()[order] for name in ("time_ns", "tid"))
    waits = waits.copy()
    for at in unended.tolist():
        first, last = np.searchsorted(tids, waits["tid"][at], "left"), np.searchsorted(tids, waits["tid"][at], "right")
        own = times[first:last]
        later = own[own >= waits["begin"][at]]
        if len(later) and later[0] < waits["end"][at]:
            waits["end"][at] = later[0]
            waits["waited"][at] = later[0] - waits["begin"][at]
    return waits


def wait_rows(waits: NDArray[np.void], stacks: NDArray[np.uint64]) -> pa.StructArray:
    """Rows of kind `wait`.

    Args:
        waits: WAIT[n].
        stacks: uint64[n], the ids of their stacks in the capture.
    """
    numbers, which = np.unique(waits["function"], return_inverse=True)
    functions = pa.array([FUNCTIONS.get(number, UNKNOWN_FUNCTION) for number in numbers.tolist()], pa.string())
    own = {"time_ns": "begin", "end_ns": "end", "waited_ns": "waited"}
    own |= {name: name for name in ("count", "pid", "tid", "handle")}
    columns = {
        **{name: np.ascontiguousarray(waits[member]) for name, member in own.items()},
        "comm": decoded_texts(waits["comm"]),
        "function": functions.take(pa.array(which)),
        "stack": stacks,
        "flags": waits["flags"] & np.uint32(_FLAGS),
    }
    return make_rows("wait", columns)
