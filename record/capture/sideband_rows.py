"""Rows of a capture from what the side-band says of processes."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from iaprof.formats.capture.schema import KINDS
from iaprof.formats.wire.sideband import SideBand


def sideband_rows(sideband: SideBand) -> Iterator[tuple[str, pa.StructArray]]:
    """The `mapping` and `process` rows, each with its kind."""
    for kind, rows in (("mapping", sideband.mappings), ("process", sideband.processes)):
        columns = vars(rows)
        names = {"time_ns": "time"}
        arrays = [
            pa.array(columns[name], field.type)
            if (name := names.get(field.name, field.name)) in columns
            else pa.nulls(len(rows.time), field.type)
            for field in KINDS[kind]
        ]
        yield kind, pa.StructArray.from_arrays(arrays, fields=list(KINDS[kind]))
