"""How many launches or samples have a stack that reaches the start of its program, and where the others end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from iaprof.formats.quantities import and_more, percent

MOST_LIBRARIES = 50  # that are told apart
MOST_PROCESSES = 20  # likewise
_MOST_NAMED = 3  # in a sentence
_LONGEST_NAME = 255  # characters
_MOST = 1 << 64
_COUNTS = ("deep", "guessed", "late", "presumed")


@dataclass(frozen=True)
class LibraryEnd:
    """How many stacks end in one library."""

    library: str
    count: int


@dataclass(frozen=True)
class ProcessEnd:
    """How many stacks of one process end early."""

    pid: int
    stacks: int
    count: int  # of these


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
    processes: tuple[ProcessEnd, ...] = ()  # those with the most stacks that are not whole, the most first

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
        """
        by_count = sorted(ends.items(), key=lambda end: (-end[1], end[0]))[:MOST_LIBRARIES]
        most = tuple(LibraryEnd(library, count) for library, count in by_count if count)
        missing = ends.total()
        more = missing - sum(end.count for end in most)
        counts = (deep, guessed, late, presumed)
        return cls(whole + missing, whole, unknown, most, more, *counts, _most(processes))

    @classmethod
    def together(cls, parts: Iterable[WholeStacks]) -> WholeStacks:
        """The sum of several captures."""
        parts, ends = list(parts), Counter[str]()
        sums = {name: sum(getattr(part, name) for part in parts) for name in ("whole", "unknown", *_COUNTS)}
        for part in parts:
            for end in part.ends:  # of which several may have one name, as in a redacted capture
                ends[end.library] += end.count
        # Processes of several hosts may have one number.
        joined = cls.of(ends=ends, processes=parts[0].processes if len(parts) == 1 else (), **sums)
        more = sum(part.more for part in parts)
        return replace(joined, stacks=joined.stacks + more, more=joined.more + more)

    def to_json(self) -> dict[str, Any]:
        """For a header, and for other programs."""
        ends, processes = map(asdict, self.ends), map(asdict, self.processes)
        return {**asdict(self), "ends": list(ends), "processes": list(processes)}

    @classmethod
    def from_json(cls, value: Any) -> WholeStacks | None:
        """Reads what `to_json` returned; None for anything else, which a stranger's header may have."""
        match value:
            case {"stacks": stacks, "whole": whole, "unknown": unknown, "ends": list(ends), "more": more} if all(
                type(number) is int and 0 <= number < _MOST for number in (stacks, whole, unknown, more)
            ):
                found = []
                for end in ends[:MOST_LIBRARIES]:
                    match end:
                        case {"library": str() | None as library, "count": int(count)} if 0 <= count < _MOST:
                            found.append(LibraryEnd((library or "[redacted]")[:_LONGEST_NAME], count))
                        case _:
                            return None
                counts = {name: value.get(name, 0) for name in _COUNTS}  # which came with format 6
                if not all(type(number) is int and 0 <= number <= stacks for number in counts.values()):
                    return None
                adds_up = stacks == whole + sum(end.count for end in found) + more
                if adds_up and unknown + counts["deep"] <= stacks - whole:
                    processes = _processes(value.get("processes", []))
                    return cls(stacks, whole, unknown, tuple(found), more, **counts, processes=processes)
        return None

    def cleaned(self, clean: Callable[[str], str]) -> WholeStacks:
        """The same, with names of libraries that can be printed."""
        return replace(self, ends=tuple(replace(end, library=clean(end.library)) for end in self.ends))

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
        said = f"{self.whole:,} of {self.stacks:,} {what} ({percent(self.share)}) reach the program's start"
        if self.others:
            first = self.ends[:_MOST_NAMED]
            left = len(self.ends) - len(first) + (self.more > 0)
            libraries = ", ".join(f"{end.library} ({end.count:,})" for end in first)
            said += f"; the others end in {libraries}{and_more(left)}"
            of = ", ".join(f"{each.pid} ({each.count:,} of {each.stacks:,})" for each in self.processes[:_MOST_NAMED])
            said += f", in process {of}{and_more(len(self.processes) - _MOST_NAMED)}" if of else ""
        if self.unknown:
            said += f"; of {self.unknown:,} of them it is not known whether that is the start"
        if self.deep:
            said += f"; {self.deep:,} of them have too many frames"
        if self.guessed:
            said += f"; {self.guessed:,} have callers that were guessed"
        if self.presumed:
            said += f"; {self.presumed:,} have the stack of another one that looked the same"
        if self.late:
            said += f"; {self.late:,} were finished when the recording had ended"
        return said


def _most(processes: Iterable[ProcessEnd]) -> tuple[ProcessEnd, ...]:
    stacks, counts = Counter[int](), Counter[int]()
    for each in processes:
        stacks[each.pid] += each.stacks
        counts[each.pid] += each.count
    most = sorted(((count, pid) for pid, count in counts.items() if count), key=lambda each: (-each[0], each[1]))
    return tuple(ProcessEnd(pid, stacks[pid], count) for count, pid in most[:MOST_PROCESSES])


def _processes(value: Any) -> tuple[ProcessEnd, ...]:
    """Of a header, which may be anyone's: those that can be true."""
    found = []
    for each in value[:MOST_PROCESSES] if isinstance(value, list) else []:
        match each:
            case {"pid": int(pid), "stacks": int(stacks), "count": int(count)} if (
                0 < count <= stacks < _MOST > pid >= 0
            ):
                found.append(ProcessEnd(pid, stacks, count))
    return tuple(found)
