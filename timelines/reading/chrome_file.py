"""Reads files in Chrome's format: a list of events, or an object that has one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from iaprof.basics.errors import IaprofError
from iaprof.sandbox.parent import AnswerError, integer
from iaprof.timelines.reading.children import End, events
from iaprof.timelines.reading.imported_file import ImportedFile, ReadAgain
from iaprof.timelines.reading.members import EVENTS

_OWN = "Acelyzer"  # in otherData.Application of what the AIU Trace Analyzer wrote
_ALWAYS = ("deviceProperties", "distributedInfo", "otherData")
_MOST_MEMBERS, _MOST_ALWAYS = 1 << 16, 1 << 20  # bytes of JSON, of all members of a file, and of each of those
_MOST_MEMBER_COUNT = 1000
_BLANK = b" \t\r\n"
_START = re.compile(
    rb"\s*+(?:\{|\[\s*+(?:\Z|[\[\]{\"\d,-]|(?:true|false|null|nan|inf(?:inity)?)\s*+[,\]]))", re.IGNORECASE
)
_OBJECT = re.compile(rb"\{\s*+[\"']")
_MOST_RANK = 1 << 31


def is_chrome(start: bytes) -> bool:
    """Whether a file with this beginning may be such a trace: JSON in any encoding.

    Its list has values or objects: folded stacks may begin with `[unknown]`.
    """
    plain = start.removeprefix(b"\xef\xbb\xbf").replace(b"\0", b"").removeprefix(b"\xff\xfe").removeprefix(b"\xfe\xff")
    return _START.match(plain) is not None or (plain.lstrip()[:1] == b"[" and _OBJECT.search(plain) is not None)


def read_chrome(file: ImportedFile) -> None:
    """Reads a file.

    Raises:
        IaprofError: it is not a trace.
        ReadAgain: it has to be read again, with what was found out.
    """
    _Chrome(file).read()


class _Chrome:
    def __init__(self, file: ImportedFile) -> None:
        self._file, self._source, self._reading, self._facts = file, file.source, file.reading, file.facts
        self._room = _MOST_MEMBERS  # bytes left

    def read(self) -> None:
        """Reads all of it."""
        at, start = self._start()
        if start == b"[":
            end = self._events(at)
            if end.ended:
                self._check_rest(end.at)
        else:
            self._object(at)
        self._file.find_dialect()
        if (rank := _rank(self._facts.members)) is not None:
            self._facts.rank = rank

    def _start(self) -> tuple[int, bytes]:
        """Returns where the outermost value begins, and its first character."""
        at = self._source.begin
        while True:
            data, is_last = self._source.bytes(at, 1 << 16)
            stripped = data.lstrip(_BLANK)
            if stripped:
                break
            if is_last:
                raise IaprofError(f"{self._file.name} is empty: it is not a trace")
            at += len(data)
        first = stripped[:1]
        if first not in (b"[", b"{"):
            raise IaprofError(
                f"{self._file.name} is not a trace: it is neither a list of events nor an object with traceEvents"
            )
        return at + len(data) - len(stripped) + 1, first

    def _object(self, at: int) -> None:
        source, size = self._source, self._reading.piece_bytes
        state: Any = {"key": None, "depth": 0, "in_text": False, "value": "", "too_long": False}
        has_events = False
        while True:
            span, stop, is_last = source.span(at, size)
            answer = self._reading.children.members(span, {"state": state, "is_last": is_last})
            match answer:
                case {
                    "state": dict(state), "members": list(members), "consumed": consumed, "events": bool(has_list),
                    "ended": bool(ended),
                }:  # fmt: skip
                    consumed = integer(consumed, stop - at + 1)
                case _:
                    raise AnswerError
            for member in members:
                has_events |= self._member(member)
            at += consumed
            if has_list:
                has_events = True
                end = self._events(at)
                at, size = end.at, self._reading.piece_bytes
                if not end.ended:
                    self._facts.problems.append("its list of events has no end: it may have been cut short")
                    break
            elif ended:
                self._check_rest(at)
                break
            elif is_last:
                self._facts.problems.append("it has no end: it may have been cut short")
                break
            elif not consumed:
                size = min(size * 4 + 1, 1 << 26)
            source.forget(at)
        if not has_events:
            raise IaprofError(f"{self._file.name} has no {EVENTS}: it is not a trace")
        application = self._facts.members.get("otherData")
        application = application.get("Application") if isinstance(application, dict) else None
        if (
            isinstance(application, str)
            and _OWN in application
            and not self._file.remembered.is_own
            and self._facts.counts.events
        ):
            self._file.remembered.is_own = True
            raise ReadAgain

    def _member(self, member: Any) -> bool:
        """Keeps a member; returns whether it is traceEvents, which then is not a list."""
        match member:
            case [str(name), bool(is_read), value]:
                pass
            case _:
                raise AnswerError
        if name == EVENTS:
            self._facts.problems.append("its traceEvents are not a list")
            return True
        kept = self._facts.members
        size = len(name) + len(json.dumps(value))
        if name == "deviceProperties" and not isinstance(value, list):
            value = []
        fits = size <= _MOST_ALWAYS if name in _ALWAYS else size <= self._room and len(kept) < _MOST_MEMBER_COUNT
        if not is_read or not fits:
            self._facts.members_left_out += 1
            if name == "deviceProperties":
                kept[name] = []
        else:
            kept[name] = value
            self._room -= 0 if name in _ALWAYS else size
        return False

    def _check_rest(self, at: int) -> None:
        data, _ = self._source.bytes(at, 1 << 16)
        if data.strip(_BLANK + b",\0"):
            self._facts.problems.append("it continues after the end of the trace: the rest was not read")

    def _events(self, at: int) -> End:
        end = End()
        if "deviceProperties" in self._facts.members:
            self._file.keep_names()
        for piece in events(self._source, at, self._reading.children, end, self._reading.piece_bytes):
            self._file.add(piece)
        return end


def _rank(members: Mapping[str, Any]) -> int | None:
    info = members.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if isinstance(rank, str) and rank.isascii() and rank.isdigit() and len(rank) < 20:
        rank = int(rank)
    return rank if type(rank) is int and 0 <= rank < _MOST_RANK else None
