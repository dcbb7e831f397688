"""Putting events of one clock onto another.

The device's events of a job go into its host's round trip, and the AIU runtime's events into PyTorch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.quantities import counted
from iaprof.formats.distinct import distinct_values, groups
from iaprof.timelines.device_clock import whole
from iaprof.timelines.grouped import rows_of
from iaprof.timelines.options import Options
from iaprof.timelines.placeholders import placed
from iaprof.timelines.trace import ABSENT, Slices, Trace

_LATEST = np.iinfo(np.int64).max
_HOST = "^AIU Roundtrip$"
_FLEX_REFERENCE = "Flex RoundTrip"
_TORCH_REFERENCES = ("built-in method Predict of PyCapsule object", "Torch-Compiled Region")
"""The first of these that there is of a pid."""


@dataclass
class _Jobs:
    """The start and end of the host's and the device's events, by job: a pid of a file."""

    file: NDArray[np.int32]
    pid: NDArray[np.int64]
    of_slice: NDArray[np.int64]  # the job of each slice
    host: NDArray[np.int64]  # [jobs, 2]: start and end, ns; ABSENT
    device: NDArray[np.int64]

    @classmethod
    def of(cls, trace: Trace) -> _Jobs:
        slices = trace.slices
        job, first = groups(slices.file, slices.pid)
        have_times = placed(trace)
        host = _ranges(slices, job, len(first), trace.texts.matches(slices.name, _HOST) & have_times)
        device = _ranges(slices, job, len(first), slices.has_counters & have_times)
        return cls(slices.file[first], slices.pid[first], job, host, device)

    @property
    def outside(self) -> NDArray[np.bool_]:
        """Whether a job's device range is not inside its host's."""
        both = (self.host[:, 0] != ABSENT) & (self.device[:, 0] != ABSENT)
        within = (self.device[:, 0] >= self.host[:, 0]) & (self.device[:, 1] <= self.host[:, 1])
        return np.asarray(both & ~within, bool)

    @property
    def wider(self) -> NDArray[np.bool_]:
        """Whether a job's device range is outside and longer than its host's."""
        return np.asarray(self.outside & (np.diff(self.device)[:, 0] > np.diff(self.host)[:, 0]), bool)


def _ranges(slices: Slices, job: NDArray[np.int64], jobs: int, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Returns the first start and the last end of the slices in a mask: int64[jobs, 2]; ABSENT without slices."""
    ranges = np.full((jobs, 2), ABSENT, np.int64)
    first = np.full(jobs, _LATEST, np.int64)
    np.minimum.at(first, job[mask], slices.start[mask])
    np.maximum.at(ranges[:, 1], job[mask], slices.start[mask] + whole(slices.duration[mask]))
    ranges[:, 0] = np.where(first == _LATEST, ABSENT, first)
    return ranges


def frequency_align_collect(trace: Trace, _: Options) -> None:
    """Warns of jobs whose device events are not in the host's round trip, and of jobs at the same time."""
    jobs = _Jobs.of(trace)
    name = [f"{trace.files[file].name} (pid {pid})" for file, pid in zip(jobs.file, jobs.pid, strict=True)]
    if count := int((jobs.outside & ~jobs.wider).sum()):
        first = name[int(np.argmax(jobs.outside & ~jobs.wider))]
        text = f"Moved device events into the host's round trip in {counted(count, 'job')}, first {first}"
        trace.messages.warn("FREQ", text)
    if count := int(jobs.wider.sum()):
        first = name[int(np.argmax(jobs.wider))]
        text = (
            f"Left device events that last longer than the host's round trip in {counted(count, 'job')}, first {first}"
        )
        trace.messages.warn("FREQ", text)
    known = np.flatnonzero(jobs.host[:, 0] != ABSENT)
    known = known[np.lexsort((jobs.host[known, 0], jobs.pid[known]))]
    overlap = (np.diff(jobs.pid[known]) == 0) & (jobs.host[known[1:], 0] < jobs.host[known[:-1], 1])
    if count := int(overlap.sum()):
        where = int(np.argmax(overlap))
        text = (
            f"Found {counted(count, 'job')} that began before the one before had ended, first {name[known[where + 1]]}:"
            " the frequency may be wrong"
        )
        trace.messages.warn("FREQ", text)


def frequency_align_apply(trace: Trace, _: Options) -> None:
    """Moves a job's device events to the start of its host's round trip; `ts_adj` says by how many us."""
    jobs = _Jobs.of(trace)
    moved = jobs.outside & ~jobs.wider
    offset = np.where(moved, jobs.host[:, 0] - jobs.device[:, 0], 0)[jobs.of_slice]
    device = trace.slices.has_counters & moved[jobs.of_slice]
    if device.any():
        trace.slices.start = trace.slices.start + np.where(device, offset, 0)
        trace.slices.extra["ts_adj"] = np.where(device, offset / 1e3, np.nan)


@dataclass
class _Offsets:
    """How far the runtime's events are from PyTorch's."""

    ns: dict[int, int]  # by pid
    of_all: int | None = None  # of all pids, if there is one rank
    uneven: int = 0  # pids with more references of one clock than of the other

    @classmethod
    def of(cls, trace: Trace) -> _Offsets:
        flex = trace.texts.matches(trace.slices.name, _FLEX_REFERENCE)
        torch = [trace.texts.matches(trace.slices.name, name) & ~flex for name in _TORCH_REFERENCES]
        if not flex.any() or not (torch[0] | torch[1]).any():
            return cls({})
        slices = trace.slices
        flex_pids = distinct_values(slices.pid[flex])
        # The pid is the process's in PyTorch, and the rank in the runtime: that of the file, if it has one of its own.
        ranks = np.array([file.rank for file in trace.files])[slices.file]
        own = np.isin(slices.pid, flex_pids)
        rank_of = np.where(own | ~trace.is_torch(slices), slices.pid, ranks)
        torch_pids = distinct_values(slices.pid[torch[0] | torch[1]])
        if len(np.union1d(flex_pids, torch_pids)) == 2 and len(flex_pids) == len(torch_pids) == 1:
            ns, uneven = _offset(slices, np.flatnonzero(flex), _preferred(*map(np.flatnonzero, torch)))
            return cls({}, ns, uneven)
        offsets = cls({})
        kinds = [np.flatnonzero(flex), *map(np.flatnonzero, torch)]
        owners = [slices.pid[kinds[0]], rank_of[kinds[1]], rank_of[kinds[2]]]
        rows = (rows_of(owner, flex_pids) for owner in owners)
        for pid, *its in zip(flex_pids.tolist(), *rows, strict=True):
            own, predicts, regions = (kind[places] for kind, places in zip(kinds, its, strict=True))
            references = _preferred(predicts, regions)
            if len(references):
                offsets.ns[pid], uneven = _offset(slices, own, references)
                offsets.uneven += uneven
        return offsets

    def __getitem__(self, pid: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.of_all is not None:
            return np.full(len(pid), self.of_all, np.int64)
        pids, ns = (np.array(sorted(self.ns.items()), np.int64).reshape(-1, 2).T) if self.ns else np.zeros((2, 1), int)
        place = np.minimum(np.searchsorted(pids, pid), len(pids) - 1)
        return np.where(pids[place] == pid, ns[place], 0)


def _preferred(first: NDArray[np.intp], second: NDArray[np.intp]) -> NDArray[np.intp]:
    return first if len(first) else second


def _offset(slices: Slices, flex: NDArray[np.intp], torch: NDArray[np.intp]) -> tuple[int, int]:
    """Returns the ns by which to move the runtime's events so that they end before PyTorch's, and 1 if some are alone.

    References (rows of slices) are paired in the order of time.
    """
    pairs = min(len(flex), len(torch))
    ends = []
    for rows in (flex, torch):
        rows = rows[np.argsort(slices.start[rows], kind="stable")][:pairs]
        ends.append(slices.start[rows] + whole(slices.duration[rows]))
    return int((ends[1] - ends[0]).min()), int(len(flex) != len(torch))


def time_align_collect(trace: Trace, _: Options) -> None:
    """Reports by how much events of the runtime move; warns if it has more or fewer round trips than PyTorch."""
    offsets = _Offsets.of(trace)
    if offsets.of_all:
        text = f"Events of the AIU's runtime move by {offsets.of_all / 1e3:.3f} us onto PyTorch's clock"
        trace.messages.note("TALN", text)
    for pid, ns in offsets.ns.items():
        if ns:
            text = f"Events of the AIU's runtime of pid {pid} move by {ns / 1e3:.3f} us onto PyTorch's clock"
            trace.messages.note("TALN", text)
    if offsets.uneven:
        text = (
            f"Found {counted(offsets.uneven, 'pid')} with more round trips in one of PyTorch's and the runtime's traces"
            " than in the other: the clocks may be aligned wrongly. Check that all files are of one run"
        )
        trace.messages.warn("TALN", text)


def time_align_apply(trace: Trace, _: Options) -> None:
    """Moves events of the runtime onto PyTorch's clock.

    These are slices without `External id` and `Python id`. All events of a file of PyTorch's have one clock, so they
    are not moved, unless the runtime's round trips are also in that file.
    """
    offsets = _Offsets.of(trace)
    if offsets.of_all is None and not offsets.ns:
        return
    slices = trace.slices
    flex = trace.texts.matches(slices.name, _FLEX_REFERENCE)
    torch = np.zeros(len(slices), bool)
    for name in _TORCH_REFERENCES:
        torch |= trace.texts.matches(slices.name, name) & ~flex
    for name in ("External id", "Python id"):
        if (values := slices.extra.get(name)) is not None:
            torch |= ~np.isnan(values) if values.dtype.kind == "f" else (values != ABSENT) & (values != -1)
    mixed = np.isin(np.arange(len(trace.files)), slices.file[flex])
    of_torch = trace.torch_files
    has_torch = of_torch | np.isin(np.arange(len(trace.files)), slices.file[torch])
    moving = ~torch & ~(of_torch & ~mixed)[slices.file]
    slices.start = slices.start + np.where(moving, offsets[slices.pid], 0)
    for table in (trace.points, trace.flows, trace.instants):
        table.time = table.time + np.where(has_torch[table.file], 0, offsets[table.pid])
