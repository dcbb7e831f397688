"""The options of `iaprof record`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from iaprof.bpf.probes.libraries import Way
from iaprof.bpf.sizes import Sizes
from iaprof.formats.wire.launches import MAX_DEPTH
from iaprof.symbols.names.which import Symbols


class LaunchesBy(StrEnum):
    """How launches are recorded (`--launches`)."""

    AUTO = "auto"  # for each driver the best way that works
    PROBES = Way.PROBES
    ATTACH = Way.ATTACH
    INJECT = Way.INJECT

    @property
    def ways(self) -> tuple[Way, ...]:
        """The ways that may be used."""
        return tuple(Way) if self is LaunchesBy.AUTO else (Way(self),)


@dataclass(frozen=True)
class Options:
    """What to record."""

    output: Path
    command: tuple[str, ...] = ()
    duration_s: float | None = None
    delay_ms: int = 0  # -1: begin when --control says so
    pids: tuple[int, ...] = ()  # these and their children; empty for all processes
    all_samples: bool = False  # take CPU samples of all processes, not only of those of `pids` or `command`
    devices: tuple[str, ...] = ()  # as intel.choose takes them; empty for all
    rate: str | None = None  # as intel.pick_rate takes it
    subsample: int = 1  # keep one of so many records
    launches: LaunchesBy = LaunchesBy.AUTO
    waits: bool = False  # this replaces return addresses in recorded programs: docs/waits.md
    cpu_hz: int = 49
    max_stack: int = MAX_DEPTH  # frames
    metric_interval_ns: int = 10_000_000
    control: str | None = None  # as control.Control takes it
    switch_bytes: int | None = None  # bytes of a spool at which another output file begins
    switch_s: float | None = None
    keep_earlier: bool = False  # a file that has the output's name gets one of its own, instead of being replaced
    max_files: int | None = None
    max_total: int | None = None  # bytes of all finished files of this output name
    max_cpu: float | None = None  # of one CPU, which the recorder may use
    max_bytes: int | None = None  # of all spools together
    symbols: Symbols = Symbols.NEEDED
    is_kept: bool = True  # a capture is made; if not, the spool is removed at the end
    labels: Mapping[str, str] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=Sizes)
