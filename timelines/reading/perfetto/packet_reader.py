"""Runs in a sandboxed child: `reader`, and reads packets, whose definitions take long to import."""

from __future__ import annotations

from typing import Any

from iaprof.sandbox.reader import Operation
from iaprof.timelines.reading import reader


def operations(stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations of this child, by name."""
    others = reader.operations(stage_seconds)
    from iaprof.timelines.reading.perfetto.reader import PacketReader

    packet_reader = PacketReader()

    def read_packets(parameters: dict[str, Any], data: bytearray, files: list[int]) -> object:
        return packet_reader.read(parameters, reader.content_of(parameters, data, files), files[-1])

    return {**others, "packets": read_packets}
