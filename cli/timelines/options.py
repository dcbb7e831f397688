"""Options of time lines: of the stages of `iaprof timeline`, and of verbs that also show stalls."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.cli.options.declared import For, Of

if TYPE_CHECKING:
    from iaprof.timelines.options import Limit, Options

CLOCKS, SHOWN, MEASURED = "Clocks and order", "Filters and merging", "Measurements"
_LIMIT_KEYS = {"skip", "count", "ts_start", "ts_end", "no_count_types"}
_US = 1000  # ns
_Choice = TypeVar("_Choice", bound=StrEnum)


DEFAULT_FREQ = "1000:1100"
FREQ = typer.Option(
    "--freq",
    metavar="SOC[:CORE]",
    help="For time lines: frequency of the device and of its cores, in MHz.",
    show_default=False,
)


@dataclass(frozen=True)
class DeviceOptions:
    """Options about the devices of time lines, of verbs that also show stalls.

    Raises:
        UsageError: a frequency is not a positive number.
        IaprofError: a compiler log does not exist or cannot be read.
    """

    freq: Annotated[str | None, FREQ, For(Of.TIME_LINES | Of.TREE)] = None

    def __post_init__(self) -> None:
        """Checks the values."""
        _ = self.frequencies

    @cached_property
    def frequencies(self) -> tuple[float, float]:
        """The frequencies of the device and of its cores, in MHz."""
        return _frequencies(self.freq or DEFAULT_FREQ)

    def stage_options(self) -> Options:
        """Returns the options of the stages."""
        from iaprof.timelines.options import Options

        soc, core = self.frequencies
        return Options(soc_mhz=soc, core_mhz=core)


@dataclass(frozen=True)
class LoggedDeviceOptions(DeviceOptions):
    """Options about the devices of time lines, with compiler logs."""

    compiler_log: Annotated[
        list[str] | None,
        typer.Option(
            "--compiler-log",
            "-c",
            metavar="FILE",
            help="For time lines: a compiler log or folder with ideal cycles; repeat it for each rank.",
            show_default=False,
        ),
        For(Of.TIME_LINES),
    ] = None

    def stage_options(self) -> Options:
        """Returns the options of the stages; IaprofError if a log does not exist or cannot be read."""
        return replace(super().stage_options(), compiler_logs=_existing_logs(self.compiler_log or ()))


@dataclass(frozen=True)
class StageOptions:
    """The options of the stages of `iaprof timeline`.

    Raises:
        UsageError: an option does not take the value that it was given.
        IaprofError: a compiler log does not exist or cannot be read.
    """

    freq: Annotated[
        str,
        typer.Option(
            "--freq",
            metavar="SOC[:CORE]",
            rich_help_panel=CLOCKS,
            help="Frequency of the device and of its cores, in MHz.",
        ),
    ] = DEFAULT_FREQ
    align_jobs: Annotated[
        bool,
        typer.Option(
            "--align-jobs", rich_help_panel=CLOCKS, help="Move a job's device events into the host's round trip."
        ),
    ] = False
    ranks: Annotated[
        str,
        typer.Option(
            "--align-ranks",
            metavar="HOW",
            rich_help_panel=CLOCKS,
            help="Align the ranks' clocks by their collectives: tight, dilated (also by the run's length), or none.",
        ),
    ] = "tight"
    overlap: Annotated[
        str,
        typer.Option(
            "--overlap",
            metavar="HOW",
            rich_help_panel=CLOCKS,
            help="How to show slices that partly overlap: tid (in rows of their own), drop, async, shift, warn.",
        ),
    ] = "tid"
    max_tid_streams: Annotated[
        int,
        typer.Option(
            "--max-tid-streams",
            metavar="N",
            rich_help_panel=CLOCKS,
            help="Use at most N rows for overlapping slices; -1: no limit.",
        ),
    ] = 5
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="ATTRIBUTE:REGEX",
            rich_help_panel=SHOWN,
            help="Drop matching slices. Can be repeated.",
        ),
    ] = None
    limit: Annotated[
        str,
        typer.Option(
            "--limit",
            metavar="JSON",
            rich_help_panel=SHOWN,
            help='Events to read: {"skip": N, "count": N, "ts_start": US, "ts_end": US, "no_count_types": "M"}.',
        ),
    ] = ""
    phases: Annotated[
        str, typer.Option("--phases", metavar="LETTERS", rich_help_panel=SHOWN, help="Only events of these phases.")
    ] = ""
    drop_globals: Annotated[
        bool,
        typer.Option("--drop-globals", rich_help_panel=SHOWN, help="Drop host events that span all others."),
    ] = False
    keep_prep: Annotated[
        bool, typer.Option("--keep-prep", rich_help_panel=SHOWN, help="Keep the slices of preparations.")
    ] = False
    keep_names: Annotated[
        bool, typer.Option("--keep-names", rich_help_panel=SHOWN, help="Keep the numbers in names.")
    ] = False
    split: Annotated[
        bool, typer.Option("--split", rich_help_panel=SHOWN, help="Split operations into DmaI, Cmpt and DmaO.")
    ] = False
    merge_sends: Annotated[
        bool,
        typer.Option(
            "--merge-sends", rich_help_panel=SHOWN, help="Merge the events of a send or receive into one slice."
        ),
    ] = False
    flows: Annotated[
        bool, typer.Option("--flow", rich_help_panel=SHOWN, help="Draw arrows between the events of collectives.")
    ] = False
    collectives: Annotated[
        bool, typer.Option("--collectives", rich_help_panel=SHOWN, help="Add a slice for each collective of a rank.")
    ] = False
    counters: Annotated[
        str,
        typer.Option(
            "--counters",
            metavar="NAME,...",
            rich_help_panel=MEASURED,
            help="Only these counters, of power_ts4, power_ts3, coll_bw, bandwidth, prep_queue, rcu_util; or none.",
        ),
    ] = "power_ts4,coll_bw,prep_queue,rcu_util"
    compiler_log: Annotated[
        list[str] | None,
        typer.Option(
            "--compiler-log",
            "-c",
            metavar="FILE",
            rich_help_panel=MEASURED,
            help="Read ideal cycles from this compiler log or folder; repeat it for each rank.",
        ),
    ] = None
    power_scale: Annotated[
        float,
        typer.Option(
            "--power-scale",
            metavar="WATTS",
            rich_help_panel=MEASURED,
            help="Watts per unit of charge per us; a warning suggests a value if this one gives impossible power.",
        ),
    ] = 12 / 512
    power_skip: Annotated[
        bool,
        typer.Option(
            "--power-skip", rich_help_panel=MEASURED, help="Leave out Exec after Exec, and DmaI after DmaO or Exec."
        ),
    ] = False
    power_stats: Annotated[
        bool, typer.Option("--power-stats", rich_help_panel=MEASURED, help="Add statistics of the power.")
    ] = False

    def __post_init__(self) -> None:
        """Checks the values."""
        _ = self.options

    @cached_property
    def options(self) -> Options:
        """The options as the stages take them."""
        from iaprof.timelines.options import CounterTrack, Options, Overlap

        soc, core = _frequencies(self.freq)
        if self.power_stats and "power_ts4" not in self.counters:
            raise UsageError("--power-stats needs the counter power_ts4")
        tracks = frozenset(_choice(CounterTrack, name, "--counters") for name in _names(self.counters))
        if {CounterTrack.POWER_TS3, CounterTrack.POWER_TS4} <= tracks:
            raise UsageError("--counters: power_ts3 and power_ts4 are two ways to measure the same; give one of them")
        if self.ranks not in ("tight", "dilated", "none"):
            raise UsageError(f"--align-ranks: there is no {self.ranks}; there are tight, dilated, none")
        if not 0 < self.power_scale < float("inf"):
            raise UsageError(f"--power-scale: {self.power_scale:g} is not a number of watts above 0")
        if self.max_tid_streams < -1:
            raise UsageError("--max-tid-streams: give a number of rows, or -1 for no limit")
        return Options(
            soc_mhz=soc,
            core_mhz=core,
            tracks=tracks,
            compiler_logs=_existing_logs(self.compiler_log or ()),
            filters=tuple(_filter(each) for each in self.filters or ()),
            limit=_limit(self.limit),
            phases=self.phases,
            flows=self.flows,
            collectives=self.collectives,
            merge_sends=self.merge_sends,
            align_jobs=self.align_jobs,
            drop_globals=self.drop_globals,
            keep_preparations=self.keep_prep,
            keep_names=self.keep_names,
            power_statistics=self.power_stats,
            power_scale=self.power_scale,
            power_of_first=self.power_skip,
            align_ranks=self.ranks == "tight",
            dilate_ranks=self.ranks == "dilated",
            overlap=_choice(Overlap, self.overlap, "--overlap"),
            most_extra_tids=self.max_tid_streams,
            split=self.split,
        )


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return [] if names == ["none"] else names


def _choice(values: type[_Choice], text: str, option: str) -> _Choice:
    try:
        return values(text)
    except ValueError:
        raise UsageError(f"{option}: there is no {text}; there are {', '.join(values)}") from None


def _frequencies(text: str) -> tuple[float, float]:
    """Returns the frequencies of a device and its cores in MHz; UsageError if the text has no such numbers."""
    words = text.split(":")
    try:
        values = [float(word) for word in words]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 2 or not all(0 < value < float("inf") for value in values):
        raise UsageError(f"--freq: {text} is not a frequency in MHz, such as 1000 or 1000:1100")
    return values[0], values[1] if len(values) == 2 else 1100.0


def _existing_logs(paths: Sequence[str]) -> tuple[str, ...]:
    """Returns the paths of compiler logs; IaprofError if one does not exist or cannot be read."""
    for path in paths:
        try:
            exists = os.path.isfile(path) or os.path.isdir(path)
        except ValueError:  # the path has a zero byte
            exists = False
        if not exists:
            raise IaprofError(f"-c: {path} is neither a file nor a folder: name a compiler log, or a folder of one")
        if not os.access(path, os.R_OK):
            raise IaprofError(f"-c: {path} cannot be read: Permission denied")
    return tuple(paths)


def _filter(text: str) -> tuple[str, str]:
    import pyarrow as pa
    import pyarrow.compute as pc

    attribute, colon, pattern = text.partition(":")
    try:
        pc.match_substring_regex(pa.array([""]), pattern)
    except pa.ArrowException:
        colon = ""
    if not colon or not attribute:
        raise UsageError(f"--filter: {text} is not an ATTRIBUTE:REGEX, such as name:^warm")
    return attribute, pattern


def _limit(text: str) -> Limit:
    from iaprof.timelines.options import Limit

    if not text:
        return Limit()
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict) or not values.keys() <= _LIMIT_KEYS:
        raise UsageError(f"--limit: {text} is not a JSON object with {', '.join(sorted(_LIMIT_KEYS))}")
    numbers = {key: value for key, value in values.items() if key != "no_count_types"}
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in numbers.values()):
        raise UsageError(f"--limit: {text} has a value that is not a number")
    count = values.get("count")
    return Limit(
        skip=int(values.get("skip", 0)),
        count=None if count is None else int(count),
        start_ns=None if "ts_start" not in values else round(values["ts_start"] * _US),
        end_ns=None if "ts_end" not in values else round(values["ts_end"] * _US),
        phases_not_counted=str(values.get("no_count_types", "M")),
    )
