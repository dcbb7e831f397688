"""What a worker does for a fleet: a task is some captures to map, or a segment to read, and its answer is a sum."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from iaprof.report.fleet.cache import written
from iaprof.report.fleet.groups import Grouping
from iaprof.report.fleet.mapping import MapOptions, Mapper
from iaprof.report.fleet.partial import Partial, Sum, nothing, partial_of
from iaprof.report.fleet.segment import Segment, SegmentError
from iaprof.report.fleet.sources import Source
from iaprof.report.fleet.summary import Summary


@dataclass(frozen=True)
class Question:
    """What is asked of all profiles."""

    kept: frozenset[str]  # columns of rows.KEYS that tell rows apart
    grouping: Grouping = Grouping()  # noqa: RUF009 (it is frozen)

    @property
    def columns(self) -> frozenset[str]:
        """The columns that workers keep."""
        return self.kept | self.grouping.columns


@dataclass(frozen=True)
class MapTask:
    """Captures without a profile."""

    sources: Sequence[tuple[Source, str]]  # with the key of each profile; each key once
    names: Mapping[str, Sequence[str]]  # by key: the names of the captures that have this profile
    options: MapOptions
    question: Question

    def divided(self) -> list[MapTask]:
        """A task for each capture."""
        return [replace(self, sources=[each], names={each[1]: self.names[each[1]]}) for each in self.sources]


@dataclass(frozen=True)
class ReadTask:
    """A segment with some of the profiles."""

    name: str
    content: bytes
    names: Mapping[str, Sequence[str]]  # as above
    question: Question


@dataclass(frozen=True)
class Answer:
    """A task's result."""

    partial: Partial
    segment: bytes = b""  # to keep; empty if there is nothing new
    unread: str = ""  # the name of the segment, if that is damaged


def run(task: MapTask | ReadTask) -> Answer:
    """Does a task, in whatever process."""
    if isinstance(task, ReadTask):
        try:
            segment = Segment.read(io.BytesIO(task.content), task.name)
        except (SegmentError, MemoryError):  # a small file may expand to terabytes
            return unread(task)
        if task.names.keys() - {each.key for each in segment.captures}:  # it was replaced meanwhile
            return unread(task)
        return Answer(_sum_of(segment, task))
    segment = Mapper(task.options).segment(task.sources)
    # A capture that could not be reported is tried again next time: the file may have been mended, or the store.
    sound = segment.only([number for number, each in enumerate(segment.captures) if each.is_sound])
    return Answer(_sum_of(segment, task), written(sound) if sound.captures else b"")


def given_up(task: MapTask | ReadTask, who: str) -> Answer | None:
    """The answer for a task that no worker survives.

    Args:
        task: the task.
        who: does the work, for the problem of a capture: "the process that read".

    Returns:
        The answer; None if the task has several captures: `divided`, to find the one that ends the workers.
    """
    if isinstance(task, ReadTask):
        return unread(task)
    if len(task.sources) > 1:
        return None
    problem = f"{who} {task.sources[0][0].shown} died, as happens when memory runs out"
    summaries = [Summary(name, key, problem=problem) for key, names in task.names.items() for name in names]
    return Answer(nothing(summaries))


def unread(task: ReadTask) -> Answer:
    """The answer for a segment that no worker could read."""
    return Answer(nothing(()), unread=task.name)


def _sum_of(segment: Segment, task: MapTask | ReadTask) -> Partial:
    numbers: dict[str, list[int]] = defaultdict(list)  # the parts of a merged capture share a key
    for number, summary in enumerate(segment.captures):
        numbers[summary.key].append(number)
    total = Sum()
    for turn in range(max(map(len, task.names.values()))):  # copies of a capture have one profile, and count each
        wanted = {}
        for key, names in task.names.items():
            for number in numbers[key] if turn < len(names) else ():
                wanted[number] = replace(segment.captures[number], file=names[turn])
        total.add(partial_of(segment, wanted, task.question.grouping.of, task.question.columns))
    return total.result()
