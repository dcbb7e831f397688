"""All tables and messages of a trace as JSON: `--json` of `iaprof timeline`, and `iaprof report --format=json`."""

from __future__ import annotations

import json
from typing import IO, Any

from iaprof.formats.profile import StackOptions
from iaprof.report.timeline.outputs.formats import TimeLine
from iaprof.report.timeline.outputs.tables import rounded
from iaprof.report.timeline.trace import Trace


def write_json(shown: TimeLine, _: StackOptions, out: IO[str]) -> None:
    """Writes a trace's tables and messages."""
    out.write(f"{as_json(shown.trace)}\n")


def as_json(trace: Trace) -> str:
    """Returns a trace's tables and messages, and what became of its events."""
    return json.dumps(_as_dict(trace), indent=2)


def _as_dict(trace: Trace) -> dict[str, Any]:
    return {
        "files": [{"name": file.name, "dialect": str(file.dialect), "rank": file.rank} for file in trace.files],
        "events": {
            "slices": len(trace.slices),
            "counters": len(trace.points),
            "flows": len(trace.flows),
            "instants": len(trace.instants),
            "dropped": dict(+trace.dropped),
            "merged": dict(+trace.merged),
            "made": dict(+trace.made),
        },
        "tables": {name: rounded(table).to_pylist() for name, table in trace.tables.items()},
        "messages": [
            {"level": each.level.name.lower(), "stage": each.stage, "text": each.text} for each in trace.messages.said
        ],
    }
