"""Captures of a fleet: copies of those of tests/data with other hosts, labels and times."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.report.archive.archiving import rows_of
from unit.in_process import iaprof

SAMPLES = sorted((Path(__file__).parents[3] / "data" / "captures").glob("format-*.parquet"))
_SINGLE: dict[bytes, Counter[str]] = {}  # by the capture's content
_COPIES: dict[tuple[object, ...], bytes] = {}  # what `copied` made of the same
WITHOUT_PIDS = "--frames=process,operator,cpu,file,function,instruction,reason,offset"


def copied(source: Path, target: Path, host: str = "", cgroup: str = "", **members: Any) -> Path:
    """A capture with the same rows, from another host or with its processes in a cgroup, with other header members."""
    target.parent.mkdir(parents=True, exist_ok=True)
    key = source.read_bytes(), host, cgroup, repr(members)
    if key not in _COPIES:
        _copy(source, target, host, cgroup, members)
        _COPIES[key] = target.read_bytes()
    target.write_bytes(_COPIES[key])
    return target


def _copy(source: Path, target: Path, host: str, cgroup: str, members: dict[str, Any]) -> None:
    reader = CaptureReader(source)
    header = reader.header | members
    if host:
        header = header | {"host": header.get("host", {}) | {"name": host, "boot_id": host}}
    with target.open("wb") as file:
        writer = CaptureWriter(file)
        for kind in KINDS:
            for table in reader.tables(kind):
                if kind == "process" and cgroup:
                    place = table.column_names.index("cgroup")
                    named = pa.array([cgroup] * len(table)).dictionary_encode().cast(table.schema.field("cgroup").type)
                    table = table.set_column(place, table.schema.field("cgroup"), named)
                for rows in rows_of(kind, table):
                    writer.write(kind, rows)
        writer.close(header)


def folded(*words: str | Path) -> Counter[str]:
    """The stacks that `iaprof report` prints, without pids."""
    done = iaprof("report", "-q", WITHOUT_PIDS, *words)
    assert done.code == 0, done.err
    found: Counter[str] = Counter()
    for line in done.out.splitlines():
        stack, count = line.rsplit(" ", 1)
        found[stack] += int(count)
    return found


def sum_of_single(captures: Iterable[Path]) -> Counter[str]:
    """The same of each capture for itself, added up."""
    total: Counter[str] = Counter()
    for capture in captures:
        content = capture.read_bytes()
        if content not in _SINGLE:
            _SINGLE[content] = folded(capture)
        total += _SINGLE[content]
    return total


def as_json(*words: str | Path) -> dict[str, Any]:
    """What a verb prints with --json."""
    done = iaprof(*words, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found
