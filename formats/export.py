"""The input of a writer: a profile and what was recorded besides stalls. All times are relative to `About.begun`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from iaprof.formats.profile import Launch, Profile

if TYPE_CHECKING:  # without NumPy, the registry of formats imports fast
    import numpy as np
    from numpy.typing import NDArray

    from iaprof.formats.host_times import HostTimes


@dataclass(frozen=True)
class About:
    """A capture's description, for titles and headings. All texts are clean: writers can print them as they are."""

    host: str = ""  # of all machines, joined
    command: str = ""  # as a shell would take it
    gpus: str = ""  # names of all GPUs, joined
    begun: float = 0.0  # seconds since 1970 of time 0; 0 if unknown
    seconds: float = 0.0  # length of the recording; 0 if unknown
    facts: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()  # groups: a heading, and (name, text) pairs
    warnings: Sequence[str] = ()  # for the reader to see first, such as large losses
    headline: Sequence[str] = ()  # the main figures: samples, losses, match rates, cost

    @property
    def title(self) -> str:
        """One line: command, GPUs and host."""
        return " · ".join(each for each in (self.command, self.gpus, self.host) if each)


@dataclass(frozen=True, eq=False)
class CpuSamples:
    """CPU samples by distinct (launch, interval), in the profile's intervals."""

    launches: Sequence[Launch]  # the stack of each sample; no kernel is launched there
    launch: NDArray[np.int64]  # [n], index into launches
    interval: NDArray[np.int64]  # [n]
    count: NDArray[np.int64]  # [n]
    left_out: Counter[str] = field(default_factory=Counter)  # samples that are not here, by formats.header.left_out


@dataclass(frozen=True, eq=False)
class Series:
    """A metric as a time series."""

    name: str  # "frequency-actual-MHz"
    place: str  # the GPU, GT or process; "" if there is only one
    seconds: NDArray[np.float64]  # [n], ascending
    values: NDArray[np.float64]  # [n], in the unit at the end of the name


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread that launches kernels or waits."""

    comm: str
    pid: int
    tid: int
    host: str = ""


@dataclass(frozen=True, eq=False)
class Launches:
    """Launches over time: consecutive launches of one kernel by one thread, at most `gap` apart, form a run."""

    kernels: Sequence[str]
    threads: Sequence[Thread]
    kernel: NDArray[np.int64]  # [n], index into kernels
    thread: NDArray[np.int64]  # [n], index into threads
    begin: NDArray[np.float64]  # [n], seconds: the first launch of the run
    end: NDArray[np.float64]  # [n], seconds: the last launch of the run
    count: NDArray[np.int64]  # [n], launches in the run
    gap: float = 0.0  # seconds: the maximum distance between launches of a run


@dataclass(frozen=True, slots=True)
class Track:
    """A kernel that one stack launches, on one GPU."""

    device: str  # the GPU; "" if unknown
    kernel: str
    launch: Launch | None = None  # None: unknown, or several
    queue: int = 0  # handle of the queue of all these launches, in their process; 0: unknown, or several


@dataclass(frozen=True, eq=False)
class Executions:
    """When samples of kernels were seen: a run is successive reads with samples of a track."""

    tracks: Sequence[Track]
    track: NDArray[np.int64]  # [n], index into tracks
    begin: NDArray[np.float64]  # [n], seconds: no sample of the run is older
    end: NDArray[np.float64]  # [n], seconds: the last read of the run
    count: NDArray[np.int64]  # [n], samples; those of a track add up to the profile's

    def on(self, host: str) -> Executions:
        """Returns the same, of a machine of this name."""
        launches = [each.launch and replace(each.launch, host=host) for each in self.tracks]
        tracks = [
            replace(each, device=f"{host} {each.device}".strip(), launch=launch)
            for each, launch in zip(self.tracks, launches, strict=True)
        ]
        return replace(self, tracks=tracks)

    @classmethod
    def joined(cls, several: Sequence[Executions]) -> Executions:
        """Returns all runs of several."""
        import numpy as np

        before = np.cumsum([0, *(len(each.tracks) for each in several)])
        columns = [np.concatenate([getattr(each, name) for each in several]) for name in ("begin", "end", "count")]
        track = np.concatenate([each.track + first for each, first in zip(several, before.tolist(), strict=False)])
        return cls([track for each in several for track in each.tracks], track, *columns)


@dataclass(frozen=True, eq=False)
class OperatorSlices:
    """What a framework did on its threads, from traces: slices of a thread and depth do not overlap."""

    names: Sequence[str]
    threads: Sequence[Thread]
    name: NDArray[np.int64]  # [n], index into names
    thread: NDArray[np.int64]  # [n], index into threads
    depth: NDArray[np.int64]  # [n], 0 for the outermost
    begin: NDArray[np.float64]  # [n], seconds
    end: NDArray[np.float64]  # [n], seconds
    all: int  # how many there are with those that are left out, the shortest

    def only(self, rows: NDArray[Any]) -> OperatorSlices:
        """Returns some slices: bool[n], or indices int64[m]."""
        columns = {name: getattr(self, name)[rows] for name in ("name", "thread", "depth", "begin", "end")}
        return replace(self, **columns)


@dataclass(frozen=True, eq=False)
class Export:
    """All that a writer may use; members beyond its `Needs` may be missing."""

    profile: Profile
    about: About = About()
    interval_s: float = 0.0  # length of the profile's intervals; 0 if the profile is not divided
    by_time: Profile | None = None  # by interval, with one row per kernel; None if `profile` has all of it
    cpu: CpuSamples | None = None
    series: Sequence[Series] = ()
    launches: Launches | None = None
    waits: Launches | None = None  # for the GPU, with the waiting functions as `kernels`
    executions: Executions | None = None
    operators: OperatorSlices | None = None  # in which kernels were launched; None if there is no trace
    hosts: HostTimes | None = None  # samples by host and time of day; None: this is one capture
    listings: Sequence[dict[str, Any]] = ()  # annotated kernels, as in the output of `iaprof annotate --json`
