"""The rows of launches, transfers and waits of a capture, made of the records that the BPF programs sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.formats.capture.schema import make_rows
from iaprof.formats.header.waits import FUNCTIONS, UNKNOWN_FUNCTION, WaitFlags
from iaprof.formats.wire.launches import TRANSFER_FUNCTIONS as TRANSFERS, UNKNOWN_BYTES, LaunchFlags
from iaprof.record.kernels.kernel_names import KernelNames

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


def check_transfers(records: NDArray[np.void]) -> None:
    """Raises ValueError if LAUNCH[n] are not copies and fills by known functions."""
    if len(records) and not ((records["iba"] > 0) & (records["iba"] <= len(TRANSFERS))).all():
        raise ValueError("it has copies by an unknown function")


def transfer_rows(records: NDArray[np.void], stacks: NDArray[np.uint64]) -> pa.StructArray:
    """Makes `transfer` rows.

    Args:
        records: LAUNCH[n], checked.
        stacks: uint64[n], the ids of their stacks in the capture.
    """
    functions = pa.array(TRANSFERS, pa.string()).take(pa.array(records["iba"].astype(np.int64) - 1))
    columns = {
        "time_ns": records["time"],
        **{name: records[name] for name in ("pid", "tid", "cpu")},
        "comm": decoded_texts(records["comm"]),
        "stack": stacks,
        "function": functions,
        "bytes": pa.array(records["size"], mask=records["size"] == np.uint64(UNKNOWN_BYTES)),
        "flags": records["flags"] & np.uint32(~LaunchFlags.TRANSFER & 0xFFFFFFFF),
    }
    return make_rows("transfer", columns)


NAME_BYTES_PER_GROUP = 32 << 20  # whole names can be long


def launch_rows(launches: NDArray[np.void], names: KernelNames) -> Iterator[pa.StructArray]:
    """Makes `launch` rows, in groups that need little memory.

    Args:
        launches: LAUNCH[n].
        names: of the kernels of all modules of the recording.
    """
    if not len(launches):
        return
    launch_names = names.for_launches(launches)
    lengths = np.array([len(text.encode()) for text in launch_names.texts], np.int64)[launch_names.indices]
    group = np.cumsum(lengths) // NAME_BYTES_PER_GROUP
    bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(launches)]
    whole = pa.array(launch_names.texts, pa.string())
    for start, end in pairwise(bounds):
        group_launches = launches[start:end]
        own = "pid", "tid", "cpu", "iba", "address", "size", "stack", "flags", "list"
        columns = {
            "time_ns": group_launches["time"],
            "comm": decoded_texts(group_launches["comm"]),
            "name": whole.take(pa.array(launch_names.indices[start:end])),
            **{name: group_launches[name] for name in own},
        }
        yield make_rows("launch", columns)


def decoded_texts(names: NDArray[np.bytes_]) -> pa.Array:
    """Decodes fixed-size names; each distinct one once."""
    encoded = pa.array(names, pa.binary()).dictionary_encode()
    decoded = [
        bytes(name).split(b"\0", 1)[0].decode("utf-8", "backslashreplace") for name in encoded.dictionary.to_pylist()
    ]
    return pa.array(decoded, pa.string()).take(encoded.indices)
