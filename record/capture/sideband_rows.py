"""The `mapping` and `process` rows of a capture, made of side-band records and of what /proc says."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.wire.sideband import SideBand
from iaprof.record.capture.single_rows import json_object, single_row
from iaprof.record.capture.spool import Frame


def sideband_rows(sideband: SideBand) -> Iterator[tuple[str, pa.StructArray]]:
    """Yields the `mapping` and the `process` rows, each with their kind."""
    for kind, rows in (("mapping", sideband.mappings), ("process", sideband.processes)):
        columns = vars(rows)
        renamed = {"time_ns": "time"}
        arrays = [
            pa.array(columns[column], field.type)
            if (column := renamed.get(field.name, field.name)) in columns
            else pa.nulls(len(rows.time), field.type)
            for field in KINDS[kind]
        ]
        yield kind, pa.StructArray.from_arrays(arrays, fields=list(KINDS[kind]))


def described_process(frame: Frame) -> tuple[int, str | None, pa.StructArray]:
    """Returns what the recorder knows of a process: its pid, its root folder if it is not ours, and its row.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: the frame is damaged.
    """
    about = json_object(frame.payload)
    row = dict.fromkeys(field.name for field in KINDS["process"])
    row |= {"time_ns": frame.time, "pid": about["pid"], "tid": about["pid"], "event": "described"}
    row |= {name: about.get(name) for name in ("ns_pid", "cgroup", "container", "uid", "gid")}
    root = about.get("root")
    if isinstance(root, str):
        os.fsencode(root)  # raises if it is no path: JSON strings can hold what no path can
    return about["pid"], root if isinstance(root, str) else None, single_row("process", row)
