"""Joining all stalls of a capture on two cores: a second process does every other row group of a large one.

Threads would not do: much of the work holds Python's lock. What the second process adds up goes through a pipe once,
at the end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.formats.capture import CaptureError, CaptureReader
from iaprof.formats.errors import IaprofError
from iaprof.report.attribution import (
    STALL_COLUMNS,
    Attribution,
    Joined,
    Part,
    Span,
    added_up,
    in_whole_counts,
    streams,
)
from iaprof.report.candidates import Rule
from iaprof.report.memory import keep_little
from iaprof.report.placements import Placed, Site

_FEWEST_GROUPS = 6  # of about a million records, for which a second process is worth its start
_PROCESSES = 2


@dataclass(frozen=True)
class Task:
    """What is to be joined, and how."""

    placed: Placed
    start_ns: int
    interval_ns: int = 0
    rule: Rule = Rule()  # noqa: RUF009 (it is frozen)
    span: Span = Span()  # noqa: RUF009
    starts: Mapping[int, NDArray[np.uint64]] | None = None


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
    """
    if helper is None:
        part, records = _share(capture, task, (0, 1), progress)
        return in_whole_counts(part), records
    helper.give(task)
    own, records = _share(capture, task, (0, _PROCESSES), lambda done: progress(_PROCESSES * done))
    other, sites, others_records = helper.answer()
    numbers = _numbers_of(sites, task.placed)
    parts = [own, replace(other, site=numbers[other.site])]
    return in_whole_counts(added_up(parts)), records + others_records


@contextlib.contextmanager
def helping(capture: CaptureReader) -> Iterator[Helper | None]:
    """A second process for a large capture, which starts meanwhile; None where it is not worth its start."""
    if capture.groups("stall") < _FEWEST_GROUPS or len(os.sched_getaffinity(0)) < _PROCESSES:
        yield None
        return
    helper = Helper(capture)
    try:
        yield helper
    finally:
        helper.close()


class Helper:
    """A process that does every other row group."""

    def __init__(self, capture: CaptureReader) -> None:
        """Starts it."""
        spawn = multiprocessing.get_context("spawn")
        self._path = capture.path
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_help, args=(capture.path, capture.number, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        """Tells it what to do."""
        # What the modules hold beyond their outlines is not needed there.
        bare = replace(task.placed, placements=[replace(each, kernel=None) for each in task.placed.placements])
        with contextlib.suppress(BrokenPipeError):  # `answer` tells
            self._pipe.send(replace(task, placed=bare))

    def answer(self) -> tuple[Part, list[Site], int]:
        """Waits for its share, the sites as it numbers them, and how many records it had.

        Raises:
            CaptureError: the capture is damaged, or the process died.
        """
        try:
            found: Any = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise CaptureError(f"{self._path}: the second process that joins its stalls died") from None
        if isinstance(found, IaprofError | MemoryError):
            raise found
        part, sites, records = found
        return part, sites, records

    def close(self) -> None:
        """Ends it, whatever it does."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _share(
    capture: CaptureReader, task: Task, share: tuple[int, int], progress: Callable[[int], None]
) -> tuple[Part, int]:
    known = streams(capture.header)
    attribution = Attribution(task.placed, task.start_ns, task.interval_ns, task.rule, task.starts)
    records = 0
    for table in capture.tables("stall", STALL_COLUMNS, share):
        records += attribution.add(table, known, task.span)
        del table  # while the next one is read
        progress(records)
    return attribution.part(), records


def _numbers_of(sites: list[Site], placed: Placed) -> NDArray[np.int64]:
    """The index in `placed` of each of the other process's sites, most of which are in it: int64[n]."""
    numbers = np.arange(len(sites))
    known = len(placed.time) and int(placed.site.max()) + 1
    own = {site: known + index for index, site in enumerate(placed.sites[known:])}
    for index, site in enumerate(sites[known:], known):
        numbers[index] = own[site] if site in own else placed.add_site(site)
    return numbers


def _help(path: Path, part: int, pipe: Connection) -> None:
    """The second process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first one is told, and ends this one
    keep_little()
    try:
        capture = CaptureReader(path).parts[part]
        task: Task = pipe.recv()
        shared, records = _share(capture, task, (1, _PROCESSES), lambda done: None)
        pipe.send((shared, task.placed.sites, records))
    except (IaprofError, MemoryError) as error:
        pipe.send(error)
    except (EOFError, ConnectionError):
        pass  # the first process has no need of it any more
