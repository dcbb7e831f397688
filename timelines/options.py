"""The options of the stages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SOC_MHZ, CORE_MHZ = 1000.0, 1100.0


class Overlap(StrEnum):
    """What to do with a slice that partly overlaps another one of its row."""

    TID = "tid"  # it gets a row of its own
    DROP = "drop"
    ASYNC = "async"  # it becomes an asynchronous event
    SHIFT = "shift"  # it starts later, if by very little
    WARN = "warn"


class CounterTrack(StrEnum):
    """Counters that stages make."""

    POWER_TS4 = "power_ts4"
    POWER_TS3 = "power_ts3"
    COLLECTIVE_BANDWIDTH = "coll_bw"
    BANDWIDTH = "bandwidth"
    PREPARATIONS = "prep_queue"
    UTILIZATION = "rcu_util"


DEFAULT_TRACKS = frozenset(
    {CounterTrack.POWER_TS4, CounterTrack.COLLECTIVE_BANDWIDTH, CounterTrack.PREPARATIONS, CounterTrack.UTILIZATION}
)


@dataclass(frozen=True)
class Limit:
    """Which events are read."""

    skip: int = 0  # events
    count: int | None = None  # events; None: all
    start_ns: int | None = None
    end_ns: int | None = None
    phases_not_counted: str = "M"  # always read


@dataclass(frozen=True)
class Options:
    """Options of the stages."""

    soc_mhz: float = SOC_MHZ
    core_mhz: float = CORE_MHZ
    tracks: frozenset[CounterTrack] = DEFAULT_TRACKS
    compiler_logs: tuple[str, ...] = ()  # paths: one for all ranks, or one for each rank
    filters: tuple[tuple[str, str], ...] = ()  # (attribute, regular expression): slices to drop
    limit: Limit = Limit()
    phases: str = ""  # phases to keep; "": all
    flows: bool = False  # between the events of collectives
    collectives: bool = False  # a slice for each collective of a rank
    merge_sends: bool = False  # one slice for the events of a send or receive
    align_jobs: bool = False  # put device events of a job into its host's round trip
    drop_globals: bool = False
    keep_preparations: bool = False
    keep_names: bool = False  # with their numbers
    power_statistics: bool = False
    power_scale: float = 12 / 512  # watts of a unit of charge a us
    power_of_first: bool = False  # leave out Exec after Exec, and DmaI after DmaO or Exec
    align_ranks: bool = True
    dilate_ranks: bool = False  # align ranks by the length of a run, too
    overlap: Overlap = Overlap.TID
    most_extra_tids: int = 5  # -1: no limit
    split: bool = False  # each operation into DmaI, Cmpt and DmaO
    tables: bool = True
