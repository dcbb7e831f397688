"""Counts launches and CPU samples by the completeness of their Python frames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntFlag
from typing import Any

from iaprof.basics.quantities import percent

NO_CODE = (1 << 32) - 1
"""Replaces a code object's id if the code object was not copied or cannot be read."""
NOWHERE = (1 << 16) - 1
"""Replaces the index of a C frame if it is not known which C frame runs a Python frame."""
DEEPEST = 1024  # maximum of Python frames read per stack; recorders keep fewer
MEMBER = "python_stacks"
"""The header member: an object with the `to_json` of each key of NOUNS."""
NOUNS = {"launches": "launches", "cpu_samples": "CPU samples"}
"""What is counted, and its name in sentences."""
_NAMES = {"launches": "launch Python", "cpu_samples": "CPU Python"}
_MOST = 1 << 64


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


def recorded(header: Mapping[str, Any]) -> dict[str, PythonCounts]:
    """The counts in a capture's header (untrusted) by the keys of NOUNS, summed over the parts of a merged capture.

    Kinds that no header describes are missing.
    """
    parts = header.get("parts")
    headers = [each for each in parts if isinstance(each, dict)] if isinstance(parts, list) else [header]
    members = [each[MEMBER] for each in headers if isinstance(each.get(MEMBER), dict)]
    found = {kind: [each for one in members if (each := PythonCounts.from_json(one.get(kind)))] for kind in NOUNS}
    return {kind: PythonCounts.total(of) for kind, of in found.items() if of}


def sentences(header: Mapping[str, Any]) -> list[str]:
    """A sentence, without a full stop, for each key of NOUNS in the header."""
    return [each.text(NOUNS[kind]) for kind, each in recorded(header).items() if each.stacks or each.none]
