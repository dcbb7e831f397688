"""Metrics: the raw numbers that the recorder reads, and a description of how values follow from them.

The recorder stores rows of numbers in batches, each with a description; metric_values.py computes the values when the
capture is written. A batch begins with the last row of the batch before, so that differences can be computed from one
batch alone: if a batch is lost, the others are unaffected.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

FREQUENCY_ACTUAL = "frequency-actual-MHz"
FREQUENCY_REQUESTED = "frequency-requested-MHz"
CPU_USE = "cpu-percent"
_BUSY = "busy-", "-percent"

MISSING = 1 << 63
"""In a row: the number was not available. As a signed number it is the minimum, which no sensor reports."""

PROCESS_WIDTH = 4  # numbers per row of processes' CPU use


class Derivation(StrEnum):
    """How to compute a metric from its columns. All but VALUE compare a row with the one before."""

    VALUE = "value"  # the number itself, signed
    STEP = "step"  # the difference
    RATE = "rate"  # the difference per second
    SHARE = "share"  # the difference of `columns` as a fraction of that of `of`; at most 1


@dataclass(frozen=True)
class Metric:
    """A metric in a batch of rows."""

    name: str
    how: Derivation
    columns: tuple[int, ...]  # indices into a row, whose number 0 is the time; their numbers are added up
    of: tuple[int, ...] = ()
    scale: float = 1.0  # factor from the raw number to the unit in the name


def busy(engine_class: str) -> str:
    """The name of the utilization metric of an engine class."""
    return engine_class.join(_BUSY)


def is_busy(name: str) -> bool:
    """Whether a metric is the utilization of an engine class."""
    return name.startswith(_BUSY[0]) and name.endswith(_BUSY[1])


def describe(stream: int, width: int, metrics: Sequence[Metric]) -> bytes:
    """The description of a stream's rows, as JSON.

    Args:
            stream: index into the header's streams.
            width: numbers per row, including the time.
            metrics: the metrics to compute.
    """
    return _json(stream, width, metrics)


def describe_processes(ticks_per_s: int) -> bytes:
    """The description of rows with the CPU time of processes: time, pid, start time, ticks used so far."""
    return _json(None, PROCESS_WIDTH, [Metric(CPU_USE, Derivation.RATE, (3,), (), 100 / ticks_per_s)])


def _json(stream: int | None, width: int, metrics: Sequence[Metric]) -> bytes:
    return json.dumps({"stream": stream, "width": width, "metrics": [asdict(metric) for metric in metrics]}).encode()
