"""Joining all stalls of a capture on two cores: a second process does every other row group of a large one.

Threads would not do: much of the work holds Python's lock. What the second process adds up goes through a pipe once,
at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.report.join.attribution import (
    STALL_COLUMNS,
    Attribution,
    Joined,
    JoinedShares,
    RowFilter,
    merge_shares,
    to_whole_counts,
)
from iaprof.report.join.candidates import Rule
from iaprof.report.join.memory import keep_little
from iaprof.report.join.placements import Placed, Site
from iaprof.report.join.streams import reasons_of, streams
from iaprof.sandbox.memory import MALLOC, limit, limit_memory
from iaprof.sandbox.worker import Worker

_FEWEST_GROUPS = 6  # of about a million records, for which a second process is worth its start
_PROCESSES = 2


@dataclass(frozen=True)
class Task:
    """What is to be joined, and how."""

    placed: Placed
    start_ns: int
    interval_ns: int = 0
    rule: Rule = Rule()  # noqa: RUF009 (it is frozen)
    row_filter: RowFilter = RowFilter()  # noqa: RUF009
    starts: Mapping[int, NDArray[np.uint64]] | None = None
    merged: bool = False  # each kernel's instructions in one


def join(
    capture: CaptureReader,
    task: Task,
    helper: Helper | None = None,
    progress: Callable[[int], None] = lambda records: None,
) -> tuple[Joined, int]:
    """Joins the stalls of a capture. Sites for what has no launch are added to `task.placed`.

    Args:
        capture: the open capture.
        task: how.
        helper: does half of it; of this capture.
        progress: told now and then how many records are done.

    Returns:
        The joined stalls, and how many records there were.

    Raises:
        CaptureError: the capture is damaged.
        IaprofError: the helper died.
    """
    placed, known = task.placed, len(task.placed.sites)
    if helper is None:
        shares, records = _share(capture, task, (0, 1), progress)
        return to_whole_counts(merge_shares(_numbered([shares], placed, known))), records
    helper.give(task)
    own, records = _share(capture, task, (0, _PROCESSES), lambda done: progress(_PROCESSES * done))
    other, sites, others_records = helper.answer()
    shift = np.where(other.site < known, 0, len(placed.sites) - known)  # behind those that this process added
    placed.sites += sites[known:]
    both = _numbered([own, replace(other, site=other.site + shift)], placed, known)
    return to_whole_counts(merge_shares(both)), records + others_records


@contextlib.contextmanager
def helping(capture: CaptureReader) -> Iterator[Helper | None]:
    """A second process for a large capture, which starts meanwhile; None where it is not worth its start."""
    if capture.groups("stall") < _FEWEST_GROUPS or len(os.sched_getaffinity(0)) < _PROCESSES:
        yield None
        return
    try:
        helper = Helper(capture)
    except OSError:
        helper = None  # there may be no more processes: it takes longer
    try:
        yield helper
    finally:
        if helper is not None:
            helper.close()


class Helper:
    """A process that does every other row group."""

    def __init__(self, capture: CaptureReader) -> None:
        """Starts it.

        Raises:
            OSError: there is no room for another process.
        """
        self._path = capture.path
        self._process = Worker(
            "iaprof.report.join.joining:help_other",
            limit() or 0,
            channel=socket.SOCK_STREAM,
            environment=os.environ | MALLOC,
        )
        self._pipe = Connection(self._process.channel.detach())
        self._send((capture.path, capture.number, _digest(capture)))

    def give(self, task: Task) -> None:
        """Tells it what to do."""
        # What the modules hold beyond their outlines is not needed there.
        bare = replace(task.placed, placements=[replace(each, kernel=None) for each in task.placed.placements])
        self._send(replace(task, placed=bare))

    def _send(self, what: Any) -> None:
        with contextlib.suppress(ConnectionError):  # it died: `answer` tells
            self._pipe.send(what)

    def answer(self) -> tuple[JoinedShares, list[Site], int]:
        """Waits for its share, the sites as it numbers them, and how many records it had.

        Raises:
            CaptureError: the capture is damaged.
            IaprofError: the process died.
        """
        try:
            found: Any = self._pipe.recv()
        except (EOFError, OSError):  # OSError in the middle of what it says
            raise IaprofError(
                f"the second process that joins the stalls of {self._path} was ended, "
                "as happens when memory runs out: try again"
            ) from None
        if isinstance(found, Exception):
            raise found
        shares, sites, records = found
        return shares, sites, records

    def close(self) -> None:
        """Ends it, whatever it does."""
        self._process.close()
        self._pipe.close()


def _share(
    capture: CaptureReader, task: Task, share: tuple[int, int], progress: Callable[[int], None]
) -> tuple[JoinedShares, int]:
    known = streams(capture.header)
    attribution = Attribution(
        task.placed, task.start_ns, task.interval_ns, task.rule, task.starts, task.merged, reasons_of(known)
    )
    records = 0
    for table in capture.tables("stall", STALL_COLUMNS, share):
        records += attribution.add(table, known, task.row_filter)
        del table  # while the next one is read
        progress(records)
    return attribution.joined_shares(), records


def _numbered(several: list[JoinedShares], placed: Placed, known: int) -> list[JoinedShares]:
    """Parts that number the sites which joining added, all from `known` on, in an order of their own.

    Whoever came upon them first, and in whichever process: reports are to be the same on one core and on two.
    """
    added = placed.sites[known:]
    placed.sites[known:] = sorted(set(added), key=lambda site: (site.placement is not None, *astuple(site)))
    number = {site: index for index, site in enumerate(placed.sites[known:], known)}
    numbers = np.append(np.arange(known), np.array([number[site] for site in added], np.int64))
    return [replace(shares, site=numbers[shares.site]) for shares in several]


def _digest(capture: CaptureReader) -> bytes:
    """What tells a part of a capture from that of another one at the same path."""
    return hashlib.sha256(repr(capture.header).encode()).digest()


def help_other(memory_bytes: str, pipe_fd: int = 0) -> None:
    """The second process.

    Args:
        memory_bytes: how much it may take; 0 for no limit.
        pipe_fd: the connection to the first one.
    """
    if int(memory_bytes):
        limit_memory(int(memory_bytes))
    keep_little()
    with Connection(pipe_fd) as pipe, contextlib.suppress(EOFError, OSError):  # nobody needs it any more
        path, number, digest = pipe.recv()
        answer: Any
        try:
            parts = CaptureReader(path).parts
            if number >= len(parts) or _digest(parts[number]) != digest:
                raise IaprofError(f"{path} was changed while it was read: try again")
            task: Task = pipe.recv()
            shares, records = _share(parts[number], task, (1, _PROCESSES), lambda done: None)
            answer = shares, task.placed.sites, records
        except Exception as error:  # noqa: BLE001 (it is raised there)
            answer = error
        pipe.send(answer)
