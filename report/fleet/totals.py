"""What is kept of a capture, and of a sum of captures, besides samples: where from, what was lost, what was matched.

What a sum keeps does not grow with the number of captures that could be read, only with that of hosts, kernels and
groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec

from iaprof.formats.energy import Energy
from iaprof.formats.header.stack_counts import PythonCounts, WholeStacks
from iaprof.formats.host_times import HostTimes
from iaprof.report.facts import Facts, Matched
from iaprof.report.fleet.rare import Folded
from iaprof.report.fleet.samples import HashedKernel

_MOST_PROBLEMS = 20  # of one capture's modules, by sentence

_CELLS_UNTIL_SUM = 1 << 19  # of HostTimes, which are added up when there are so many new ones
_NS = 10**9


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


@dataclass(frozen=True)
class Broken:
    """A capture that could not be reported."""

    file: str
    name: str  # of the file, and of a part its label
    problem: str


@dataclass
class Totals:
    """Figures of captures, added up. Adding is associative, and its order does not matter."""

    captures: int = 0  # with those that could not be reported
    broken: list[Broken] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)  # without problems of modules
    problems: dict[str, tuple[str, int]] = field(default_factory=dict)  # sentence: the first module, how many
    losses: dict[tuple[str, str], int | None] = field(default_factory=dict)  # by source and what; None: unknown
    launched: Counter[HashedKernel] = field(default_factory=Counter)
    groups: Counter[tuple[str, ...]] = field(default_factory=Counter)  # captures of each group
    begun_ns: int = 0  # the first, since 1970; 0: unknown
    ended_ns: int = 0  # the last
    recorded_ns: int = 0  # all lengths
    folded: Folded = field(default_factory=Folded)  # samples of what --percent-limit adds to what is above it
    times: list[HostTimes] = field(default_factory=list)  # parts that are not added up yet

    @classmethod
    def of(cls, captures: Sequence[Summary], host_of: Callable[[Summary], str]) -> Totals:
        """Makes the totals of captures, without their groups."""
        sound = [each for each in captures if each.is_sound]
        facts = facts_of(sound)
        known = [each for each in sound if each.begun_ns]
        launched: Counter[HashedKernel] = Counter()
        for capture in sound:
            for each in capture.launched:
                launched[HashedKernel(each.symbol, each.file, each.hash)] += each.launches
        lengths = [int(each.seconds * _NS) for each in sound]
        hosts = [host_of(each) for each in sound]
        times = HostTimes.of(hosts, [each.begun_ns for each in sound], lengths, [each.samples for each in sound])
        return cls(
            len(captures),
            [Broken(each.file, each.name, each.problem) for each in captures if not each.is_sound],
            replace(facts, problems={}),
            {sentence: (min(modules), len(modules)) for sentence, modules in facts.problems.items()},
            {(lost.source, lost.what): lost.count for lost in losses_of(sound)},
            launched,
            begun_ns=min((each.begun_ns for each in known), default=0),
            ended_ns=max((each.begun_ns + int(each.seconds * _NS) for each in known), default=0),
            recorded_ns=sum(lengths),
            times=[times] if sound else [],
        )

    def add(self, other: Totals) -> None:
        """Adds those of other captures."""
        self.captures += other.captures
        self.broken += other.broken
        self.facts = _added(self.facts, other.facts)
        for sentence, (module, count) in other.problems.items():
            first, before = self.problems.get(sentence, (module, 0))
            self.problems[sentence] = min(first, module), before + count
        for kind, lost in other.losses.items():
            known = self.losses.get(kind, 0)
            self.losses[kind] = None if known is None or lost is None else known + lost
        self.launched.update(other.launched)
        self.groups.update(other.groups)
        begun = [each for each in (self.begun_ns, other.begun_ns) if each]
        self.begun_ns = min(begun, default=0)
        self.ended_ns = max(self.ended_ns, other.ended_ns)
        self.recorded_ns += other.recorded_ns
        self.folded += other.folded
        self.times += other.times
        if sum(len(each.samples) + len(each.hosts) for each in self.times[1:]) > _CELLS_UNTIL_SUM:
            self.times = [HostTimes.total(self.times)]

    def lost(self) -> list[Lost]:
        """Returns what was lost while recording, by kind."""
        return [Lost(*kind, count) for kind, count in sorted(self.losses.items())]

    def all_facts(self) -> Facts:
        """Returns the facts with the problems of modules."""
        return replace(self.facts, problems={text: [first] * count for text, (first, count) in self.problems.items()})

    def host_times(self) -> HostTimes:
        """Returns the samples by host and time."""
        return HostTimes.total(self.times)


def _added(one: Facts, other: Facts) -> Facts:
    energy = [each.energy for each in (one, other) if each.energy is not None]
    names = ("samples", "kernel", "instruction", "stack", "ambiguous")
    return Facts(
        records=one.records + other.records,
        stalls=one.stalls + other.stalls,
        active=one.active + other.active,
        unknown_kernel=one.unknown_kernel + other.unknown_kernel,
        no_launch=one.no_launch + other.no_launch,
        matched=Matched(*(getattr(one.matched, name) + getattr(other.matched, name) for name in names)),
        whole=WholeStacks.total([one.whole, other.whole]),
        python=PythonCounts.total([one.python, other.python]),
        energy=Energy.sum(energy) if energy else None,
    )
