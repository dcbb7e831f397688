"""Joins all stalls of a capture, while threads read the next ones.

What takes long holds no lock of the interpreter: Arrow reads, and records.c goes through the records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.heap import keep_freed
from iaprof.formats.capture.limits import CANDIDATES
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import READ_COLUMNS
from iaprof.gpu.vendors import SAMPLE_ROWS
from iaprof.report.join.attribution import Attribution, RowFilter
from iaprof.report.join.candidates import Rule
from iaprof.report.join.placements import Placed
from iaprof.report.join.seen import Seen
from iaprof.report.join.shares import EnergyOfReads, Joined, JoinedShares, merge_shares, to_whole_counts
from iaprof.report.join.streams import reasons_of, streams

_MOST_KEPT = 64 << 20


@dataclass(frozen=True)
class Task:
    """What to join the stalls to, and the options."""

    placed: Placed
    start_ns: int
    interval_ns: int = 0
    rule: Rule = Rule()  # noqa: RUF009 (it is frozen)
    row_filter: RowFilter = RowFilter()  # noqa: RUF009
    starts: Mapping[int, NDArray[np.uint64]] | None = None
    by_time_ns: int | None = None  # see Attribution
    energy: EnergyOfReads | None = None
    seen: Seen | None = None  # gets when samples of each site were seen


class JoinResult(NamedTuple):
    """What the join of a capture's stalls has found."""

    joined: Joined
    records: int
    cut_addresses: int  # in so many kernels that only some were looked at
    beside_others: int  # records of reads during which programs without kernels had jobs on a GPU
    by_time: Joined | None  # the joined stalls by time, if the task has `by_time_ns`


@contextlib.contextmanager
def samples_ahead(capture: CaptureReader) -> Iterator[Iterator[pa.Table]]:
    """Begins to read the rows that `join` takes, if threads can do it: a table per row group."""
    with contextlib.ExitStack() as stack:
        columns = [(rows.kind, (*READ_COLUMNS, *rows.columns)) for rows in SAMPLE_ROWS]
        yield chain.from_iterable([stack.enter_context(capture.tables_ahead(*each)) for each in columns])


def join(
    capture: CaptureReader,
    task: Task,
    samples: Iterable[pa.Table],
    progress: Callable[[int], None] = lambda records: None,
) -> JoinResult:
    """Joins the stalls of a capture. Adds sites to `task.placed` for stalls without a launch.

    Args:
        capture: the open capture.
        task: what to join them to.
        samples: the capture's, from `samples_ahead`.
        progress: called now and then with the number of records joined so far.

    Raises:
        CaptureError: the capture is damaged.
    """
    placed, sites_before, known = task.placed, len(task.placed.sites), streams(capture.header)
    keep_freed(_MOST_KEPT)  # every row group takes the same memory again
    attribution = Attribution(
        placed,
        task.start_ns,
        task.interval_ns,
        task.rule,
        task.starts,
        task.by_time_ns,
        reasons_of(known),
        task.energy,
        task.seen,
        lambda candidates: capture.count_against(CANDIDATES, candidates),
    )
    records = 0
    for table in samples:
        records += attribution.add(table, known, task.row_filter)
        del table  # frees it before the next one is asked for
        progress(records)
    numbers = _sorted_sites(placed, sites_before)
    if task.seen is not None and not _is_same(numbers):
        task.seen.renumber(numbers)
    by_time = attribution.shares_by_time()
    return JoinResult(
        _whole(attribution.joined_shares(), numbers),
        records,
        attribution.cut_addresses(),
        attribution.beside_others,
        None if by_time is None else _whole(by_time, numbers),
    )


def _whole(shares: JoinedShares, numbers: NDArray[np.int64]) -> Joined:
    """Rounds merged shares, whose sites get new numbers: int64[sites]."""
    if not _is_same(numbers):
        shares = merge_shares([replace(shares, site=numbers[shares.site])])
    return to_whole_counts(shares)


def _is_same(numbers: NDArray[np.int64]) -> bool:
    """Whether each site keeps its number."""
    return np.array_equal(numbers, np.arange(len(numbers)))


def _sorted_sites(placed: Placed, known: int) -> NDArray[np.int64]:
    """Sorts the sites that the join added, those from `known` on; returns the new number of each site: int64[sites].

    The order must not depend on which pairs of a read and a kernel were looked at together.
    """
    added = placed.sites[known:]
    placed.sites[known:] = sorted(set(added), key=lambda site: (site.placement is not None, *astuple(site)))
    number = {site: index for index, site in enumerate(placed.sites[known:], known)}
    return np.append(np.arange(known), np.array([number[site] for site in added], np.int64))
