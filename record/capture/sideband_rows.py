"""The `mapping` and `process` rows of a capture, made of side-band records and of what /proc says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.wire.sideband import SideBand
from iaprof.record.capture.single_rows import json_object, single_row
from iaprof.record.spool import Frame


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


@dataclass(frozen=True)
class Described:
    """What the recorder knows of a process."""

    pid: int
    root: str | None  # its root folder if it is not ours
    account: str | None  # who is answerable for it: see bpf.accounts
    row: pa.StructArray


def described_process(frame: Frame) -> Described:
    """Returns what the recorder knows of a process.

    Raises:
        ValueError, KeyError, TypeError, OverflowError: the frame is damaged.
    """
    about = json_object(frame.payload)
    row = dict.fromkeys(field.name for field in KINDS["process"])
    row |= {"time_ns": frame.time, "pid": about["pid"], "tid": about["pid"], "event": "described"}
    row |= {name: about.get(name) for name in ("ns_pid", "cgroup", "container", "uid", "gid")}
    root, account = (about[name] if isinstance(about.get(name), str) else None for name in ("root", "account"))
    if root is not None:
        os.fsencode(root)  # raises if it is not a path: JSON strings can hold what no path can
    return Described(about["pid"], root, account, single_row("process", row))
