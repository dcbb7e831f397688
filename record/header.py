"""A capture's header: the members known when an output file begins, and those known at its end."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import iaprof
from iaprof.bpf.perf_event import online_cpus
from iaprof.formats.header.labels import MEMBER as LABELS
from iaprof.formats.header.members import MEMBERS
from iaprof.record.options import Options
from iaprof.record.own_cost import cpu_seconds, peak_bytes
from iaprof.record.sources.source import Source
from iaprof.symbols.names.boot import boot_id

_COST = ("cpu_s", "learn_cpu_s", "compile_cpu_s", "peak_bytes", "spool_bytes", "probe_ns")
"""The order of the members of `cost`."""


def header(options: Options, part: int, sources: Sequence[Source]) -> dict[str, Any]:
    """Returns the header as it is known when output file number `part` begins."""
    host = os.uname()
    members: dict[str, Any] = {
        "iaprof": iaprof.__version__,
        "host": {
            "name": host.nodename,
            "kernel": host.release,
            "machine": host.machine,
            "cpus": len(online_cpus()),
            "boot_id": boot_id(),
        },
        "python": platform.python_version(),
        "command": list(options.command),
        "arguments": sys.argv,
        LABELS: dict(options.labels),
        "part": part,
        "clock": _clocks(),
    }
    for source in sources:
        members |= source.header()
    return _in_order(members, MEMBERS)


def footer(end_ns: int, spool_bytes: int, sources: Sequence[Source]) -> dict[str, Any]:
    """Returns the members that are added to the header when an output file ends."""
    members: dict[str, Any] = {"end_ns": end_ns, "clock_end": _clocks()}
    cost: dict[str, Any] = {}
    for source in sources:
        of_source = source.footer()
        cost |= of_source.pop("cost", {})
        members |= of_source
    cost |= {
        "cpu_s": round(cpu_seconds() + sum(source.cpu_seconds for source in sources), 3),
        "peak_bytes": peak_bytes(),
        "spool_bytes": spool_bytes,
    }
    return _in_order(members | {"cost": _in_order(cost, _COST)}, MEMBERS)


def _in_order(members: dict[str, Any], order: Iterable[str]) -> dict[str, Any]:
    """Sorts members; those that the order does not have come last."""
    place = {name: number for number, name in enumerate(order)}
    return dict(sorted(members.items(), key=lambda member: place.get(member[0], len(place))))


def _clocks() -> dict[str, int]:
    """Returns the current time on both clocks: the wall clock may be set while recording."""
    monotonic, realtime = time.monotonic_ns(), time.time_ns()
    return {"monotonic_ns": monotonic, "realtime_ns": realtime}
