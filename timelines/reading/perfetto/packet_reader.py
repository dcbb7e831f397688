"""Runs in a sandboxed child: does what `json_reader` does, and reads packets, whose definitions take long to import."""

from __future__ import annotations

from typing import Any

from iaprof.sandbox.reader import Operation
from iaprof.timelines.reading import json_reader


def operations(stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations of this child, by name."""
    others = json_reader.operations(stage_seconds)
    from iaprof.timelines.reading.perfetto.batch_reader import BatchReader

    batch_reader = BatchReader()

    def read_packets(parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
        return batch_reader.read(parameters, json_reader.content_of(parameters, data, files), files[-1])

    return {**others, "packets": read_packets}
