"""Flows in Perfetto's format: ids in the begins or ends of the slices that they connect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import BinaryArray as Bytes

from iaprof.formats.distinct import distinct_values
from iaprof.formats.perfetto import packets
from iaprof.timelines.arrows import unique_ids
from iaprof.timelines.grouped import by_time
from iaprof.timelines.outputs.perfetto_tracks import Tracks
from iaprof.timelines.trace import ABSENT, Slices, Trace

_NONE = -1
_AT_ONCE = 1 << 19  # slices
_LAST = (1 << 63) - 1


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
    unique = unique_ids(flows)
    ids = np.where(unique == ABSENT, 0, unique)
    is_last = trace.texts.matches(flows.phase, "^f$")
    fields = packets.flows(ids, is_last)
    slice_ = _enclosing(slices, where.slices, flows.time, where.flows, ends_first=True)
    other = np.flatnonzero(slice_ == _NONE)
    slice_[other] = _enclosing(slices, where.slices, flows.time[other], where.flows[other], ends_first=False)
    is_free = slice_ == _NONE
    bound = np.flatnonzero(~is_free)
    start = slices.start[slice_[bound]]
    half = slices.duration[slice_[bound]] / 2
    keys = 2 * slice_[bound] + (flows.time[bound] - start > half)
    order = np.lexsort((flows.time[bound], keys))
    keys = keys[order]
    firsts = np.flatnonzero(np.diff(keys, prepend=_NONE))
    joined = packets.flows_together(fields.take(pa.array(bound[order])), np.append(firsts, len(keys)))
    return Flows(is_free, fields, keys[firsts], joined if len(firsts) else pa.array([b""], pa.binary()))


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
    found = np.full(len(times), _NONE, np.int64)
    used = np.flatnonzero(np.isin(tracks, marked) & (slices.duration > 0))
    if not len(times) or not len(used):
        return found
    start, length = slices.start, slices.duration
    used = used[np.lexsort((start[used], tracks[used]))]
    asked = np.lexsort((times, marked))
    for those, these in _apart(start, length, tracks, used, times, marked, asked):
        begin, long = start[those], length[those].astype(np.int64)
        inner = _innermost(begin, long, tracks[those], times[these], marked[these], ends_first)
        found[these] = np.where(inner == _NONE, _NONE, those[inner])
    return found


def _apart(
    start: NDArray[np.int64],
    length: NDArray[np.float64],
    tracks: NDArray[np.int64],
    used: NDArray[np.int64],
    times: NDArray[np.int64],
    marked: NDArray[np.int64],
    asked: NDArray[np.int64],
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yields slices and marks of which none is around one of another part: all at once need much memory.

    Args:
        start: int64[n] of slices.
        length: float64[n].
        tracks: int64[n].
        used: slices, by track and start.
        times: int64[m] of marks.
        marked: int64[m], their tracks.
        asked: marks, by track and time.
    """
    track, of_marks = tracks[used], marked[asked]
    begin = 0
    while begin < len(used):
        end = min(begin + _AT_ONCE, len(used))
        if end < len(used) and track[end] == track[end - 1]:
            if track[begin] != track[end]:  # whole tracks
                end = int(np.searchsorted(track, track[end]))
            else:
                last = int(np.searchsorted(track, track[end], "right"))
                mine = used[begin:last]
                until = np.maximum.accumulate(start[mine] + length[mine].astype(np.int64))
                free = np.flatnonzero(start[mine][_AT_ONCE:] > until[_AT_ONCE - 1 : -1])
                end = end + int(free[0]) if len(free) else last
        low = _place(times, of_marks, asked, start[used[begin]], track[begin]) if begin else 0
        high = _place(times, of_marks, asked, start[used[end]], track[end]) if end < len(used) else len(asked)
        yield used[begin:end], asked[low:high]
        begin = end


def _place(
    times: NDArray[np.int64], of_marks: NDArray[np.int64], asked: NDArray[np.int64], time: int, track: int
) -> int:
    """Returns how many marks are of tracks before one, or of it and before a time."""
    low, high = (int(np.searchsorted(of_marks, track, side)) for side in ("left", "right"))
    return low + int(np.searchsorted(times[asked[low:high]], time))


def _innermost(
    start: NDArray[np.int64],
    length: NDArray[np.int64],
    tracks: NDArray[np.int64],
    times: NDArray[np.int64],
    marked: NDArray[np.int64],
    ends_first: bool,
) -> NDArray[np.int64]:
    """Returns what `_enclosing` does, for slices none of which is empty."""
    found = np.full(len(times), _NONE, np.int64)
    distinct = distinct_values(tracks)
    marked_here = np.searchsorted(distinct, marked)
    known = np.flatnonzero(distinct[np.minimum(marked_here, len(distinct) - 1)] == marked)
    begin, end, mark = _on_one_line(
        np.searchsorted(distinct, tracks), start, start + length, marked_here[known], times[known]
    )
    order = by_time(begin, -length)  # where several begin at one instant, the longest first
    begin, end = begin[order], np.sort(end, kind="stable")
    depth = np.arange(len(begin)) - np.searchsorted(end, begin, "right")  # slices around each one
    # A mark is behind the begins, and before the ends, of the slices around it.
    side: Literal["left", "right"] = "right" if ends_first else "left"
    latest = np.searchsorted(begin, mark, side) - 1
    level = latest - np.searchsorted(end, mark, side)
    inside = np.flatnonzero(level >= 0)
    latest, level = latest[inside], level[inside]
    # The latest begin of a level is the slice that is open there.
    higher = np.flatnonzero(depth[latest] != level)
    if len(higher):
        by_level = _stable(depth)
        keys = depth[by_level] * len(depth) + by_level
        latest[higher] = by_level[np.searchsorted(keys, level[higher] * len(depth) + latest[higher], "right") - 1]
    found[known[inside]] = order[latest]
    return found


def _on_one_line(
    tracks: NDArray[np.int64],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    marked: NDArray[np.int64],
    times: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns times, also those of marks, so that those of each track are after those of the tracks before it."""
    first, last = min(begins.min(), times.min(initial=_LAST)), max(ends.max(), times.max(initial=-_LAST))
    span = int(last) - int(first) + 1
    if span * (int(tracks.max()) + 1) > _LAST:  # only their order matters
        numbers = np.unique(np.concatenate([begins, ends, times]), return_inverse=True)[1]
        begins, ends, times = np.split(numbers, np.cumsum([len(begins), len(ends)]))
        first, span = 0, len(numbers)
    return begins - first + span * tracks, ends - first + span * tracks, times - first + span * marked


def _stable(values: NDArray[Any]) -> NDArray[np.int64]:
    """Returns rows in order of integers from 0 on, and then in their own. Small integers take a tenth of the time."""
    return np.argsort(values.astype(np.uint16) if values.max(initial=0) < 1 << 16 else values, kind="stable")
