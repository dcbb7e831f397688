"""The members `totals` and `cost` of a capture's header."""

from __future__ import annotations

from typing import Any

from iaprof.formats.capture.schema import ROW_KINDS, SAMPLE_KINDS, sorted_kinds
from iaprof.formats.header.left_out import TOTALS as LEFT_OUT
from iaprof.record.own_cost import cpu_seconds, peak_bytes

_TOTALS_ORDER = (
    "launch", "command_list", "transfer", "python_code", "stack", "mapping", "process", "kernel", "loss", "cpu_sample",
    "wait", "metric",
)  # fmt: skip
_NO_TOTALS = (*SAMPLE_KINDS, "module", "symbol", "sample", "slice", "counter", "flow", "instant")
"""Samples are counted by record; the others come from no frame."""
COUNTED = {
    kind.name: kind.count or kind.view for kind in sorted_kinds(ROW_KINDS, _TOTALS_ORDER) if kind.name not in _NO_TOTALS
}
"""The header's name for the number of rows of each kind."""
TOTALS = (
    "stalls", "stall_reads", *COUNTED.values(), "carried_launches", "executions", "transferred_bytes",
    *LEFT_OUT.values(),
)  # fmt: skip
"""The members of `totals`, which are there even if 0."""


def cost_of(recording: object) -> dict[str, Any]:
    """Returns what recording cost, as the recorder says, and what finishing has cost this process."""
    cost = recording if isinstance(recording, dict) else {}
    before = cost.get("cpu_s")
    seconds = cpu_seconds()
    return {
        **cost,
        "finish_cpu_s": round(seconds, 3),
        "finish_peak_bytes": peak_bytes(),
        "total_cpu_s": round(seconds + (before if isinstance(before, int | float) else 0), 3),
    }
