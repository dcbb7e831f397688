"""What all output formats have in common."""

from __future__ import annotations

from enum import Flag, auto
from typing import IO, Any, Protocol

from iaprof.formats.export import Export
from iaprof.formats.profile import Shape


class Needs(Flag):
    """What a format wants to have beside the stalls; reading that takes time."""

    NOTHING = 0
    TIME = auto()  # stalls by interval; of a large capture `Export.by_time`, beside all in one
    CPU = auto()  # CPU samples
    SERIES = auto()  # metrics
    LAUNCHES = auto()
    LISTINGS = auto()  # annotated kernels


class Writer(Protocol):
    """One output format."""

    hides_cpython: bool = True  # unless the user says otherwise
    interval_s: float = 0.0  # length of its intervals, unless the user says otherwise; 0: it has none
    needs: Needs = Needs.NOTHING
    binary: bool = False  # it writes bytes
    readable: bool = True  # a terminal may show it
    has_stacks: bool = True  # whose parts the user can choose, and which can be those of CPU samples

    def write(self, export: Export, shape: Shape, out: IO[Any]) -> None:
        """Writes all of it."""
