"""The `transfer` rows of a capture, made of the records that BPF programs sent of copies and fills."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import make_rows
from iaprof.formats.header.transfers import FUNCTIONS, UNKNOWN_BYTES
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.record.capture.launch_rows import decoded_texts


def check(records: NDArray[np.void]) -> None:
    """Raises ValueError if LAUNCH[n] are not copies and fills by known functions."""
    if len(records) and not ((records["iba"] > 0) & (records["iba"] <= len(FUNCTIONS))).all():
        raise ValueError("it has copies by an unknown function")


def transfer_rows(records: NDArray[np.void], stacks: NDArray[np.uint64]) -> pa.StructArray:
    """Makes `transfer` rows.

    Args:
        records: LAUNCH[n], checked.
        stacks: uint64[n], the ids of their stacks in the capture.
    """
    functions = pa.array(FUNCTIONS, pa.string()).take(pa.array(records["iba"].astype(np.int64) - 1))
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
