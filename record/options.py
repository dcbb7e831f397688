"""What is to be recorded, and how: the options of `iaprof record` after they were checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from iaprof.bpf.probes.libraries import Way
from iaprof.bpf.sizes import Sizes
from iaprof.formats.wire.launches import MAX_DEPTH
from iaprof.symbols.names.which import Symbols


class LaunchesBy(StrEnum):
    """How launches are to be had."""

    AUTO = "auto"  # of each driver in the best way that works
    PROBES = Way.PROBES
    ATTACH = Way.ATTACH
    INJECT = Way.INJECT

    @property
    def ways(self) -> tuple[Way, ...]:
        """That may be used."""
        return tuple(Way) if self is LaunchesBy.AUTO else (Way(self),)


@dataclass(frozen=True)
class Options:
    """What to record."""

    output: Path
    command: tuple[str, ...] = ()
    duration_s: float | None = None
    delay_ms: int = 0  # -1: begins when --control says so
    pids: tuple[int, ...] = ()  # and their children; all processes when empty
    devices: tuple[str, ...] = ()  # as xe.choose takes them; all when empty
    rate: str | None = None  # as xe.pick_rate takes it
    subsample: int = 1  # keeps one record of so many
    launches: LaunchesBy = LaunchesBy.AUTO
    waits: bool = False  # replaces return addresses in profiled programs: docs/waits.md
    cpu_hz: int = 49
    max_stack: int = MAX_DEPTH  # frames
    metric_interval_ns: int = 10_000_000
    control: str | None = None  # as control.Control takes it
    switch_bytes: int | None = None  # of the spool
    switch_s: float | None = None
    max_files: int | None = None
    max_bytes: int | None = None  # of all spools together
    symbols: Symbols = Symbols.NEEDED
    sizes: Sizes = field(default_factory=Sizes)
