"""The `launch` rows of a capture, made of the records that the BPF programs sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS
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
    found = names.for_launches(launches)
    lengths = np.array([len(text.encode()) for text in found.texts], np.int64)[found.indices]
    group = np.cumsum(lengths) // NAME_BYTES_PER_GROUP
    bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(launches)]
    whole = pa.array(found.texts, pa.string())
    for start, end in pairwise(bounds):
        some = launches[start:end]
        columns = [
            pa.array(some["time"]),
            pa.array(some["pid"]),
            pa.array(some["tid"]),
            pa.array(some["cpu"]),
            decoded_texts(some["comm"]),
            pa.array(some["iba"]),
            pa.array(some["address"]),
            pa.array(some["size"]),
            pa.array(some["stack"]),
            whole.take(pa.array(found.indices[start:end])),
            pa.array(some["flags"]),
            pa.array(some["list"]),
        ]
        yield pa.StructArray.from_arrays(columns, fields=list(KINDS["launch"]))


def decoded_texts(names: NDArray[np.bytes_]) -> pa.Array:
    """Decodes fixed-size names; each distinct one once."""
    encoded = pa.array(names, pa.binary()).dictionary_encode()
    decoded = [bytes(n).split(b"\0", 1)[0].decode("utf-8", "backslashreplace") for n in encoded.dictionary.to_pylist()]
    return pa.array(decoded, pa.string()).take(encoded.indices)
