"""All tables and messages of a trace as JSON: `--json` of `iaprof timeline`, and `iaprof report --format=json`."""

from __future__ import annotations

import json
from itertools import islice
from typing import IO, Any

from iaprof.formats.profile import StackOptions
from iaprof.timelines.grouped import Groups
from iaprof.timelines.outputs.formats import TimeLine
from iaprof.timelines.outputs.tables import rounded
from iaprof.timelines.trace import Dialect, Trace
from iaprof.timelines.views import labels

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


def _ranks(trace: Trace) -> list[list[int]]:
    """Returns the ranks of each file's slices, ascending; of a file of PyTorch without slices what it says."""
    file, rank = trace.slices.file, labels.ranks(trace)
    both = Groups(file, rank)
    found: list[list[int]] = [[] for _ in trace.files]
    for number, its_rank in zip(both.key(file).tolist(), both.key(rank).tolist(), strict=True):
        found[number].append(its_rank)
    return [
        own or ([each.rank] if each.dialect is Dialect.TORCH else [])
        for each, own in zip(trace.files, found, strict=True)
    ]


def _as_dict(trace: Trace) -> dict[str, Any]:
    return {
        "files": [
            {"name": file.name, "dialect": str(file.dialect), "rank": own[0] if len(own) == 1 else None, "ranks": own}
            for file, own in zip(trace.files, _ranks(trace), strict=True)
        ],
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
