"""What is kept of a capture besides its samples: where it came from, what was lost, and how much found its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from iaprof.formats.energy import Energy
from iaprof.formats.header.python_counts import PythonCounts
from iaprof.formats.header.whole_stacks import WholeStacks
from iaprof.report.facts import Facts, Matched

_MOST_PROBLEMS = 20  # of one capture's modules, by sentence


@dataclass(frozen=True)
class Lost:
    """What a recorder lost."""

    source: str
    what: str
    count: int | None  # None: unknown


@dataclass(frozen=True)
class LaunchedKernel:
    """The number of launches of a kernel in a capture."""

    symbol: str
    file: str
    hash: str
    launches: int


@dataclass(frozen=True)
class Summary:
    """A capture, or a part of a merged one."""

    file: str  # path or URL
    key: str  # of the profile: cache.py
    part: str = ""  # of a merged capture: the part's label
    problem: str = ""  # why it could not be reported; then nothing else is known
    host: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    begun_ns: int = 0  # since 1970; 0: unknown
    seconds: float = 0.0
    command: str = ""
    gpus: str = ""
    records: int = 0
    samples: int = 0
    active: int = 0  # of the samples
    unknown_kernel: int = 0
    no_launch: int = 0
    matched: tuple[int, ...] = ()  # the members of Matched
    whole: dict[str, Any] = field(default_factory=dict)  # WholeStacks of the samples
    python: dict[str, int] = field(default_factory=dict)  # PythonCounts of the samples
    energy_nj: tuple[int, ...] = ()  # the members of Energy; empty: unknown
    losses: tuple[Lost, ...] = ()
    problems: tuple[tuple[str, str, int], ...] = ()  # sentence, the first module it is about, number of modules
    warnings: tuple[str, ...] = ()
    launched: tuple[LaunchedKernel, ...] = ()

    @classmethod
    def from_json(cls, value: Any) -> Summary:
        """Inverse of dataclasses.asdict.

        Raises:
            ValueError: it is damaged.
        """
        return msgspec.convert(value, cls)

    @property
    def name(self) -> str:
        """The name for people: the file's, and for a part its label."""
        return f"{self.file}#{self.part}" if self.part else self.file

    @property
    def is_sound(self) -> bool:
        """Whether the capture could be reported."""
        return not self.problem


def facts_of(captures: Sequence[Summary]) -> Facts:
    """Returns the sum of the facts of several captures."""
    sound = [each for each in captures if each.is_sound]
    matched = [sum(column) for column in zip(*(each.matched for each in sound if each.matched), strict=True)]
    facts = Facts(
        records=sum(each.records for each in sound),
        stalls=sum(each.samples for each in sound),
        active=sum(each.active for each in sound),
        unknown_kernel=sum(each.unknown_kernel for each in sound),
        no_launch=sum(each.no_launch for each in sound),
        matched=Matched(*matched),
    )
    facts.whole = WholeStacks.total(filter(None, (WholeStacks.from_json(each.whole) for each in sound)))
    facts.python = PythonCounts.total(filter(None, (PythonCounts.from_json(each.python) for each in sound)))
    energy = [Energy(*each.energy_nj) for each in sound if len(each.energy_nj) == len(fields(Energy))]
    facts.energy = Energy.sum(energy) if energy else None
    for each in sound:
        for sentence, module, count in each.problems:
            of_sentence = facts.problems.setdefault(sentence, [])
            of_sentence += [f"{each.name}: {module}"] * min(count, _MOST_PROBLEMS)
    return facts


def losses_of(captures: Sequence[Summary]) -> list[Lost]:
    """Returns what was lost in several captures, added up by kind; a count that one lacks is unknown in all."""
    found: dict[tuple[str, str], int | None] = {}
    for each in captures:
        for lost in each.losses:
            kind = lost.source, lost.what
            before = found.get(kind, 0)
            found[kind] = None if before is None or lost.count is None else before + lost.count
    return [Lost(*kind, count) for kind, count in found.items()]
