"""All tables and messages of a trace as JSON: `--json` of `iaprof timeline`, and `iaprof report --format=json`."""

from __future__ import annotations

import json
from itertools import islice
from typing import IO, Any

from iaprof.formats.profile import StackOptions
from iaprof.report.timeline.outputs.formats import TimeLine
from iaprof.report.timeline.outputs.tables import rounded
from iaprof.report.timeline.trace import Trace

_PIECES_AT_ONCE = 1 << 16


def write_json(shown: TimeLine, _: StackOptions, out: IO[str]) -> None:
    """Writes a trace's tables and messages."""
    write_document(shown.trace, out)


def write_document(trace: Trace, out: IO[str]) -> None:
    """Writes a trace's tables and messages, and what became of its events."""
    pieces = json.JSONEncoder(indent=2).iterencode(_as_dict(trace))
    while text := "".join(islice(pieces, _PIECES_AT_ONCE)):  # all of a large table's would need half a gigabyte
        out.write(text)
    out.write("\n")


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
