"""What a worker does for a fleet: a task is some captures to map, or a segment to read, and its answer is a sum."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import NoneType

import numpy as np
from numpy.typing import NDArray

from iaprof.basics.errors import IaprofError
from iaprof.formats.profile import Code, Launch
from iaprof.report.fleet.cache import written
from iaprof.report.fleet.groups import Grouping
from iaprof.report.fleet.mapping import MapOptions, Mapper
from iaprof.report.fleet.partial import Partial, Sum, nothing, partial_of
from iaprof.report.fleet.rare import Counts, counts_of, folded
from iaprof.report.fleet.samples import VALUES, HashedKernel, Rows
from iaprof.report.fleet.segment import Segment, SegmentError
from iaprof.report.fleet.sources import Source
from iaprof.report.fleet.totals import Summary, Totals


class AnswerError(IaprofError):
    """What a worker answered is no answer to its task."""


@dataclass(frozen=True)
class Question:
    """What is asked of all profiles."""

    kept: frozenset[str]  # columns of rows.KEYS that tell rows apart
    grouping: Grouping = Grouping()  # noqa: RUF009 (it is frozen)
    counting: bool = False  # only count what there is, for --percent-limit
    frequent: NDArray[np.int32] | None = None  # of rare.Counting: what is not folded; None: nothing is folded


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
    keys: tuple[str, ...] = ()  # of the profiles in `segment`
    unread: str = ""  # the name of the segment, if that is damaged
    counts: Counts | None = None  # if the question is to count


def run(task: MapTask | ReadTask) -> Answer:
    """Does a task, in whatever process."""
    if isinstance(task, ReadTask):
        try:
            segment = Segment.read(io.BytesIO(task.content), task.name)
        except (SegmentError, MemoryError):  # a small file may expand to terabytes
            return unread(task)
        if task.names.keys() - {each.key for each in segment.captures}:  # it was replaced meanwhile
            return unread(task)
        return _answer(segment, task)
    before = [source.status() for source, _ in task.sources]
    segment = Mapper(task.options).segment(task.sources)
    # What was swapped since its key was made would be kept for another content, which the user may have elsewhere.
    swapped = {
        key for (source, key), status in zip(task.sources, before, strict=True) if not source.is_still(key, status)
    }
    # A capture that could not be reported is tried again next time: the file may have been repaired, or the store.
    sound = segment.only(
        [number for number, each in enumerate(segment.captures) if each.is_sound and each.key not in swapped]
    )
    keys = tuple(dict.fromkeys(each.key for each in sound.captures))
    return replace(_answer(segment, task), segment=written(sound) if keys else b"", keys=keys)


def given_up(task: MapTask | ReadTask, problem: str) -> Answer | None:
    """The answer for a task that no worker survives, or that takes too long.

    Args:
        task: the task.
        problem: what happened, with {} for the capture's name.

    Returns:
        The answer; None if the task has several captures: `divided`, to find the one with the problem.
    """
    if isinstance(task, ReadTask):
        return unread(task)
    if len(task.sources) > 1:
        return None
    sentence = problem.format(task.sources[0][0].shown)
    summaries = [Summary(name, key, problem=sentence) for key, names in task.names.items() for name in names]
    return Answer(nothing(summaries))


def check_answers(answers: object, task: MapTask | ReadTask) -> list[Answer]:
    """Checks what another machine answered, which may be broken or have other packages: it must fit the task.

    Returns:
        The answers: several, if the task had to be divided.

    Raises:
        AnswerError: they do not fit.
    """
    if not isinstance(answers, list) or not all(isinstance(each, Answer) for each in answers):
        raise AnswerError("it is not a list of answers")
    names = [name for of_key in task.names.values() for name in of_key]
    for answer in answers:
        totals, rows = answer.partial.totals, answer.partial.rows
        is_right = (
            isinstance(totals, Totals)
            and isinstance(rows, Rows)
            and answer.unread in ("", task.name if isinstance(task, ReadTask) else "")
            and isinstance(answer.segment, bytes)
            and isinstance(answer.keys, tuple)
            and set(answer.keys) <= task.names.keys()
            and {each.file for each in totals.broken} <= set(names)
            and isinstance(answer.counts, Counts | None)
        )
        if not is_right:
            raise AnswerError("it does not fit the task")
        _check_rows(answer.partial)
        if not task.question.counting and int(rows.counts.sum()) != totals.facts.stalls:
            raise AnswerError("its samples do not add up")
    captures = sum(each.partial.totals.captures for each in answers)
    if captures < len(names) and not any(each.unread for each in answers):
        raise AnswerError(f"it has {captures:,} of {len(names):,} captures")
    return answers


def _check_rows(partial: Partial) -> None:
    """Checks that rows are columns of one length that refer to what there is."""
    tables: Mapping[str, tuple[Sequence[object], type | tuple[type, ...]]] = {
        "capture": (partial.groups, tuple),
        "launch": (partial.launches, (Launch, NoneType)),
        "kernel": (partial.kernels, (HashedKernel, NoneType)),
        "code": (partial.codes, Code),
        "device": (partial.devices, str),
    }
    for field in fields(Rows):
        column = getattr(partial.rows, field.name)
        shape = (len(partial.rows),) if field.name != "counts" else (len(partial.rows), len(partial.reasons))
        if not isinstance(column, np.ndarray) or column.dtype != np.int64 or column.shape != shape:
            raise AnswerError(f"its column '{field.name}' has another type or size")
        if field.name in tables:
            values, types = tables[field.name]
            if not isinstance(values, Sequence) or not all(isinstance(each, types) for each in values):
                raise AnswerError(f"entries of its column '{field.name}' have another type")
            if column.size and not 0 <= column.min() <= column.max() < len(values):
                raise AnswerError(f"its column '{field.name}' has numbers of entries that do not exist")
        elif field.name in VALUES and column.min(initial=0) < 0:
            raise AnswerError(f"its column '{field.name}' is negative")


def unread(task: ReadTask) -> Answer:
    """The answer for a segment that no worker could read."""
    return Answer(nothing(()), unread=task.name)


def _answer(segment: Segment, task: MapTask | ReadTask) -> Answer:
    question = task.question
    found = _sum_of(segment, task)
    if question.counting:
        counts = counts_of(found)
        return Answer(replace(found, rows=Rows.none(len(found.reasons))).dropped(()), counts=counts)
    if question.frequent is not None:
        found, number = folded(found, question.frequent)
        found.totals.folded = number
        found = found.dropped(question.kept)
    return Answer(found)


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
        total.add(partial_of(segment, wanted, task.question.grouping, task.question.kept))
    return total.result()
