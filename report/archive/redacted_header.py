"""Redacts headers as formats/header/members.py says: facts about GPUs and the recording stay, names do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from iaprof.formats.header.members import MEMBERS, Member, Redaction
from iaprof.formats.header.trace_clocks import KEY as CLOCK, trace_clock
from iaprof.report.archive.pseudonyms import Clocks, Pseudonyms
from iaprof.report.archive.redacted_texts import redacted_path
from iaprof.report.archive.traces import redacted_members

_ALWAYS = ("command", "arguments", "libraries")
"""Lists that every redacted header has, also that of an import."""
_UNKNOWN = Member("", Redaction.DROPPED)


def redacted_header(header: dict[str, Any], names: Pseudonyms) -> dict[str, Any]:
    """Redacts the header of a recording; `names` are the hashes in place of names."""
    clocks = names.clocks(header)
    redacted: dict[str, Any] = {name: [] for name in _ALWAYS}
    for name, value in header.items():
        member = MEMBERS.get(name, _UNKNOWN)
        match member.redaction:
            case Redaction.KEPT:
                redacted[name] = _redacted(value, member, names, clocks)
            case Redaction.CLOCKS:
                redacted[name] = clocks.of_header(_redacted(value, member, names, clocks))
            case Redaction.TRACES if isinstance(value, list):
                redacted[name] = [_redacted_trace(each, names, clocks) for each in value if isinstance(each, dict)]
    if isinstance(host := redacted.get("host"), dict):
        host.setdefault("boot_id", "")  # captures of formats 1 and 2 have none
    return redacted | {"redacted": True}


def _redacted(value: Any, member: Member, names: Pseudonyms, clocks: Clocks, name: str = "") -> Any:
    """Redacts JSON in a member; `name` is that of the value within it."""
    match value:
        case None:
            return None
        case dict():
            return {key: _redacted(each, member, names, clocks, key) for key, each in value.items()}
        case list():
            return [_redacted(each, member, names, clocks, name) for each in value]
        case _ if name in member.identifies:
            what = member.identifies[name]
            return redacted_path(names, str(value)) if what == "path" else names.name(what, str(value))
        case str():
            return value if name in member.texts else None
    return clocks.monotonic(value) if name in member.times else value


def _redacted_trace(trace: dict[str, Any], names: Pseudonyms, clocks: Clocks) -> dict[str, Any]:
    """Keeps the counts of an imported file, and of its members what tells devices and ranks."""
    clock = trace_clock(trace)
    if clock is not None:  # distances from the trace's own clock, and its times, would tell boot and date
        clock = replace(clock, offset_ns=0, steady_ns=0)
    facts = {name: trace.get(name) for name in ("dialect", "rank", "ranks", "counts")}
    return {
        **({} if clock is None else {CLOCK: clock.as_dict()}),
        **_redacted(facts, MEMBERS["traces"], names, clocks),
        "name": names.name("file", str(trace.get("name"))),
        "members": redacted_members(trace.get("members")),
    }
