"""Redacts headers: facts about GPUs and the recording stay, those about machine, command and files do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from iaprof.formats.header.slow_launches import MEMBER as SINGLE_STEPPED
from iaprof.formats.header.thinned import BUDGET, MEMBER as THINNED
from iaprof.formats.header.trace_clocks import KEY as CLOCK, trace_clock
from iaprof.formats.header.traces import MEMBER as TRACES
from iaprof.report.archive.pseudonyms import Clocks, Pseudonyms
from iaprof.report.archive.redacted_texts import redacted_path
from iaprof.report.archive.traces import redacted_members

_HEADER = {
    "format", "iaprof", "python", "host", "clock", "clock_end", "part", "end_ns", "stack_depth", "cpu_hz",
    "follows_frame_pointers", "metric_interval_ns", "streams", "paused", "scope", "probes", "totals", "losses", "cost",
    "symbols", "recovered", "matched", "imported", "launches_by", "no_launches", "stack_ends",
    "python_stacks", "removed_files", BUDGET, THINNED, "unprobed", "waits", "waits_wanted",
}  # fmt: skip
"""Members of the header that stay. It is an allowlist, as members of later recorders could identify someone."""
_HEADER_TEXTS = {
    "iaprof": frozenset({""}),
    "python": frozenset({""}),
    "host": frozenset({"machine"}),
    "streams": frozenset({"device", "card", "name", "pci_address", "layout"}),
    "losses": frozenset({"source", "what"}),
    "symbols": frozenset({"which"}),
    "imported": frozenset({"format"}),
    "launches_by": frozenset({""}),
    "no_launches": frozenset({"driver", "by", "way"}),
}
"""By member of the header: the names of members within it whose texts stay; "" is the member itself."""


def redacted_header(header: dict[str, Any], names: Pseudonyms) -> dict[str, Any]:
    """Redacts the header of a recording; `names` are the hashes in place of names."""
    kept = {
        name: _without_texts(value, _HEADER_TEXTS.get(name, frozenset()))
        for name, value in header.items()
        if name in _HEADER
    }
    host = header.get("host")
    if isinstance(host, dict):
        boot = names.name("boot", str(host.get("boot_id") or ""))
        kept["host"] |= {"name": names.name("host", str(host.get("name"))), "boot_id": boot}
    for name in ("command", "arguments"):
        words = header.get(name)
        kept[name] = [names.name("word", str(word)) for word in words] if isinstance(words, list) else []
    libraries = header.get("libraries")
    kept["libraries"] = [
        {
            **_without_texts(library, frozenset({"way", SINGLE_STEPPED})),
            "path": redacted_path(names, str(library.get("path"))),
        }
        for library in (libraries if isinstance(libraries, list) else ())
        if isinstance(library, dict)
    ]
    clocks = names.clocks(header)
    if isinstance(traces := header.get(TRACES), list):
        kept[TRACES] = [_redacted_trace(each, names) for each in traces if isinstance(each, dict)]
    if isinstance(header.get("file"), str):  # of a part
        kept["file"] = names.name("file", header["file"])
    return {**_with_moved_clocks(kept, clocks), "redacted": True}


def _with_moved_clocks(header: dict[str, Any], clocks: Clocks) -> dict[str, Any]:
    """Moves all times of a header."""
    moved: dict[str, Any] = {name: clocks.of_header(header[name]) for name in ("clock", "clock_end") if name in header}
    if "end_ns" in header:
        moved["end_ns"] = clocks.monotonic(header["end_ns"])
    if isinstance(spans := header.get("paused"), list):
        moved["paused"] = [list(map(clocks.monotonic, span)) for span in spans if isinstance(span, list)]
    if isinstance(changes := header.get(THINNED), list):
        moved[THINNED] = [
            {**change, "time_ns": clocks.monotonic(change["time_ns"])}
            for change in changes
            if isinstance(change, dict) and "time_ns" in change
        ]
    moved["libraries"] = [
        {**library, "since_ns": clocks.monotonic(library["since_ns"])} if "since_ns" in library else library
        for library in header["libraries"]
    ]
    return {**header, **moved}


def _redacted_trace(trace: dict[str, Any], names: Pseudonyms) -> dict[str, Any]:
    """Keeps the counts of an imported file, and of its members what tells devices and ranks."""
    clock = trace_clock(trace)
    if clock is not None:  # distances from the trace's own clock, and its times, would tell boot and date
        clock = replace(clock, offset_ns=0, steady_ns=0)
    return {
        **({} if clock is None else {CLOCK: clock.as_dict()}),
        **_without_texts(
            {name: trace.get(name) for name in ("dialect", "rank", "ranks", "counts")}, frozenset({"dialect"})
        ),
        "name": names.name("file", str(trace.get("name"))),
        "members": redacted_members(trace.get("members")),
    }


def _without_texts(value: Any, kept: frozenset[str], name: str = "") -> Any:
    """Replaces every text in JSON by null, unless it is the value of one of these members."""
    match value:
        case dict():
            return {key: _without_texts(each, kept, key) for key, each in value.items()}
        case list():
            return [_without_texts(each, kept, name) for each in value]
        case str() if name not in kept:
            return None
    return value
