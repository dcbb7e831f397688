"""Traces for tests of stages, made of a few events as in Chrome's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from iaprof.timelines.trace import ABSENT, Dialect, Marks, Points, Slices, Texts, Trace, TraceFile

Event = Mapping[str, Any]


def trace(*files: Sequence[Event], dialect: Dialect = Dialect.FLEX, ranks: Sequence[int] = ()) -> Trace:
    """A trace of files, each a list of events: `ts` and `dur` in us, TS1 to TS5 and others in `args`."""
    texts = Texts()
    events = [(number, event) for number, file in enumerate(files) for event in file]
    by_phase = {phases: [each for each in events if each[1]["ph"] in phases] for phases in ("X", "C", "stf", "iIRbenM")}
    names = [f"job-{number}.json" for number in range(len(files))]
    described = [
        TraceFile(name, dialect, ranks[number] if ranks else 0, ({"id": 0, "name": "AIU"},))
        for number, name in enumerate(names)
    ]
    flows, instants = (_marks(texts, by_phase[phases]) for phases in ("stf", "iIRbenM"))
    return Trace(described, texts, _slices(texts, by_phase["X"]), _points(texts, by_phase["C"]), flows, instants)


def slice_(name: str, ts: float, dur: float, counters: Sequence[int] = (), **others: Any) -> Event:
    """An X event; `others` are its pid, tid, cat and args."""
    members: dict[str, Any] = {key: others.pop(key) for key in ("pid", "tid", "cat") if key in others}
    args = dict(others.pop("args", {})) | others | {f"TS{n}": value for n, value in enumerate(counters, 1)}
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 1, **members, "args": args}


def shared_counters(operations: Sequence[int], is_power_shared: bool) -> Trace:
    """A trace with a slice for each number: slices of one operation have the same counters, those of 0 have none."""
    events = []
    for number, operation in enumerate(sorted(operations)):
        counters = [1_000_000 * n + operation for n in range(1, 6)] if operation else []
        power = {"Power": operation if is_power_shared else number} if operation else {}
        events.append(slice_(f"k_{number}", number, 1, counters, **power))
    return trace(events)


def _common(texts: Texts, events: Sequence[tuple[int, Event]]) -> dict[str, Any]:
    return {
        "file": np.array([file for file, _ in events], np.int32),
        "pid": np.array([event.get("pid", 0) for _, event in events], np.int64),
        "tid": np.array([event.get("tid", 0) for _, event in events], np.int64),
        "name": texts.codes([event.get("name", "") for _, event in events]),
        "category": texts.codes([event.get("cat") for _, event in events]),
        "row": np.arange(len(events)),
    }


def _args(events: Sequence[tuple[int, Event]], name: str) -> list[Any]:
    return [event.get("args", {}).get(name) for _, event in events]


def _integers(values: Sequence[Any]) -> Any:
    return np.array([ABSENT if value is None else int(value) for value in values], np.int64)


def _ns(values: Sequence[float]) -> Any:
    return np.array([round(value * 1000) for value in values], np.int64)


def _slices(texts: Texts, events: Sequence[tuple[int, Event]]) -> Slices:
    counters = np.array([_integers(_args(events, f"TS{n}")) for n in range(1, 6)], np.int64).reshape(5, len(events)).T
    bandwidth = [np.nan if value is None else value for value in _args(events, "memory bandwidth (GB/s)")]
    peers = [event.get("args", {}).get("Peer", event.get("args", {}).get("Peers")) for _, event in events]
    return Slices.of(
        len(events),
        **_common(texts, events),
        start=_ns([event["ts"] for _, event in events]),
        duration=np.array([event["dur"] * 1000 for _, event in events], float),
        counters=counters.copy(),
        power=_integers(_args(events, "Power")),
        bytes=_integers(_args(events, "Bytes" if any(_args(events, "Bytes")) else "bytes")),
        bandwidth=np.array(bandwidth, float),
        correlation=_integers(_args(events, "correlation")),
        device=_integers(_args(events, "device")),
        group=texts.codes(_args(events, "CollGroup")),
        type=texts.codes(_args(events, "Type")),
        peers=texts.codes([None if value is None else str(value) for value in peers]),
    )


def _points(texts: Texts, events: Sequence[tuple[int, Event]]) -> Points:
    flat = [(file, event, *item) for file, event in events for item in event["args"].items()]
    common = _common(texts, [(file, event) for file, event, _, _ in flat])
    return Points(
        **common,
        series=texts.codes([series for _, _, series, _ in flat]),
        time=_ns([event["ts"] for _, event, _, _ in flat]),
        value=np.array([value for *_, value in flat], float),
    )


def _marks(texts: Texts, events: Sequence[tuple[int, Event]]) -> Marks:
    return Marks(
        **_common(texts, events),
        phase=texts.codes([event["ph"] for _, event in events]),
        id=_integers([event.get("id") for _, event in events]),
        time=_ns([event.get("ts", 0) for _, event in events]),
    )
