"""The first stage: which events are taken, and their names.

A filter drops slices by an attribute: `name`, `cat`, `ph`, `pid`, `tid`, `ts` and `dur` (us), or a member of `args`
with `args.` before it. The members are those of a Trace: TS1 to TS5, Power, bytes (or Bytes), correlation, device,
CollGroup, Type, Peer (or Peers), "memory bandwidth (GB/s)", jobname (the file's name), and what is in `Slices.extra`.
Numbers are decimal: a TS1 of 0xf4240 is 1000000. A slice that lacks the attribute stays. Regular expressions are
RE2's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.timelines.options import Limit, Options
from iaprof.timelines.stages.device_counters import unwrap
from iaprof.timelines.trace import ABSENT, Marks, Points, Slices, Trace

_NAMES = (("RDMA", "Rdma"), ("Receive", "Recv"))
"""Names that differ between versions of the runtime."""


def normalize_phase1(trace: Trace, options: Options) -> None:
    """Takes the events within the limits and not in the filters, unifies names, and unwraps counters within a slice."""
    if options.limit != Limit():
        _limit(trace, options.limit)
    for old, new in _NAMES:
        trace.slices.name = trace.texts.replaced(trace.slices.name, old, new)
    for attribute, pattern in options.filters:
        _filter(trace, attribute, pattern)
    unwrap(trace)


def _limit(trace: Trace, limit: Limit) -> None:
    """Keeps the events in the limit's span of time, without those that it skips and those after its count, by time.

    The series of a counter at one instant are one event. Phases that are not counted are always kept.
    """
    tables: tuple[Slices | Points | Marks, ...] = (trace.slices, trace.points, trace.flows, trace.instants)
    inside, exempt, times, kinds, events = [], [], [], [], []
    for kind, table in enumerate(tables):
        time = table.start if isinstance(table, Slices) else table.time
        inside.append(_is_inside(table, time, limit))
        exempt.append(_is_exempt(trace, table, limit.phases_not_counted))
        times.append(time)
        kinds.append(np.full(len(table), kind))
        events.append(_series_at_once(table) if isinstance(table, Points) else np.arange(len(table)))
    keep = np.concatenate(exempt)
    counted = np.flatnonzero(np.concatenate(inside) & ~keep)
    kind_, event_ = np.concatenate(kinds)[counted], np.concatenate(events)[counted]
    order = np.lexsort((event_, kind_, np.concatenate(times)[counted]))
    changes = (np.diff(kind_[order], prepend=-1) != 0) | (np.diff(event_[order], prepend=-1) != 0)
    number = np.cumsum(changes)
    last = np.iinfo(np.int64).max if limit.count is None else limit.skip + limit.count
    keep[counted[order[(number > limit.skip) & (number <= last)]]] = True
    slices, points, flows, instants = np.split(keep, np.cumsum([len(table) for table in tables])[:-1])
    if removed := int(len(keep) - keep.sum()):
        trace.dropped["limit"] += removed
    trace.slices, trace.points = trace.slices.take(slices), trace.points.take(points)
    trace.flows, trace.instants = trace.flows.take(flows), trace.instants.take(instants)


def _is_inside(table: Slices | Points | Marks, time: NDArray[np.int64], limit: Limit) -> NDArray[np.bool_]:
    inside = np.ones(len(table), bool)
    if limit.start_ns is not None:
        length = table.duration if isinstance(table, Slices) else 0
        inside &= (time - limit.start_ns) + length >= 0
    if limit.end_ns is not None:
        inside &= time <= limit.end_ns
    return inside


def _is_exempt(trace: Trace, table: Slices | Points | Marks, phases: str) -> NDArray[np.bool_]:
    if isinstance(table, Marks):
        return np.isin(table.phase, trace.texts.codes(sorted(set(phases))))
    return np.full(len(table), ("X" if isinstance(table, Slices) else "C") in phases)


def _series_at_once(points: Points) -> NDArray[np.intp]:
    """Returns a number for each point, equal for those of one event."""
    keys = (points.name, points.tid, points.pid, points.file, points.time)
    order = np.lexsort(keys)
    new = np.zeros(len(order), bool)
    for key in keys:
        new[1:] |= np.diff(key[order]) != 0
    numbers = np.empty(len(order), np.intp)
    numbers[order] = np.cumsum(new)
    return numbers


def _filter(trace: Trace, attribute: str, pattern: str) -> None:
    try:
        found = _found(trace, attribute, pattern)
    except pa.ArrowInvalid:
        trace.messages.warn("FLTR", f"The filter {attribute}:{pattern} is not a regular expression: it drops nothing")
        return
    if found is None:
        trace.messages.warn("FLTR", f"No slice has {attribute}: the filter {attribute}:{pattern} drops nothing")
        return
    trace.keep(~found, "filter")


def _found(trace: Trace, attribute: str, pattern: str) -> NDArray[np.bool_] | None:
    """Tells in which slices an attribute matches a regular expression; None if no slice has the attribute."""
    values = _values(trace, attribute)
    if values is None:
        return None
    if values.dtype == np.int32:
        return trace.texts.matches(values, pattern) if (values >= 0).any() else None
    present = ~np.isnan(values) if values.dtype.kind == "f" else values != ABSENT
    if not present.any():
        return None
    distinct, places = np.unique(values, return_inverse=True)
    texts = pa.array(distinct).cast(pa.string())
    if values.dtype == bool:
        texts = pa.array([str(bool(value)) for value in distinct])
    matches = pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False).astype(bool)
    return np.asarray(matches[places] & present, bool)


def _values(trace: Trace, attribute: str) -> NDArray[Any] | None:
    """Returns an attribute's values; int32 are codes of texts."""
    slices = trace.slices
    if attribute.startswith("args."):
        return _argument(trace, attribute.removeprefix("args."))
    columns: dict[str, NDArray[Any]] = {
        "name": slices.name, "cat": slices.category, "pid": slices.pid, "tid": slices.tid,
        "ts": slices.start / 1e3, "dur": slices.duration / 1e3,
        "ph": np.full(len(slices), trace.texts.code("X"), np.int32),
    }  # fmt: skip
    return columns.get(attribute)


def _argument(trace: Trace, name: str) -> NDArray[Any] | None:
    slices = trace.slices
    columns: dict[str, NDArray[Any]] = {
        "Power": slices.power, "bytes": slices.bytes, "Bytes": slices.bytes, "correlation": slices.correlation,
        "device": slices.device, "CollGroup": slices.group, "Type": slices.type, "Peer": slices.peers,
        "Peers": slices.peers, "memory bandwidth (GB/s)": slices.bandwidth,
        **{f"TS{number}": slices.counters[:, number - 1] for number in range(1, 6)},
    }  # fmt: skip
    if name == "jobname":
        return trace.texts.codes(trace.job_names)[slices.file]
    return columns.get(name, slices.extra.get(name))
