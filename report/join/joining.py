"""Joins all stalls of a capture, on two cores if it is large: a second process joins every other row group.

Threads would not help, as much of the work holds the GIL. The second process sends its result through a pipe once, at
the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.basics.heap import keep_freed
from iaprof.formats.capture.limits import CANDIDATES
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import READ_COLUMNS
from iaprof.gpu.vendors import SAMPLE_ROWS
from iaprof.report.join.attribution import Attribution, RowFilter
from iaprof.report.join.candidates import Rule
from iaprof.report.join.placements import Placed, Site
from iaprof.report.join.seen import Seen
from iaprof.report.join.shares import EnergyOfReads, Joined, JoinedShares, merge_shares, to_whole_counts
from iaprof.report.join.streams import reasons_of, streams
from iaprof.sandbox.memory import MALLOC_ENVIRONMENT, limit, limit_memory
from iaprof.sandbox.worker import Worker

_FEWEST_GROUPS = 6  # row groups of about a million records each: starting a second process pays off
_PROCESSES = 2
_MOST_KEPT = 64 << 20


_Shares = tuple[JoinedShares, JoinedShares | None]


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


def join(
    capture: CaptureReader,
    task: Task,
    helper: Helper | None = None,
    progress: Callable[[int], None] = lambda records: None,
) -> tuple[Joined, int, int, Joined | None]:
    """Joins the stalls of a capture. Adds sites to `task.placed` for stalls without a launch.

    Args:
        capture: the open capture.
        task: what to join them to.
        helper: a second process for this capture; None to do all the work here.
        progress: called now and then with the number of records joined so far.

    Returns:
        The joined stalls; the number of records; that of addresses in so many kernels that only some were looked at;
        and the joined stalls by time, if the task has `by_time_ns`.

    Raises:
        CaptureError: the capture is damaged.
        IaprofError: the helper died.
    """
    placed, known = task.placed, len(task.placed.sites)
    if helper is None:
        own, records, cut = _share(capture, task, (0, 1), progress)
        numbers = _sorted_sites(placed, known)
        if task.seen is not None:
            task.seen.renumber(numbers)
        whole, by_time = (_whole([(shares, numbers)]) for shares in own)
    else:
        helper.give(task)
        own, records, cut = _share(capture, task, (0, _PROCESSES), lambda done: progress(_PROCESSES * done))
        others, sites, others_records, others_cut, others_seen = helper.answer()
        of_other = np.arange(len(sites))
        of_other[known:] += len(placed.sites) - known  # after the sites that this process added
        placed.sites += sites[known:]
        numbers = _sorted_sites(placed, known)
        if task.seen is not None:
            task.seen.renumber(numbers)
            task.seen.merge(others_seen, numbers[of_other])
        whole, by_time = (
            _whole([(one, numbers), (other, numbers[of_other])]) for one, other in zip(own, others, strict=True)
        )
        records, cut = records + others_records, max(cut, others_cut)
    assert whole is not None
    return whole, records, cut, by_time


def _whole(several: list[tuple[JoinedShares | None, NDArray[np.int64]]]) -> Joined | None:
    """Merges shares of processes, each with the new number of its sites: int64[sites]; None if these are None."""
    found = [replace(shares, site=numbers[shares.site]) for shares, numbers in several if shares is not None]
    return to_whole_counts(merge_shares(found)) if found else None


@contextlib.contextmanager
def helping(capture: CaptureReader) -> Iterator[Helper | None]:
    """Starts a second process, which imports in the background; None for a capture that is small or in a store."""
    is_small = (
        sum(capture.groups(rows.kind) for rows in SAMPLE_ROWS) < _FEWEST_GROUPS
        or len(os.sched_getaffinity(0)) < _PROCESSES
    )
    if is_small or capture.is_stored:
        yield None
        return
    try:
        helper = Helper(capture)
    except OSError:
        helper = None  # a limit on processes, perhaps: one process takes longer
    try:
        yield helper
    finally:
        if helper is not None:
            helper.close()


class Helper:
    """A process that joins every other row group."""

    def __init__(self, capture: CaptureReader) -> None:
        """Starts the process.

        Raises:
            OSError: the system refuses another process.
        """
        self._path = capture.path
        self._process = Worker(
            "iaprof.report.join.joining:help_other",
            limit() or 0,
            channel=socket.SOCK_STREAM,
            environment=os.environ | MALLOC_ENVIRONMENT,
        )
        from multiprocessing.connection import Connection  # here, as only large captures need it

        self._pipe = Connection(self._process.channel.detach())
        self._send((capture.path, capture.number, _digest(capture)))

    def give(self, task: Task) -> None:
        """Sends the task."""
        # The process needs no code, only where kernels lie.
        bare = replace(task.placed, placements=[replace(each, kernel=None) for each in task.placed.placements])
        self._send(replace(task, placed=bare))

    def _send(self, what: Any) -> None:
        with contextlib.suppress(ConnectionError):  # the process died: `answer` reports it
            self._pipe.send(what)

    def answer(self) -> tuple[_Shares, list[Site], int, int, Seen | None]:
        """Waits for the result: the shares, the sites that they refer to, the numbers of `join`, and `Task.seen`.

        Raises:
            CaptureError: the capture is damaged.
            IaprofError: the process died.
        """
        try:
            found: Any = self._pipe.recv()
        except (EOFError, OSError):  # OSError: the message is incomplete
            raise IaprofError(
                f"the second process that joins the stalls of {self._path} was ended, "
                "as happens when memory runs out: try again"
            ) from None
        if isinstance(found, Exception):
            raise found
        shares, sites, records, cut, seen = found
        return shares, sites, records, cut, seen

    def close(self) -> None:
        """Kills the process, whatever it does."""
        self._process.close()
        self._pipe.close()


def _share(
    capture: CaptureReader, task: Task, share: tuple[int, int], progress: Callable[[int], None]
) -> tuple[_Shares, int, int]:
    """Joins some row groups; returns the shares, of all time and by time, and the numbers that `join` returns."""
    known = streams(capture.header)
    keep_freed(_MOST_KEPT)  # every row group takes the same memory again
    attribution = Attribution(
        task.placed,
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
    for rows in SAMPLE_ROWS:
        for table in capture.tables(rows.kind, (*READ_COLUMNS, *rows.columns), share):
            records += attribution.add(table, known, task.row_filter)
            del table  # frees it before the next one is read
            progress(records)
    return (attribution.joined_shares(), attribution.shares_by_time()), records, attribution.cut_addresses()


def _sorted_sites(placed: Placed, known: int) -> NDArray[np.int64]:
    """Sorts the sites that the join added, those from `known` on; returns the new number of each site: int64[sites].

    The order must not depend on which process added a site first: reports are the same on one core and on two.
    """
    added = placed.sites[known:]
    placed.sites[known:] = sorted(set(added), key=lambda site: (site.placement is not None, *astuple(site)))
    number = {site: index for index, site in enumerate(placed.sites[known:], known)}
    return np.append(np.arange(known), np.array([number[site] for site in added], np.int64))


def _digest(capture: CaptureReader) -> bytes:
    """Returns a digest of the header, which differs if another capture lies at this path meanwhile."""
    return hashlib.sha256(repr(capture.header).encode()).digest()


def help_other(memory_bytes: str, pipe_fd: int = 0) -> None:
    """The second process's main function.

    Args:
        memory_bytes: the limit on its memory; 0: none.
        pipe_fd: the connection to the first process.
    """
    from multiprocessing.connection import Connection

    if int(memory_bytes):
        limit_memory(int(memory_bytes))
    with Connection(pipe_fd) as pipe, contextlib.suppress(EOFError, OSError):  # the first process is gone
        path, number, digest = pipe.recv()
        answer: Any
        try:
            parts = CaptureReader(path).parts
            if number >= len(parts) or _digest(parts[number]) != digest:
                raise IaprofError(f"{path} was changed while it was read: try again")
            task: Task = pipe.recv()
            shares, records, cut = _share(parts[number], task, (1, _PROCESSES), lambda done: None)
            answer = shares, task.placed.sites, records, cut, task.seen
        except Exception as error:  # noqa: BLE001 (`answer` raises it)
            answer = error
        pipe.send(answer)
