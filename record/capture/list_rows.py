"""The `command_list` rows of a capture, made of the records of BPF programs: one row for each list of a call."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.schema import make_rows
from iaprof.formats.wire.launches import LISTS_A_RECORD, ListEvent
from iaprof.record.capture.launch_rows import decoded_texts

_EVENTS = pa.array([event.name.lower() for event in ListEvent], pa.string())


def check(records: NDArray[np.void]) -> None:
    """Raises ValueError if BPF cannot have sent these LIST_EVENT[n]."""
    if len(records) and (records["event"].max() >= len(ListEvent) or records["count"].max() > LISTS_A_RECORD):
        raise ValueError("it has unknown events of command lists")


def list_rows(records: NDArray[np.void], stacks: NDArray[np.uint64]) -> pa.StructArray:
    """Makes `command_list` rows.

    Args:
        records: LIST_EVENT[n], checked.
        stacks: uint64[n], the ids of their stacks in the capture.
    """
    record_numbers = np.repeat(np.arange(len(records)), records["count"])
    lists = records["lists"][np.arange(LISTS_A_RECORD) < records["count"][:, None]]
    events = records[record_numbers]
    columns = {
        "time_ns": events["time"],
        **{name: events[name] for name in ("pid", "tid", "cpu", "queue", "flags")},
        "comm": decoded_texts(events["comm"]),
        "event": _EVENTS.take(pa.array(events["event"])),
        "list": lists,
        "stack": stacks[record_numbers],
    }
    return make_rows("command_list", columns)
