"""Finds the members of a trace's outermost object, in a sandboxed child: everything but the list of events."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from iaprof.basics.finite_json import loads_finite

EVENTS = "traceEvents"
_BLANK = re.compile(rb"[ \t\r\n,]*")
_KEY = re.compile(rb'"((?:[^"\\]|\\.)*)"[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_OUTSIDE, _INSIDE, _IN_TEXT = re.compile(rb'[",}\]\[{]'), re.compile(rb'["\[\]{}]'), re.compile(rb'["\\]')
_MOST_BYTES = 1 << 20  # of a member's value: a longer one is left out
_MOST_KEY = 1 << 12
_MOST_DEPTH = 50


@dataclass
class State:
    """Where in the object a scan is, as JSON; `value` is empty between two pieces."""

    key: str | None = None  # of the value that goes on
    depth: int = 0
    in_text: bool = False
    value: str = ""  # what was read of it, as Latin-1
    too_long: bool = False  # or nested too deeply


@dataclass
class Scanned:
    """What a scan found."""

    state: State
    members: list[tuple[str, bool, Any]]  # in their order; False: too long, or unreadable
    consumed: int  # bytes
    events: bool = False  # the list of events starts there
    ended: bool = False  # the object has ended


def scan(data: bytes, state: State, is_last: bool) -> Scanned:
    """Scans a piece of the object, from after its `{` or after a member, up to the list of events.

    Args:
        data: the piece.
        state: what the scan of the piece before returned.
        is_last: nothing follows it in the file.
    """
    found = Scanned(state, [], 0)
    at = key_at = 0
    while True:
        if state.key is None:
            blank = _BLANK.match(data, at)
            assert blank is not None
            at = found.consumed = blank.end()
            if data[at : at + 1] == b"}":
                found.consumed, found.ended = at + 1, True
                return found
            key = _KEY.match(data, at)
            if key is None or key.end() == len(data):
                if at < len(data) and (data[at : at + 1] != b'"' or len(data) - at > _MOST_KEY or is_last):
                    following = data.find(b'"', at + 1)  # not the name of a member: skip to the next one
                    if following > 0:
                        at = following
                        continue
                    found.consumed = len(data)
                return found
            state.key, key_at = _text(key[1]), at
            at = key.end()
            if state.key == EVENTS and data[at : at + 1] == b"[":
                state.key = None
                found.consumed, found.events = at + 1, True
                return found
        at = found.consumed = _value(data, at, state, found)
        if state.key is not None:  # its value continues in the next piece
            if is_last:
                found.members.append((state.key, False, None))
            elif not state.too_long:  # only values that are left out continue: others are read again as a whole
                found.state, found.consumed = State(), key_at
            return found


def _value(data: bytes, at: int, state: State, found: Scanned) -> int:
    """Goes to the end of a value, or of the data. Returns where that is."""
    start = at
    while True:
        pattern = _IN_TEXT if state.in_text else _INSIDE if state.depth else _OUTSIDE
        token = pattern.search(data, at)
        if token is None:
            _keep(data[start:], state)
            return len(data)
        character, at = token[0], token.end()
        if state.in_text:
            if character == b'"':
                state.in_text = False
            elif at == len(data):  # a backslash: the character that it escapes is in the next piece
                _keep(data[start : at - 1], state)
                return at - 1
            else:
                at += 1
        elif character == b'"':
            state.in_text = True
        elif character in b"[{":
            state.depth += 1
            state.too_long |= state.depth > _MOST_DEPTH
        elif state.depth:
            state.depth -= 1
        else:  # a comma, or the end of the object
            _keep(data[start : at - 1], state)
            assert state.key is not None
            found.members.append((state.key, *_decoded(state)))
            state.key, state.value, state.too_long = None, "", False
            return at - 1


def _keep(data: bytes, state: State) -> None:
    if len(state.value) + len(data) > _MOST_BYTES:
        state.too_long, state.value = True, ""
    elif not state.too_long:
        state.value += data.decode("latin-1")


def _decoded(state: State) -> tuple[bool, Any]:
    from iaprof.timelines.reading.not_finite import with_nulls  # json_reader.py imports numpy later than this module

    if state.too_long:
        return False, None
    try:
        text = with_nulls(state.value.encode("latin-1")).text.decode("utf-8", "replace")
        return True, loads_finite(text, strict=False)
    except (ValueError, RecursionError):
        return False, None


def _text(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text
