"""Metrics on their way from counters to values: rows of raw numbers, and a description of what they mean.

The recorder reads numbers and says, once per batch of rows, what follows from them; the arithmetic is done when the
capture is written (metric_values.py). A batch begins with the last row of the one before, so that differences need
nothing but the batch: where one is lost, the others keep their meaning.
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
"""In a row: there was no such number at that time. No sensor's: as a signed number it is the least there is."""

PROCESS_WIDTH = 4  # numbers in a row of a process's CPU use


class How(StrEnum):
    """How a metric follows from its columns. All but VALUE compare a row with the one before."""

    VALUE = "value"  # the number itself, signed
    STEP = "step"  # by how much it grew
    RATE = "rate"  # by how much it grew in a second
    SHARE = "share"  # of what `of` grew by, the part that `columns` grew by: 1 at most


@dataclass(frozen=True)
class Metric:
    """A metric of a batch of rows."""

    name: str
    how: How
    columns: tuple[int, ...]  # in the row, of which number 0 is the time; they are added up
    of: tuple[int, ...] = ()
    scale: float = 1.0  # what a one becomes in the unit of the name


def busy(engine_class: str) -> str:
    """The name of the metric that says how busy a GT's engines of a class are."""
    return engine_class.join(_BUSY)


def is_busy(name: str) -> bool:
    """Whether a metric says how busy a class of engines is."""
    return name.startswith(_BUSY[0]) and name.endswith(_BUSY[1])


def describe(stream: int, width: int, metrics: Sequence[Metric]) -> bytes:
    """The description of rows of a stream.

    Args:
        stream: index in the capture's header.
        width: numbers in a row, the time included.
        metrics: what the numbers say.
    """
    return _json(stream, width, metrics)


def describe_processes(ticks_per_s: int) -> bytes:
    """The description of rows that say how much CPU time processes used: time, pid, its start, ticks used so far."""
    return _json(None, PROCESS_WIDTH, [Metric(CPU_USE, How.RATE, (3,), (), 100 / ticks_per_s)])


def _json(stream: int | None, width: int, metrics: Sequence[Metric]) -> bytes:
    return json.dumps({"stream": stream, "width": width, "metrics": [asdict(metric) for metric in metrics]}).encode()
