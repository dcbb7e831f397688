"""Counts of launches and CPU samples in a header: whose stack is whole, where others end, Python frames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from enum import IntFlag
from types import MappingProxyType
from typing import Any, TypeVar

from iaprof.basics.quantities import and_more, counted, percent, percents

MOST_LIBRARIES = 50  # listed by name
MOST_PROCESSES = 20  # likewise
_MOST_NAMED = 3  # per sentence
_LONGEST_NAME = 255  # characters
_MOST = 1 << 64
_COUNTS = ("deep", "guessed", "late", "presumed")
STACK_ENDS = "stack_ends"
"""The header member: an object with the `to_json` of each of COUNTED."""
NOUNS = {"launches": "launches", "cpu_samples": "CPU samples"}
"""What is counted, and its name in sentences."""
COUNTED = tuple(NOUNS)
_T = TypeVar("_T")

NO_CODE = (1 << 32) - 1
"""Replaces a code object's id if the code object was not copied or cannot be read."""
NOWHERE = (1 << 16) - 1
"""Replaces the index of a C frame if it is not known which C frame runs a Python frame."""
DEEPEST = 1024  # maximum of Python frames read per stack; recorders keep fewer
PYTHON_STACKS = "python_stacks"
"""The header member: an object with the `to_json` of each key of NOUNS."""
_NAMES = {"launches": "launch Python", "cpu_samples": "CPU Python"}


@dataclass(frozen=True)
class LibraryEnd:
    """The number of stacks that end in a library, or that have guessed callers there."""

    library: str
    count: int
    deep: int = 0  # of these, cut off at the maximum depth


@dataclass(frozen=True)
class ProcessEnd:
    """The stacks of a process; WholeStacks explains the counts below `count`."""

    pid: int
    stacks: int
    count: int  # of these, not whole
    deep: int = 0
    guessed: int = 0
    late: int = 0
    presumed: int = 0

    def text(self) -> str:
        """A clause such as `7: 3 of 40 end early, 2 with guessed callers`."""
        counts = (
            (self.count, f"of {self.stacks:,} end early"),
            (self.deep, "of these too deep"),
            (self.guessed, "with guessed callers"),
            (self.presumed, "with another's stack"),
            (self.late, "finished late"),
        )
        return f"{self.pid}: " + ", ".join(f"{count:,} {text}" for count, text in counts if count)


@dataclass(frozen=True)
class WholeStacks:
    """Launches or samples by the kind of their stack: whole, guessed, cut, too deep, or of an unknown kind.

    A stack ends early if it does not reach the start of its program or thread, or is not known to.
    """

    stacks: int  # launches or samples that have a stack
    whole: int  # of these, with a stack that reaches the start of its program or thread, without a guess
    unknown: int  # not known to be whole or cut: the code at the end could not be read
    ends: tuple[LibraryEnd, ...] = ()  # libraries where the stacks that end early do, most frequent first
    more: int = 0  # of those stacks, in libraries beyond MOST_LIBRARIES
    deep: int = 0  # cut off at the maximum depth
    guessed: int = 0  # with a guessed caller, wherever they end: see wire.unwind_rules.Mark
    late: int = 0  # of all, with a stack that was finished from a copy after the recording ended
    presumed: int = 0  # of all, with the stack of another one: see wire.launches.LaunchFlags.PRESUMED
    processes: tuple[ProcessEnd, ...] = ()  # those with any such stacks, most incomplete first
    guesses: tuple[LibraryEnd, ...] = ()  # libraries with the innermost guessed caller, most frequent first
    guessed_early: int = 0  # of `guessed`, those that end early

    @classmethod
    def from_counts(
        cls,
        whole: int,
        unknown: int,
        ends: Counter[str],
        processes: Iterable[ProcessEnd] = (),
        deep: int = 0,
        guessed: int = 0,
        late: int = 0,
        presumed: int = 0,
        deep_in: Mapping[str, int] | None = None,
        guesses: Counter[str] | None = None,
        guessed_early: int = 0,
    ) -> WholeStacks:
        """Creates it from counts.

        Args:
            whole: as the attribute.
            unknown: as the attribute.
            ends: stacks that end early, by library.
            processes: all processes with stacks; entries with the same pid are added up.
            deep: as the attribute.
            guessed: as the attribute.
            late: as the attribute.
            presumed: as the attribute.
            deep_in: of `ends`, stacks cut off at the maximum depth.
            guesses: stacks with a guessed caller, by library.
            guessed_early: as the attribute.
        """
        most, guessed_in = _libraries(ends, deep_in or {}), _libraries(guesses or Counter())
        early = ends.total()
        stacks = whole + guessed - guessed_early + early
        more = early - sum(end.count for end in most)
        counts = (deep, guessed, late, presumed)
        return cls(stacks, whole, unknown, most, more, *counts, _most(processes), guessed_in, guessed_early)

    @classmethod
    def total(cls, parts: Iterable[WholeStacks]) -> WholeStacks:
        """The sum over several captures."""
        parts, ends, deep_in, guesses = list(parts), Counter[str](), Counter[str](), Counter[str]()
        names = ("whole", "unknown", "guessed_early", *_COUNTS)
        sums = {name: sum(getattr(part, name) for part in parts) for name in names}
        for part in parts:
            for end in part.ends:  # a redacted capture may have several with the same name
                ends[end.library] += end.count
                deep_in[end.library] += end.deep
            for end in part.guesses:
                guesses[end.library] += end.count
        # Processes of different hosts may have the same pid.
        processes = parts[0].processes if len(parts) == 1 else ()
        joined = cls.from_counts(ends=ends, processes=processes, deep_in=deep_in, guesses=guesses, **sums)
        more = sum(part.more for part in parts)
        return replace(joined, stacks=joined.stacks + more, more=joined.more + more)

    def to_json(self) -> dict[str, Any]:
        """For the header, and for JSON output."""
        guesses = [{"library": each.library, "count": each.count} for each in self.guesses]
        lists = {name: [asdict(each) for each in getattr(self, name)] for name in ("ends", "processes")}
        return {**asdict(self), "cut": self.cut, **lists, "guesses": guesses}

    @classmethod
    def from_json(cls, value: Any) -> WholeStacks | None:
        """Inverse of `to_json`; None for an invalid value, as headers are untrusted."""
        match value:
            case {"stacks": stacks, "whole": whole, "unknown": unknown, "ends": list(ends), "more": more} if all(
                type(number) is int and 0 <= number < _MOST for number in (stacks, whole, unknown, more)
            ):
                found = _ends(ends)
                if found is None:
                    return None
                counts = {name: value.get(name, 0) for name in (*_COUNTS, "guessed_early")}  # since format 6
                if not all(type(number) is int and 0 <= number <= stacks for number in counts.values()):
                    return None
                guessed, early = counts["guessed"], sum(end.count for end in found) + more
                if "guessed_early" not in value:
                    # `whole` has all stacks that reach the start, but which of these have guesses is not told: as many
                    # as possible, for a guess must not look like knowledge.
                    counts["guessed_early"] = max(guessed - whole, 0)
                    whole = max(whole - guessed, 0)
                    rest = max(stacks - whole - guessed, 0)
                    counts["deep"] = min(counts["deep"], rest)
                    unknown = min(unknown, rest - counts["deep"])
                adds_up = stacks == whole + guessed - counts["guessed_early"] + early
                if (
                    adds_up
                    and counts["guessed_early"] <= min(guessed, early)
                    and whole + guessed + unknown + counts["deep"] <= stacks
                ):
                    processes = _processes(value.get("processes", []))
                    guesses = _ends(value.get("guesses", [])) or ()
                    return cls(stacks, whole, unknown, found, more, **counts, processes=processes, guesses=guesses)
        return None

    def cleaned(self, clean: Callable[[str], str]) -> WholeStacks:
        """A copy with cleaned names of libraries."""
        ends, guesses = (
            tuple(replace(end, library=clean(end.library)) for end in of) for of in (self.ends, self.guesses)
        )
        return replace(self, ends=ends, guesses=guesses)

    @property
    def cut(self) -> int:
        """Stacks without a guess that are known to be cut, other than those cut off at the maximum depth."""
        return self.stacks - self.whole - self.guessed - self.deep - self.unknown

    @property
    def early(self) -> int:
        """Stacks that end early."""
        return self.stacks - self.whole - self.guessed + self.guessed_early

    def text(self, what: str) -> str:
        """One sentence, without a full stop.

        Args:
            what: the noun for what is counted, such as `launches`.
        """
        if not self.stacks:
            return f"no {what} with a stack"
        sentence = self._kinds(what)
        if self.early:
            sentence += f"; {self.early:,} end{'s' if self.early == 1 else ''} early, in {self._end_in()}"
            early = [each for each in self.processes if each.count]
            of = ", ".join(f"{each.pid} ({each.count:,} of {each.stacks:,})" for each in early[:_MOST_NAMED])
            sentence += f", in process {of}{and_more(len(early) - _MOST_NAMED)}" if of else ""
        return sentence + self._counts()

    def short(self, what: str) -> str:
        """The sentence without libraries and processes."""
        if not self.stacks:
            return f"no {what} with a stack"
        counts = {
            "of the guessed end early": self.guessed_early,
            "presumed": self.presumed,
            "finished late": self.late,
        }
        return ", ".join([self._kinds(what), *(f"{count:,} {name}" for name, count in counts.items() if count)])

    def facts(self, name: str, what: str) -> Iterator[tuple[str, str]]:
        """All counts as (name, text) pairs, a line each.

        Args:
            name: of the first line.
            what: the noun for what is counted.
        """
        if not self.stacks:
            return
        yield name, self._kinds(what) + self._counts()
        if self.early:
            yield "  end in", self._end_in()
        if self.guesses:
            yield "  guessed in", _named(self.guesses)
        for each in self.processes[:_MOST_NAMED]:
            yield "  process", each.text()
        if len(self.processes) > _MOST_NAMED:
            least = "at least " if len(self.processes) == MOST_PROCESSES else ""
            yield "", f"and {least}{counted(len(self.processes) - _MOST_NAMED, 'process', 'processes')} more"

    def _kinds(self, what: str) -> str:
        """How many stacks there are of each kind. The kinds add up to all stacks, and their shares to 100 %."""
        kinds = {
            "a guessed one": self.guessed,
            "are cut": self.cut,
            "are too deep": self.deep,
            "may be whole or cut": self.unknown,
        }
        whole, *shares = percents([self.whole, *kinds.values()])
        told = [f"{self.whole:,} of {self.stacks:,} {what} ({whole}) have a whole stack"]
        others = zip(kinds.items(), shares, strict=True)
        told += [f"{count:,} ({share}) {text}" for (text, count), share in others if count]
        return ", ".join(told)

    def _end_in(self) -> str:
        return _named(self.ends, self.more > 0)

    def _counts(self) -> str:
        sentence = ""
        if self.guessed_early:
            sentence += f"; of the guessed ones, {self.guessed_early:,} end early"
        if self.presumed:
            sentence += f"; {_have(self.presumed)} the stack of another one that looked the same"
        if self.late:
            sentence += f"; {self.late:,} {'was' if self.late == 1 else 'were'} finished when the recording had ended"
        return sentence


def recorded(header: Mapping[str, Any]) -> dict[str, WholeStacks]:
    """The counts in a capture's header (untrusted) by COUNTED, summed over the parts of a merged capture.

    Kinds that no header describes are missing.
    """
    found = {kind: list(_each(header, STACK_ENDS, kind, WholeStacks.from_json)) for kind in COUNTED}
    return {kind: WholeStacks.total(of) for kind, of in found.items() if of}


def _each(header: Mapping[str, Any], member: str, kind: str, read: Callable[[Any], _T | None]) -> Iterator[_T]:
    """Yields what the header's parts, or the header, have of a kind in a member."""
    parts = header.get("parts")
    for each in parts if isinstance(parts, list) else [header]:
        counts = each.get(member) if isinstance(each, Mapping) else None
        if isinstance(counts, dict) and (found := read(counts.get(kind))):
            yield found


def _have(count: int) -> str:
    return f"{count:,} {'has' if count == 1 else 'have'}"


def _named(libraries: Sequence[LibraryEnd], has_more: bool = False) -> str:
    first = libraries[:_MOST_NAMED]
    sentence = ", ".join(f"{end.library} ({end.count:,})" for end in first)
    return sentence + and_more(len(libraries) - len(first) + has_more)


def _libraries(counts: Counter[str], deep: Mapping[str, int] = MappingProxyType({})) -> tuple[LibraryEnd, ...]:
    by_count = sorted(counts.items(), key=lambda end: (-end[1], end[0]))[:MOST_LIBRARIES]
    return tuple(LibraryEnd(library, count, deep.get(library, 0)) for library, count in by_count if count)


def _most(processes: Iterable[ProcessEnd]) -> tuple[ProcessEnd, ...]:
    sums: dict[int, list[int]] = {}
    for each in processes:
        pid, *counts = astuple(each)
        sums[pid] = [sum(pair) for pair in zip(sums.get(pid, [0] * len(counts)), counts, strict=True)]
    some = [ProcessEnd(pid, *counts) for pid, counts in sums.items() if any(counts[1:])]
    some.sort(key=lambda each: (-each.count, -(each.guessed + each.presumed + each.late), each.pid))
    return tuple(some[:MOST_PROCESSES])


def _ends(value: Any) -> tuple[LibraryEnd, ...] | None:
    """Reads library ends of a header (untrusted); None if one is invalid."""
    found = []
    for end in value[:MOST_LIBRARIES] if isinstance(value, list) else []:
        match end:
            case {"library": str() | None as library, "count": int(count)} if 0 <= count < _MOST:
                deep = end.get("deep", 0)
                is_deep = type(deep) is int and 0 <= deep <= count
                found.append(LibraryEnd((library or "[redacted]")[:_LONGEST_NAME], count, deep if is_deep else 0))
            case _:
                return None
    return tuple(found)


def _processes(value: Any) -> tuple[ProcessEnd, ...]:
    """Reads processes of a header (untrusted); skips invalid ones."""
    found = []
    for each in value[:MOST_PROCESSES] if isinstance(value, list) else []:
        match each:
            case {"pid": int(pid), "stacks": int(stacks), "count": int(count)} if 0 <= stacks < _MOST > pid >= 0:
                counts = [count, *(each.get(name, 0) for name in _COUNTS)]
                if all(type(number) is int and 0 <= number <= stacks for number in counts) and any(counts):
                    found.append(ProcessEnd(pid, stacks, *counts))
    return tuple(found)


class Completeness(IntFlag):
    """The completeness of the Python frames of a stack."""

    NONE = 0  # no Python frames
    SOME = 1  # has Python frames
    DEEP = 2  # more frames than are kept
    DAMAGED = 4  # some frames could not be read
    UNNAMED = 8  # the code object of a frame is missing
    UNPLACED = 16  # the position of a frame among the C frames is unknown

    @classmethod
    def from_column(cls, ended: str | None) -> Completeness:
        """From the column `python_ended`; unknown values count as damaged."""
        return {"whole": cls.SOME, "deep": cls.SOME | cls.DEEP}.get(ended or "", cls.SOME | cls.DAMAGED)


_FLAGS = {
    "deep": Completeness.DEEP,
    "damaged": Completeness.DAMAGED,
    "unnamed": Completeness.UNNAMED,
    "unplaced": Completeness.UNPLACED,
}


@dataclass(frozen=True)
class PythonCounts:
    """Launches or CPU samples by the completeness of their Python frames; one stack may count several times."""

    stacks: int = 0  # stacks with Python frames
    whole: int = 0  # of these, complete: every frame has a name and a position
    deep: int = 0  # more frames than are kept
    damaged: int = 0  # with unreadable frames
    unnamed: int = 0  # with a frame whose code object is missing
    unplaced: int = 0  # with a frame whose position among the C frames is unknown
    none: int = 0  # stacks without Python frames in processes with an interpreter; not in `stacks`

    @classmethod
    def from_counts(cls, counts: Mapping[int, int], none: int = 0) -> PythonCounts:
        """Adds up counts by Completeness; NONE is not counted."""
        some = {state: count for state, count in counts.items() if state & Completeness.SOME}
        lacking = {name: sum(count for state, count in some.items() if state & flag) for name, flag in _FLAGS.items()}
        return cls(sum(some.values()), some.get(Completeness.SOME, 0), **lacking, none=none)

    @classmethod
    def total(cls, parts: Iterable[PythonCounts]) -> PythonCounts:
        """The sum over several captures."""
        found = list(parts)
        return cls(*(sum(getattr(part, each.name) for part in found) for each in fields(cls)))

    def to_json(self) -> dict[str, int]:
        """For the header, and for JSON output."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> PythonCounts | None:
        """Inverse of `to_json`; None for an invalid value, as headers are untrusted."""
        if not isinstance(value, dict):
            return None
        counts = {each.name: value.get(each.name) for each in fields(cls)}
        if not all(type(count) is int and 0 <= count < _MOST for count in counts.values()):
            return None
        found = cls(**{name: int(count or 0) for name, count in counts.items()})
        return found if max(found.whole, *(getattr(found, name) for name in _FLAGS)) <= found.stacks else None

    @property
    def is_whole(self) -> bool:
        """Whether all Python frames of all stacks are complete."""
        return self.whole == self.stacks

    def text(self, what: str) -> str:
        """One sentence, without a full stop.

        Args:
            what: the noun for what is counted, such as `launches`.
        """
        if not self.stacks:
            return f"none of {self.none:,} {what} of Python processes has Python functions"
        share = percent(self.whole / self.stacks)
        sentence = f"{self.whole:,} of {self.stacks:,} {what} with Python functions ({share}) have all of them"
        lacking = {
            "too deep": self.deep,
            "damaged": self.damaged,
            "without a name": self.unnamed,
            "without a place": self.unplaced,
        }
        sentence += "".join(f", {count:,} {name}" for name, count in lacking.items() if count)
        return sentence + (f"; {self.none:,} more of Python processes have none" if self.none else "")

    def facts(self, kind: str) -> Iterator[tuple[str, str]]:
        """The sentence as a (name, text) pair; nothing if no Python ran.

        Args:
            kind: a key of NOUNS.
        """
        if self.stacks or self.none:
            yield _NAMES[kind], self.text(NOUNS[kind])


def recorded_python(header: Mapping[str, Any]) -> dict[str, PythonCounts]:
    """The same of Python frames."""
    found = {kind: list(_each(header, PYTHON_STACKS, kind, PythonCounts.from_json)) for kind in NOUNS}
    return {kind: PythonCounts.total(of) for kind, of in found.items() if of}


def python_sentences(header: Mapping[str, Any]) -> list[str]:
    """A sentence, without a full stop, for each key of NOUNS in the header."""
    return [each.text(NOUNS[kind]) for kind, each in recorded_python(header).items() if each.stacks or each.none]
