"""The interface of output formats."""

from __future__ import annotations

from enum import Flag, auto
from typing import IO, Any, Protocol

from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions


class Needs(Flag):
    """What a format needs besides stalls; reading it takes time."""

    NOTHING = 0
    TIME = auto()  # stalls by interval; for a large capture, `Export.by_time` and one profile of all time
    CPU = auto()  # CPU samples
    SERIES = auto()  # metrics
    LAUNCHES = auto()
    LISTINGS = auto()  # annotated kernels
    ABOUT = auto()  # what the capture says of itself


class Writer(Protocol):
    """An output format."""

    hides_cpython: bool = True  # default of --hide-cpython
    interval_s: float = 0.0  # default length of intervals; 0: none
    needs: Needs = Needs.NOTHING
    binary: bool = False  # writes bytes, not text
    readable: bool = True  # may be written to a terminal
    has_stacks: bool = True  # accepts options for stacks, such as --frames and --cpu-samples

    def write(self, export: Export, options: StackOptions, out: IO[Any]) -> None:
        """Writes an export."""
