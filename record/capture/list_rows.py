"""The `command_list` rows of a capture, made of the records that the BPF programs sent: one for each list of a call."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.wire.launches import LISTS_A_RECORD, ListEvent
from iaprof.record.capture.launch_rows import decoded_texts

_EVENTS = pa.array([event.name.lower() for event in ListEvent], pa.string())


def check(records: NDArray[np.void]) -> None:
    """ValueError where records, LIST_EVENT[n], are none that BPF can have sent."""
    if len(records) and (records["event"].max() >= len(ListEvent) or records["count"].max() > LISTS_A_RECORD):
        raise ValueError("what happened to command lists is none of what can")


def list_rows(records: NDArray[np.void], stacks: NDArray[np.uint64]) -> pa.StructArray:
    """Rows for records.

    Args:
        records: LIST_EVENT[n], checked.
        stacks: uint64[n], the ids that their stacks have in the capture.
    """
    of = np.repeat(np.arange(len(records)), records["count"])
    lists = records["lists"][np.arange(LISTS_A_RECORD) < records["count"][:, None]]
    some = records[of]
    columns = [
        *(pa.array(some[name]) for name in ("time", "pid", "tid", "cpu")),
        decoded_texts(some["comm"]),
        _EVENTS.take(pa.array(some["event"])),
        pa.array(lists),
        pa.array(some["queue"]),
        pa.array(stacks[of]),
        pa.array(some["flags"]),
    ]
    return pa.StructArray.from_arrays(columns, fields=list(KINDS["command_list"]))
