"""Flows in Perfetto's format: ids in the begins or ends of the slices that they connect."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import BinaryArray as Bytes

from iaprof.formats.perfetto import columns
from iaprof.formats.perfetto.packets import event_field
from iaprof.report.timeline.grouped import groups
from iaprof.report.timeline.outputs.perfetto_tracks import Tracks
from iaprof.report.timeline.trace import ABSENT, MADE, Slices, Trace

_NONE = -1


@dataclass(frozen=True)
class Flows:
    """Where the flows of a trace go."""

    is_free: NDArray[np.bool_]  # [flows], those without a slice
    _fields: Bytes  # [flows], each flow as a field of an event
    _keys: NDArray[np.int64]  # [m], twice a slice's row, plus 1 for its end; ascending
    _lists: Bytes  # [m], the fields of its flows

    def fields(self, slices: NDArray[np.int64], at_end: bool) -> Bytes:
        """Returns the flows of slices; null for those without."""
        wanted = 2 * slices + at_end
        place = np.searchsorted(self._keys, wanted)
        inside = np.minimum(place, max(len(self._keys) - 1, 0))
        absent = np.ones(len(slices), bool) if not len(self._keys) else self._keys[inside] != wanted
        return self._lists.take(pa.array(inside, mask=absent))

    def free_fields(self, rows: NDArray[np.int64]) -> Bytes:
        """Returns flows that are events of their own."""
        return self._fields.take(pa.array(rows))


def attached(trace: Trace, slices: Slices, where: Tracks) -> Flows:
    """Finds the slice of each flow.

    Args:
        trace: the trace.
        slices: its slices, with durations of whole ns, none of which overlap in part within a track.
        where: tracks of all events.
    """
    flows = trace.flows
    count = len(flows)
    ids = _ids(trace)
    is_last = trace.texts.matches(flows.phase, "^f$")
    fields = pc.if_else(
        pa.array(is_last),
        columns.fixed(event_field("terminating_flow_ids"), ids),
        columns.fixed(event_field("flow_ids"), ids),
    )
    slice_ = _enclosing(slices, where.slices, flows.time, where.flows, ends_first=True)
    other = np.flatnonzero(slice_ == _NONE)
    slice_[other] = _enclosing(slices, where.slices, flows.time[other], where.flows[other], ends_first=False)
    is_free = slice_ == _NONE
    bound = np.flatnonzero(~is_free)
    start = slices.start[slice_[bound]]
    half = slices.duration[slice_[bound]] / 2
    keys = 2 * slice_[bound] + (flows.time[bound] - start > half)
    order = np.lexsort((flows.time[bound], keys))
    distinct, counts = np.unique(keys, return_counts=True)
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    ordered = fields.take(pa.array(bound[order]))
    lists = pa.ListArray.from_arrays(pa.array(offsets), ordered)
    joined = pc.binary_join(lists, pa.scalar(b"", pa.binary())) if count else pa.array([], pa.binary())
    return Flows(is_free, fields, distinct, joined if len(distinct) else pa.array([b""], pa.binary()))


def _ids(trace: Trace) -> NDArray[np.uint64]:
    """Returns ids that are unique in the whole trace: Chrome's format tells flows by their categories, too.

    A flow keeps its id if no other one has it. Flows of different files are different ones, unless a stage made them.
    """
    flows = trace.flows
    file = np.where(flows.row == MADE, -1, flows.file).astype(np.int64)
    given = np.where(flows.id == ABSENT, 0, flows.id)
    number, first = groups(file, flows.category.astype(np.int64), given)
    ids = given[first].view(np.uint64)
    _, once = np.unique(ids, return_index=True)
    again = np.ones(len(ids), bool)
    again[once] = False
    free = np.uint64(1) + ids.max(initial=np.uint64(0))
    if free < np.uint64(1 << 63):
        ids[again] = free + np.arange(int(again.sum()), dtype=np.uint64)
    else:  # no room above: count all anew
        ids = np.arange(1, len(ids) + 1, dtype=np.uint64)
    return np.asarray(ids[number], np.uint64)


def _enclosing(
    slices: Slices, tracks: NDArray[np.int64], times: NDArray[np.int64], marked: NDArray[np.int64], ends_first: bool
) -> NDArray[np.int64]:
    """Returns the innermost slice of the same track at some times; _NONE where there is none.

    Args:
        slices: n of them, nested within each track.
        tracks: int64[n].
        times: int64[m].
        marked: int64[m], tracks of the times.
        ends_first: whether a slice that ends at a time is over.
    """
    marks = len(times)
    found = np.full(marks, _NONE, np.int64)
    used = np.flatnonzero(np.isin(tracks, marked) & (slices.duration > 0))
    if not marks or not len(used):
        return found
    start = slices.start[used]
    length = slices.duration[used].astype(np.int64)
    n = len(used)
    time = np.concatenate([start, start + length, times])
    track = np.concatenate([tracks[used], tracks[used], marked])
    # At one instant: ends (the shortest first), begins (the longest first), marks; or marks before the ends.
    kind = np.repeat(np.array([1, 0, 2 if ends_first else -1], np.int8), [n, n, marks])
    size = np.concatenate([-length, length, np.zeros(marks, np.int64)])
    order = np.lexsort((size, kind, time, track))
    del kind, size, time, start, length  # millions of each
    step = np.where(order < n, np.int8(1), np.where(order < 2 * n, np.int8(-1), np.int8(0)))
    depth = np.cumsum(step, dtype=np.int32)  # each track ends as it begins, at 0
    level = np.where(order < 2 * n, depth + (step < 0), depth)
    # The latest begin of a level is the slice that is open there.
    by_level = np.lexsort((np.arange(len(order)), level, track[order]))
    is_begin = step[by_level] > 0
    latest = np.maximum.accumulate(np.where(is_begin, np.arange(len(order)), 0))
    is_mark = order[by_level] >= 2 * n
    at = order[by_level[latest]]
    inside = is_mark & (level[by_level] > 0)
    found[order[by_level[inside]] - 2 * n] = used[at[inside]]
    return found
