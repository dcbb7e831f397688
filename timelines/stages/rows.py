"""The rows in which events are shown (their threads); removes names and events that would only fill them."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.distinct import groups
from iaprof.timelines.options import Options
from iaprof.timelines.trace import Marks, Slices, Trace

_FIRST_ROW, _ROW_STEP = 1000, 100
HOST_ROW = 1000
_IN_ROWS = "^[stfiIR]$"
"""Phases of marks that are in a row; asynchronous and metadata events are not."""
_ID = "_([0-9]+)[_ -]"
_GLOBAL = (
    "Execute graph", "SenFusedDeviceNode", "AIU Roundtrip", "Flex RoundTrip", "PostKeys", "FetchKeys", "Callback",
    "HostPrep", "AllocateFrame of", "Update CBs",
)  # fmt: skip


def remove_ids_from_name(trace: Trace, _: Options) -> None:
    """Moves the number of a request from names to `reqID`. In the name of a receive it stays: it is the sender."""
    slices, texts = trace.slices, trace.texts
    with_id = np.flatnonzero(texts.matches(slices.name, _ID) & ~texts.matches(slices.name, "Recv_"))
    if not len(with_id):
        return
    codes, places = np.unique(slices.name[with_id], return_inverse=True)
    found = [re.search(_ID, texts[code]) for code in codes]
    ids = texts.codes([match[1] if match else None for match in found])
    slices.extra["reqID"] = np.full(len(slices), -1, np.int32)
    slices.extra["reqID"][with_id] = ids[places]
    slices.name = slices.name.copy()
    slices.name[with_id] = texts.replaced(slices.name[with_id], _ID, " ")


def map_tid_to_range(trace: Trace, _: Options) -> None:
    """Numbers the threads of FLEX files 1000, 1100, ... in the order in which they appear."""
    slices = trace.slices
    rows = np.flatnonzero(~trace.is_torch(slices))
    rows = rows[np.argsort(slices.start[rows], kind="stable")]
    if not len(rows):
        return
    tids, first = np.unique(slices.tid[rows], return_index=True)
    numbers = np.empty(len(tids), np.int64)
    numbers[np.argsort(first)] = _FIRST_ROW + _ROW_STEP * np.arange(len(tids))
    tables: tuple[Slices | Marks, ...] = (slices, trace.flows, trace.instants)
    for table in tables:
        places = np.minimum(np.searchsorted(tids, table.tid), len(tids) - 1)
        known = (tids[places] == table.tid) & ~trace.is_torch(table)
        table.tid = np.where(known, numbers[places], table.tid)


def drop_global_events(trace: Trace, _: Options) -> None:
    """Drops slices and instants that span others and have no information."""
    pattern = "|".join(_GLOBAL)
    reason = "global events"
    trace.keep(~trace.texts.matches(trace.slices.name, pattern), reason)
    instants = ~trace.texts.matches(trace.instants.name, pattern)
    if count := int((~instants).sum()):
        trace.dropped[reason] += count
        trace.instants = trace.instants.take(instants)


def recombine_cpu_events(trace: Trace, _: Options) -> None:
    """Puts the host's slices of FLEX files into one row, except round trips of the device.

    Flows and instants are moved with them if their row has no slices of the device.
    """
    slices = trace.slices
    flex = ~trace.is_torch(slices)
    moved = flex & ~slices.has_counters & ~trace.texts.matches(slices.name, "AIU Roundtrip")
    host, other = _rows(slices, moved), _rows(slices, flex & ~moved)
    for table in (trace.flows, trace.instants):
        marks = np.flatnonzero(trace.texts.matches(table.phase, _IN_ROWS) & ~trace.is_torch(table))
        if not len(marks):
            continue
        pids, tids = (
            np.concatenate(each) for each in zip(host, other, (table.pid[marks], table.tid[marks]), strict=True)
        )
        row, first = groups(pids, tids)
        of_host, of_other, of_marks = np.split(row, np.cumsum([len(host[0]), len(other[0])]))
        only_host = np.zeros(len(first), bool)
        only_host[of_host] = True
        only_host[of_other] = False
        tid = table.tid.copy()
        tid[marks[only_host[of_marks]]] = HOST_ROW
        table.tid = tid
    slices.tid = np.where(moved, HOST_ROW, slices.tid)


def _rows(slices: Slices, mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the pids and tids of the distinct rows of some slices."""
    pids, tids = slices.pid[mask], slices.tid[mask]
    _, first = groups(pids, tids)
    return pids[first], tids[first]
