"""How many launches or CPU samples have all their frames of Python, and what the others lack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntFlag
from typing import Any

from iaprof.basics.quantities import percent

NO_CODE = (1 << 32) - 1
"""In place of a code object's number: it was not copied, or cannot be read."""
NOWHERE = (1 << 16) - 1
"""In place of the number of a frame of C: it is not known which one runs a frame of Python."""
DEEPEST = 1024  # frames that are read of a stack; recorders keep fewer
MEMBER = "python_stacks"
"""The member of a capture's header: an object with `to_json` of each of KINDS."""
KINDS = {"launches": "launches", "cpu_samples": "CPU samples"}
"""What is counted, and what it is called."""
_NAMES = {"launches": "launch Python", "cpu_samples": "CPU Python"}
_MOST = 1 << 64


class State(IntFlag):
    """What is to be said of the frames of Python of one stack."""

    NONE = 0  # it has none
    SOME = 1  # it was looked for them, and has some
    DEEP = 2  # it has more than are kept
    DAMAGED = 4  # not all could be read
    UNNAMED = 8  # of one or more the code object is missing
    UNPLACED = 16  # of one or more it is not known between which frames of C they ran

    @classmethod
    def of(cls, ended: str | None) -> State:
        """What the column `python_ended` tells; what it does not tell is not known to be whole."""
        return {"whole": cls.SOME, "deep": cls.SOME | cls.DEEP}.get(ended or "", cls.SOME | cls.DAMAGED)


_FLAGS = {
    "deep": State.DEEP,
    "damaged": State.DAMAGED,
    "unnamed": State.UNNAMED,
    "unplaced": State.UNPLACED,
}


@dataclass(frozen=True)
class PythonCounts:
    """Launches or samples by what their stacks tell of Python; a stack can lack several things."""

    stacks: int = 0  # those whose stack has frames of Python
    whole: int = 0  # of these, with all of them, each with a name and a place
    deep: int = 0  # with more frames than are kept
    damaged: int = 0  # with frames that could not be read
    unnamed: int = 0  # with a frame whose code object is missing
    unplaced: int = 0  # with a frame of which it is not known between which frames of C it ran
    none: int = 0  # further ones, of processes with an interpreter, whose stack has no frame of Python

    @classmethod
    def of(cls, counts: Mapping[int, int], none: int = 0) -> PythonCounts:
        """Makes it from counts by State, in any order; those of State.NONE do not count."""
        some = {state: count for state, count in counts.items() if state & State.SOME}
        lacking = {name: sum(count for state, count in some.items() if state & flag) for name, flag in _FLAGS.items()}
        return cls(sum(some.values()), some.get(State.SOME, 0), **lacking, none=none)

    @classmethod
    def together(cls, parts: Iterable[PythonCounts]) -> PythonCounts:
        """The sum of several captures."""
        found = list(parts)
        return cls(*(sum(getattr(part, each.name) for part in found) for each in fields(cls)))

    def to_json(self) -> dict[str, int]:
        """For a header, and for other programs."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> PythonCounts | None:
        """Reads what `to_json` returned; None for anything else, which a stranger's header may have."""
        if not isinstance(value, dict):
            return None
        counts = {each.name: value.get(each.name) for each in fields(cls)}
        if not all(type(count) is int and 0 <= count < _MOST for count in counts.values()):
            return None
        found = cls(**{name: int(count or 0) for name, count in counts.items()})
        return found if max(found.whole, *(getattr(found, name) for name in _FLAGS)) <= found.stacks else None

    @property
    def is_whole(self) -> bool:
        """Whether no stack lacks anything."""
        return self.whole == self.stacks

    def text(self, what: str) -> str:
        """One sentence without its full stop.

        Args:
            what: the things that are counted, such as `launches`.
        """
        if not self.stacks:
            return f"none of {self.none:,} {what} of Python processes has Python functions"
        share = percent(self.whole / self.stacks)
        said = f"{self.whole:,} of {self.stacks:,} {what} with Python functions ({share}) have all of them"
        lacking = {
            "too deep": self.deep,
            "damaged": self.damaged,
            "without a name": self.unnamed,
            "without a place": self.unplaced,
        }
        said += "".join(f", {count:,} {name}" for name, count in lacking.items() if count)
        return said + (f"; {self.none:,} more of Python processes have none" if self.none else "")

    def facts(self, kind: str) -> Iterator[tuple[str, str]]:
        """The same as a line: a name, and what is to be said; nothing where no Python ran.

        Args:
            kind: of KINDS.
        """
        if self.stacks or self.none:
            yield _NAMES[kind], self.text(KINDS[kind])


def recorded(header: Mapping[str, Any]) -> dict[str, PythonCounts]:
    """What a capture's header, which may be anyone's, says of Python in all that was recorded: by one of KINDS.

    Of a merged capture it is the sum. What no header tells is missing.
    """
    parts = header.get("parts")
    headers = [each for each in parts if isinstance(each, dict)] if isinstance(parts, list) else [header]
    told = [each[MEMBER] for each in headers if isinstance(each.get(MEMBER), dict)]
    found = {kind: [each for one in told if (each := PythonCounts.from_json(one.get(kind)))] for kind in KINDS}
    return {kind: PythonCounts.together(of) for kind, of in found.items() if of}


def said(header: Mapping[str, Any]) -> list[str]:
    """A sentence for each of KINDS of which the header tells something, without full stops."""
    return [each.text(KINDS[kind]) for kind, each in recorded(header).items() if each.stacks or each.none]
