"""Labels of slices in reports: their rank, their side (device or host), and names that several runs share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.dialects import Kind, find
from iaprof.timelines.stages.summaries import NUMBER, PLACEHOLDER
from iaprof.timelines.trace import NO_TEXT, Dialect, Trace


def ranks(trace: Trace) -> NDArray[np.int64]:
    """Returns the rank of each slice: in FLEX files the process, in TORCH files the rank in the file."""
    if "rank" in trace.slices.extra:
        return np.asarray(trace.slices.extra["rank"], np.int64)
    of_files = np.array([file.rank for file in trace.files] or [0], np.int64)
    is_flex = np.array([file.dialect is Dialect.FLEX for file in trace.files] or [True])
    return np.asarray(np.where(is_flex[trace.slices.file], trace.slices.pid, of_files[trace.slices.file]), np.int64)


def on_devices(trace: Trace) -> NDArray[np.bool_]:
    """Tells which slices are a device's; all others are a host's."""
    return find(trace, Kind.DEVICE)


def names(trace: Trace) -> NDArray[np.int32]:
    """Returns the codes of slices' names as in the table `summary`: with a placeholder for numbers."""
    slices = trace.slices
    whole = slices.extra.get("orig_name", np.full(len(slices), NO_TEXT, np.int32))
    return trace.texts.replaced(np.where(whole != NO_TEXT, whole, slices.name), NUMBER, PLACEHOLDER)
