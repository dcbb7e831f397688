"""What a writer can write: a profile, and what was recorded beside the stalls. All times count from `About.begun`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from iaprof.formats.profile import Launch, Profile

if TYPE_CHECKING:  # who only wants to know of a format needs no NumPy
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class About:
    """What is to be said of a capture. Texts are clean: they can be shown as they are."""

    host: str = ""  # names of all machines
    command: str = ""  # as it would be typed
    gpus: str = ""  # names of all
    begun: float = 0.0  # seconds since 1970, of time 0; 0 when unknown
    seconds: float = 0.0  # how long was recorded; 0 when unknown
    facts: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()  # groups: a heading, names and what is said of each
    warnings: Sequence[str] = ()  # what a reader has to know before anything else, such as much loss
    headline: Sequence[str] = ()  # what matters most: how much there is, was lost, has its place, cost

    @property
    def title(self) -> str:
        """One line: the command, GPUs and host."""
        return " · ".join(each for each in (self.command, self.gpus, self.host) if each)


@dataclass(frozen=True, eq=False)
class CpuSamples:
    """What the CPUs did, in the profile's intervals: distinct (launch, interval) and how often."""

    launches: Sequence[Launch]  # of samples: no kernel is launched there
    launch: NDArray[np.int64]  # [n], index into launches
    interval: NDArray[np.int64]  # [n]
    count: NDArray[np.int64]  # [n]


@dataclass(frozen=True, eq=False)
class Series:
    """A metric over time."""

    name: str  # "frequency-actual-MHz"
    place: str  # which GPU, GT or process; "" when there is only one
    seconds: NDArray[np.float64]  # [n], ascending
    values: NDArray[np.float64]  # [n], in the unit at the end of the name


@dataclass(frozen=True, slots=True)
class Thread:
    """Who launches."""

    comm: str
    pid: int
    tid: int
    host: str = ""


@dataclass(frozen=True, eq=False)
class Launches:
    """Launches over time; those of one kernel by one thread that follow one another closely are one run."""

    kernels: Sequence[str]
    threads: Sequence[Thread]
    kernel: NDArray[np.int64]  # [n], index into kernels
    thread: NDArray[np.int64]  # [n], index into threads
    begin: NDArray[np.float64]  # [n], seconds, of the run's first launch
    end: NDArray[np.float64]  # [n], seconds, of its last launch
    count: NDArray[np.int64]  # [n], launches of the run
    gap: float = 0.0  # seconds: launches of a run are at most so far apart


@dataclass(frozen=True, eq=False)
class Export:
    """Everything a writer may ask for; what it does not need may be missing."""

    profile: Profile
    about: About = About()
    interval_s: float = 0.0  # length of the profile's intervals; 0: all is in one
    by_time: Profile | None = None  # by interval, each kernel's instructions in one; None: the profile has everything
    cpu: CpuSamples | None = None
    series: Sequence[Series] = ()
    launches: Launches | None = None
    waits: Launches | None = None  # for the GPU; functions are in the place of kernels
    listings: Sequence[dict[str, Any]] = ()  # kernels as `iaprof annotate --json` has them
