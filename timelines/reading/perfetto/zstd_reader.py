"""Runs in a sandboxed child: does what `packet_reader` does, for traces with packets that are compressed with zstd."""

from __future__ import annotations

import os

from iaprof.sandbox.reader import Operation
from iaprof.timelines.reading.perfetto import packet_reader, zstandard


def operations(stage_seconds: float) -> dict[str, Operation]:
    """Returns the operations of this child, by name."""
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # other pools reserve more memory than a child may have
    zstandard.load()
    return packet_reader.operations(stage_seconds)
