"""How many launches or samples have a stack that reaches the start of its program, and where the others end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from types import MappingProxyType
from typing import Any

from iaprof.basics.quantities import and_more, counted, percent

MOST_LIBRARIES = 50  # that are told apart
MOST_PROCESSES = 20  # likewise
_MOST_NAMED = 3  # in a sentence
_LONGEST_NAME = 255  # characters
_MOST = 1 << 64
_COUNTS = ("deep", "guessed", "late", "presumed")
MEMBER = "stack_ends"
"""The member of a capture's header: an object with `to_json` of each of KINDS."""
COUNTED = {"launches": "launches", "cpu_samples": "CPU samples"}
"""What each of them is called."""
KINDS = tuple(COUNTED)


@dataclass(frozen=True)
class LibraryEnd:
    """How many stacks end in one library, or have callers there that were guessed."""

    library: str
    count: int
    deep: int = 0  # of these, as deep as the limit


@dataclass(frozen=True)
class ProcessEnd:
    """The stacks of one process; see WholeStacks for the counts of them that have a default."""

    pid: int
    stacks: int
    count: int  # of these, that are not whole
    deep: int = 0
    guessed: int = 0
    late: int = 0
    presumed: int = 0

    def text(self) -> str:
        """What is to be said of it, such as `7: 3 of 40 end early, 2 have guessed callers`."""
        counts = (
            (self.count, f"of {self.stacks:,} end early"),
            (self.deep, "of these too deep"),
            (self.guessed, "with guessed callers"),
            (self.presumed, "with another one's stack"),
            (self.late, "finished late"),
        )
        return f"{self.pid}: " + ", ".join(f"{count:,} {text}" for count, text in counts if count)


@dataclass(frozen=True)
class WholeStacks:
    """Launches or samples by where their stacks end; stacks as deep as the limit end in a library, too."""

    stacks: int  # those that have a stack
    whole: int  # of these, with a stack that reaches the start
    unknown: int  # not known to be whole or not, because the code where they end could not be read
    ends: tuple[LibraryEnd, ...] = ()  # where all but the whole ones end, the most first
    more: int = 0  # of them, in libraries beyond MOST_LIBRARIES
    deep: int = 0  # of them, as deep as the limit
    guessed: int = 0  # of all, with a caller that was guessed: see formats.unwind_rules.Mark
    late: int = 0  # of all, with a stack that was finished from a copy when the recording had ended
    presumed: int = 0  # of all, that have the stack of another one: see formats.launches.LaunchFlags.PRESUMED
    processes: tuple[ProcessEnd, ...] = ()  # with stacks that have any of this; those with the most that are not whole
    guesses: tuple[
        LibraryEnd, ...
    ] = ()  # in which code callers were guessed (the innermost of each stack), the most first

    @classmethod
    def of(
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
    ) -> WholeStacks:
        """Makes it from counts.

        Args:
            whole: see there.
            unknown: likewise.
            ends: counts each stack that is not whole, by library.
            processes: all that have stacks; those of one pid are added up.
            deep: see there.
            guessed: likewise.
            late: likewise.
            presumed: likewise.
            deep_in: of `ends`, those as deep as the limit.
            guesses: counts each stack with a caller that was guessed, by library.
        """
        most, guessed_in = _libraries(ends, deep_in or {}), _libraries(guesses or Counter())
        missing = ends.total()
        more = missing - sum(end.count for end in most)
        counts = (deep, guessed, late, presumed)
        return cls(whole + missing, whole, unknown, most, more, *counts, _most(processes), guessed_in)

    @classmethod
    def together(cls, parts: Iterable[WholeStacks]) -> WholeStacks:
        """The sum of several captures."""
        parts, ends, deep_in, guesses = list(parts), Counter[str](), Counter[str](), Counter[str]()
        sums = {name: sum(getattr(part, name) for part in parts) for name in ("whole", "unknown", *_COUNTS)}
        for part in parts:
            for end in part.ends:  # of which several may have one name, as in a redacted capture
                ends[end.library] += end.count
                deep_in[end.library] += end.deep
            for end in part.guesses:
                guesses[end.library] += end.count
        # Processes of several hosts may have one number.
        processes = parts[0].processes if len(parts) == 1 else ()
        joined = cls.of(ends=ends, processes=processes, deep_in=deep_in, guesses=guesses, **sums)
        more = sum(part.more for part in parts)
        return replace(joined, stacks=joined.stacks + more, more=joined.more + more)

    def to_json(self) -> dict[str, Any]:
        """For a header, and for other programs."""
        guesses = [{"library": each.library, "count": each.count} for each in self.guesses]
        lists = {name: [asdict(each) for each in getattr(self, name)] for name in ("ends", "processes")}
        return {**asdict(self), "cut": self.cut, **lists, "guesses": guesses}

    @classmethod
    def from_json(cls, value: Any) -> WholeStacks | None:
        """Reads what `to_json` returned; None for anything else, which a stranger's header may have."""
        match value:
            case {"stacks": stacks, "whole": whole, "unknown": unknown, "ends": list(ends), "more": more} if all(
                type(number) is int and 0 <= number < _MOST for number in (stacks, whole, unknown, more)
            ):
                found = _ends(ends)
                if found is None:
                    return None
                counts = {name: value.get(name, 0) for name in _COUNTS}  # which came with format 6
                if not all(type(number) is int and 0 <= number <= stacks for number in counts.values()):
                    return None
                adds_up = stacks == whole + sum(end.count for end in found) + more
                if adds_up and unknown + counts["deep"] <= stacks - whole:
                    processes = _processes(value.get("processes", []))
                    guesses = _ends(value.get("guesses", [])) or ()
                    return cls(stacks, whole, unknown, found, more, **counts, processes=processes, guesses=guesses)
        return None

    def cleaned(self, clean: Callable[[str], str]) -> WholeStacks:
        """The same, with names of libraries that can be printed."""
        ends, guesses = (
            tuple(replace(end, library=clean(end.library)) for end in of) for of in (self.ends, self.guesses)
        )
        return replace(self, ends=ends, guesses=guesses)

    @property
    def cut(self) -> int:
        """How many are known not to reach the start, though they are not as deep as the limit."""
        return self.others - self.unknown - self.deep

    @property
    def others(self) -> int:
        """How many do not reach the start, or are not known to."""
        return self.stacks - self.whole

    @property
    def share(self) -> float:
        """The share of stacks that reach the start; 1 if there is no stack."""
        return self.whole / self.stacks if self.stacks else 1.0

    def text(self, what: str) -> str:
        """One sentence without its full stop.

        Args:
            what: the things that are counted, such as `launches`.
        """
        if not self.stacks:
            return f"no {what} with a stack"
        said = self._whole(what)
        if self.others:
            said += f"; the others end in {self._end_in()}"
            early = [each for each in self.processes if each.count]
            of = ", ".join(f"{each.pid} ({each.count:,} of {each.stacks:,})" for each in early[:_MOST_NAMED])
            said += f", in process {of}{and_more(len(early) - _MOST_NAMED)}" if of else ""
        return said + self._counts()

    def short(self, what: str) -> str:
        """The same in fewer words, without libraries and processes."""
        if not self.stacks:
            return f"no {what} with a stack"
        counts = {
            "cut": self.cut,
            "too deep": self.deep,
            "unknown": self.unknown,
            "guessed": self.guessed,
            "presumed": self.presumed,
            "finished late": self.late,
        }
        return ", ".join([self._whole(what), *(f"{count:,} {name}" for name, count in counts.items() if count)])

    def facts(self, name: str, what: str) -> Iterator[tuple[str, str]]:
        """All of it as lines: a name, and what is to be said.

        Args:
            name: of the first line.
            what: the things that are counted.
        """
        if not self.stacks:
            return
        yield name, self._whole(what) + (f"; {self.cut:,} cut" if self.cut else "") + self._counts()
        if self.others:
            yield "  end in", self._end_in()
        if self.guesses:
            yield "  guessed in", _named(self.guesses)
        for each in self.processes[:_MOST_NAMED]:
            yield "  process", each.text()
        if len(self.processes) > _MOST_NAMED:
            least = "at least " if len(self.processes) == MOST_PROCESSES else ""
            yield "", f"and {least}{counted(len(self.processes) - _MOST_NAMED, 'process', 'processes')} more"

    def _whole(self, what: str) -> str:
        return f"{self.whole:,} of {self.stacks:,} {what} ({percent(self.share)}) reach the program's start"

    def _end_in(self) -> str:
        return _named(self.ends, self.more > 0)

    def _counts(self) -> str:
        said = ""
        if self.unknown:
            said += f"; of {self.unknown:,} of them it is not known whether that is the start"
        if self.deep:
            said += f"; {self.deep:,} of them {'has' if self.deep == 1 else 'have'} too many frames"
        if self.guessed:
            said += f"; {_have(self.guessed)} callers that were guessed"
        if self.presumed:
            said += f"; {_have(self.presumed)} the stack of another one that looked the same"
        if self.late:
            said += f"; {self.late:,} {'was' if self.late == 1 else 'were'} finished when the recording had ended"
        return said


def recorded(header: Mapping[str, Any]) -> dict[str, WholeStacks]:
    """What a capture's header, which may be anyone's, says of the stacks of all that was recorded: by one of KINDS.

    Of a merged capture it is the sum. What no header tells is missing.
    """
    parts = header.get("parts")
    headers = [each for each in parts if isinstance(each, dict)] if isinstance(parts, list) else [header]
    told = [ends for each in headers if isinstance(ends := each.get(MEMBER), dict)]
    found = {kind: [ends for each in told if (ends := WholeStacks.from_json(each.get(kind)))] for kind in KINDS}
    return {kind: WholeStacks.together(of) for kind, of in found.items() if of}


def _have(count: int) -> str:
    return f"{count:,} {'has' if count == 1 else 'have'}"


def _named(libraries: Sequence[LibraryEnd], has_more: bool = False) -> str:
    first = libraries[:_MOST_NAMED]
    said = ", ".join(f"{end.library} ({end.count:,})" for end in first)
    return said + and_more(len(libraries) - len(first) + has_more)


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
    """Of a header, which may be anyone's; None for what cannot be true."""
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
    """Of a header, which may be anyone's: those that can be true."""
    found = []
    for each in value[:MOST_PROCESSES] if isinstance(value, list) else []:
        match each:
            case {"pid": int(pid), "stacks": int(stacks), "count": int(count)} if 0 <= stacks < _MOST > pid >= 0:
                counts = [count, *(each.get(name, 0) for name in _COUNTS)]
                if all(type(number) is int and 0 <= number <= stacks for number in counts) and any(counts):
                    found.append(ProcessEnd(pid, stacks, *counts))
    return tuple(found)
