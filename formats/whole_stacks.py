"""How many launches or samples have a stack that reaches the start of its program, and where the others end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from iaprof.formats.quantities import and_more, percent

MOST_LIBRARIES = 50  # that are told apart
_MOST_NAMED = 3  # in a sentence
_LONGEST_NAME = 255  # characters
_MOST = 1 << 64


@dataclass(frozen=True)
class LibraryEnd:
    """How many stacks end in one library."""

    library: str
    count: int


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

    @classmethod
    def of(cls, whole: int, unknown: int, ends: Counter[str], deep: int = 0, guessed: int = 0) -> WholeStacks:
        """Makes it from counts; `ends` counts each stack that is not whole, by library."""
        by_count = sorted(ends.items(), key=lambda end: (-end[1], end[0]))[:MOST_LIBRARIES]
        most = tuple(LibraryEnd(library, count) for library, count in by_count if count)
        others = ends.total()
        return cls(whole + others, whole, unknown, most, others - sum(end.count for end in most), deep, guessed)

    @classmethod
    def together(cls, parts: Iterable[WholeStacks]) -> WholeStacks:
        """The sum of several captures."""
        whole = unknown = more = deep = guessed = 0
        ends: Counter[str] = Counter()
        for part in parts:
            whole, unknown, more = whole + part.whole, unknown + part.unknown, more + part.more
            deep, guessed = deep + part.deep, guessed + part.guessed
            for end in part.ends:  # of which several may have one name, as in a redacted capture
                ends[end.library] += end.count
        joined = cls.of(whole, unknown, ends)
        return cls(joined.stacks + more, whole, unknown, joined.ends, joined.more + more, deep, guessed)

    def to_json(self) -> dict[str, Any]:
        """For a header, and for other programs."""
        return {**asdict(self), "ends": [asdict(end) for end in self.ends]}

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
                deep, guessed = value.get("deep", 0), value.get("guessed", 0)  # which came with format 6
                if not all(type(number) is int and 0 <= number <= stacks for number in (deep, guessed)):
                    return None
                if stacks == whole + sum(end.count for end in found) + more and unknown + deep <= stacks - whole:
                    return cls(stacks, whole, unknown, tuple(found), more, deep, guessed)
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
        if self.unknown:
            said += f"; of {self.unknown:,} of them it is not known whether that is the start"
        if self.deep:
            said += f"; {self.deep:,} of them have too many frames"
        if self.guessed:
            said += f"; {self.guessed:,} have callers that were guessed"
        return said
