"""The `launch` rows of a capture, made of the records that the BPF programs sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import make_rows
from iaprof.record.kernels.kernel_names import KernelNames

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
