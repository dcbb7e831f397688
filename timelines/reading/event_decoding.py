"""Decodes pieces of a list of events, in a sandboxed child: quickly if they are valid, event by event where not.

A piece starts at an event, or after one. Its end is guessed: a `{` after `,`, which may be inside an event. But if the
piece decodes as whole elements of a list, its brackets and strings balance, so its end is between two events.

Every element of the list is counted once, damaged or not: as an event, or as dropped for a reason.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

_BLANK = b" \t\r\n,"
_CANDIDATE = re.compile(  # before what may be an element, or the end of the list; behind most commas are members
    rb'(?=\])|[}\]\n][ \t\r\n,]*+|,[ \t\r\n,]*+(?!"[^"\\]*+"[ \t\r\n]*+:)'
)
_KEY = re.compile(rb'"(ph|ts|pid|tid|dur|name|cat)"[ \t\r\n]*+:')
_OBJECT = re.compile(rb'\{[ \t\r\n]*+"[^"\\]*+"[ \t\r\n]*+:')
_BEGIN = re.compile(rb"\[|\{[ \t\r\n]*+(?:[\"'}]|\w++[ \t\r\n]*+:)")  # of an element, also as Python writes it
_SCALAR = re.compile(rb'(?:"[^"\\\n]*+"|[^ \t\r\n,:"\[\]{}]++)[ \t\r\n]*+(?=[,\]])')
NO_END = re.compile(rb'[ \t\r\n]*+(?:,[ \t\r\n,]*+"(?:[^"\\]|\\.)*+"[ \t\r\n]*+:|[^ \t\r\n,\[\]{}])', re.DOTALL)
"""What follows a value inside of a damaged element: a key, or a character that does not separate elements."""
_TEXT = rb"[^{}\[\]\n]*+"
_LIST = rb"\[T(?:\[T\]T){0,99}\]"
_ARGS = rb"(?:(?<=:)|(?<=: ))\{T(?:LT){0,99}\}".replace(b"L", _LIST)
_ONE_LINE = re.compile(  # an element on one line whose brackets balance only at its end, before one that begins
    (rb'(\{T(?:(?:%b|%b)T){0,99}\})[ \t\r\n]*+,[ \t\r\n,]*+(?=\{[ \t\r\n]*+")' % (_LIST, _ARGS)).replace(b"T", _TEXT)
)
_BRACES = re.compile(rb"\}[} \t\r\n]*+(?=,[ \t\r\n]*+\{)")  # too many of them after an event
_NOT_BLANK = re.compile(rb"[^ \t\r\n,]")
_LIST_END = re.compile(rb'\][ \t\r\n]*+(?:\}?[ \t\r\n]*+\Z|,[ \t\r\n]*+"[^"\\]*+"[ \t\r\n]*+:)')
_END = re.compile(rb'\}[ \t\r\n]*(\])[ \t\r\n]*(?:\}?[ \t\r\n]*\Z|,[ \t\r\n]*"[^"\\]*"[ \t\r\n]*:)')
_MOST_MARGIN = 64
_OPEN, _LIST_CLOSE = b"{]"
_SMALL = 4096  # bytes: a smaller range with damage is read event by event
_ONE_BY_ONE = 32  # elements, after which several are decoded at once again
_SEEN = 1 << 9  # bytes that are first decoded to read one event
_NO_OBJECTS = re.compile(  # elements that are not objects, each with the comma after it
    rb'(?:(?:-?\d[\d.eE+-]*+|true|false|null|\[\]|"[^"\\,]*+")[ \t\r\n]*+,[ \t\r\n]*+)+'
)
_SECONDS = 20.0  # for reading what is damaged in one piece
_MOST_NAME = 1 << 14


NOTHING = Raw(b"")
"""Stands for a member that an event does not have."""


class Event(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """An event with members that are frequent. Values that are Raw are checked later, whole columns at once."""

    name: str | None = None
    ph: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: Raw = NOTHING
    dur: Raw = NOTHING
    cat: str | None = None
    id: int | str | None = None
    args: dict[str, Raw] | None = None
    attr: dict[str, Raw] | None = None
    bp: Raw = NOTHING
    s: Raw = NOTHING


class _RareEvent(Event, forbid_unknown_fields=True, gc=False):
    """An event with all members of Chrome's format."""

    tts: Raw = NOTHING
    tdur: Raw = NOTHING
    cname: Raw = NOTHING
    sf: Raw = NOTHING
    esf: Raw = NOTHING
    stack: Raw = NOTHING
    estack: Raw = NOTHING
    scope: Raw = NOTHING
    id2: Raw = NOTHING
    bind_id: Raw = NOTHING
    flow_in: Raw = NOTHING
    flow_out: Raw = NOTHING
    use_async_tts: Raw = NOTHING
    v: Raw = NOTHING


_MEMBERS = frozenset(Event.__struct_fields__)
_RARE = [name for name in _RareEvent.__struct_fields__ if name not in _MEMBERS]
_decode = msgspec.json.Decoder(list[Event]).decode
_decode_one = msgspec.json.Decoder(Event).decode
_decode_rare = msgspec.json.Decoder(list[_RareEvent]).decode
_encode = msgspec.json.Encoder().encode
_lenient = json.JSONDecoder(
    strict=False,
    parse_float=lambda text: Raw(text.encode()),  # the text as it is in the file
    parse_int=lambda text: Raw(text.encode()),
    parse_constant=lambda _: None,  # NaN and Infinity are not JSON
)


@dataclass
class Piece:
    """What a piece of a list of events has."""

    events: list[Event] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    consumed: int = 0  # bytes up to where the next piece starts
    ended: bool = False  # the `]` of the list is before `consumed`
    lost: bool = False  # the next piece starts inside a damaged event
    bad_bytes: int = 0  # bytes that are not UTF-8, and became `?`


def read(data: bytes, is_last: bool, is_lost: bool = False, gives_up: bool = False) -> Piece:
    """Decodes a piece.

    Args:
        data: the piece.
        is_last: nothing follows it in the file.
        is_lost: it starts inside a damaged event, which was counted.
        gives_up: an event that does not end in the piece is too long, and is dropped.
    """
    text, bad_bytes = valid(data)
    piece = Piece()
    reader = _Reader(text, is_last, gives_up, piece)
    if is_lost or not reader.take(len(text)):
        reader.read(is_lost)
    if bad_bytes:
        piece.bad_bytes = valid(data[: piece.consumed])[1]  # what follows is read again
    return piece


def valid(data: bytes) -> tuple[bytes, int]:
    """Returns UTF-8 of the same length, with `?` for each invalid byte; and the number of invalid bytes."""
    try:
        data.decode()
    except UnicodeDecodeError:
        text, count = re.subn("[\udc80-\udcff]", "?", data.decode("utf-8", "surrogateescape"))
        return text.encode(), count
    return data, 0


class _Cut(Exception):
    """The data ends inside an element."""


class _Reader:
    def __init__(self, data: bytes, is_last: bool, gives_up: bool, piece: Piece) -> None:
        self._data, self._is_last, self._gives_up, self._piece = data, is_last, gives_up, piece
        self._at = 0
        self._deadline = 0.0

    def take(self, end: int) -> bool:
        """Decodes the elements up to `end`; returns False if some are not whole or are invalid."""
        text = b"[%b]" % self._data[self._at : end].strip(_BLANK)
        try:
            try:
                self._piece.events += _decode(text)
            except msgspec.ValidationError:
                self._piece.events += _with_rare_members(_decode_rare(text))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        self._at = self._piece.consumed = end
        return True

    def read(self, is_lost: bool) -> None:
        """Reads the rest of the data: ranges that decode as a whole, and single elements where they do not."""
        self._deadline = time.monotonic() + _SECONDS
        try:
            if is_lost and not self._skip_rest():
                return
            size = (len(self._data) - self._at) // 4
            single = 0  # elements still to read one by one
            while (found := _NOT_BLANK.search(self._data, self._at)) is not None:
                self._at = self._piece.consumed = found.start()
                if (braces := _BRACES.match(self._data, self._at)) is not None:
                    self._at = self._piece.consumed = braces.end()
                    continue
                if self._data[self._at] == ord("]"):
                    self._at = self._piece.consumed = self._at + 1
                    self._piece.ended = True
                    return
                if single:
                    single -= 1
                    if not self._take_one():
                        return
                    continue
                end = self._boundary(size)
                if end is not None and self.take(end):
                    size *= 2
                elif end is not None and size > _SMALL:
                    size //= 4
                else:
                    single, size = _ONE_BY_ONE, _SMALL
            self._piece.consumed = len(self._data)
        except _Cut:
            self._piece.consumed -= len(self._margin(self._piece.consumed))

    def _boundary(self, size: int) -> int | None:
        """Returns the last place, up to `size` bytes ahead, where an event may start."""
        end = self._data.rfind(b"{", self._at + 1, self._at + size)
        while end > 0:
            before = self._data[max(end - 64, self._at + 1) : end].rstrip(b" \t\r\n")
            if before.endswith(b","):
                return end
            end = self._data.rfind(b"{", self._at + 1, end)
        return None

    def _take_one(self) -> bool:
        """Decodes one element, or drops it and goes to the next one; returns False if there is none."""
        piece = self._piece
        if (others := _NO_OBJECTS.match(self._data, self._at)) is not None:
            piece.dropped["not an object"] += others[0].count(b",")
            self._at = piece.consumed = others.end()
            return True
        if (whole := _ONE_LINE.match(self._data, self._at)) is not None:
            try:
                piece.events.append(_decode_one(whole[1]))
            except (msgspec.MsgspecError, ValueError, RecursionError):
                pass  # read it leniently
            else:
                self._at = piece.consumed = whole.end(1)
                return True
        try:
            value, end = self._element(self._at)
        except _Cut:
            if not self._is_last and not self._gives_up:
                raise
            return self._skip("cut off at the end of the file" if self._is_last else "too long")
        except ValueError:
            return self._skip()
        if NO_END.match(self._data, end):
            return self._skip()
        self._at = piece.consumed = end
        event = _as_event(value)
        if isinstance(event, str):
            piece.dropped[event] += 1
        else:
            piece.events.append(event)
        return True

    def _element(self, at: int) -> tuple[Any, int]:
        """Decodes the element at a place, leniently. Returns it, and where it ends.

        Raises:
            ValueError: it is damaged.
            _Cut: the data ends before it does.
        """
        size = _SEEN
        while True:
            text = self._data[at : at + size].decode("utf-8", "surrogateescape")
            is_rest = at + size >= len(self._data)
            try:
                value, length = _lenient.raw_decode(text)
                if length < len(text) or (is_rest and self._is_last):
                    return value, at + len(text[:length].encode("utf-8", "surrogateescape"))
                is_cut = True
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string")
                ends_nothing = is_rest and text.endswith("},")  # no number, word or escape
                is_cut |= error.pos >= len(text) - (0 if ends_nothing else 16)
                if not is_cut:
                    raise
            except RecursionError:
                raise ValueError("nested too deeply") from None
            if is_rest and is_cut:
                raise _Cut
            size *= 8

    def _skip(self, reason: str = "unreadable") -> bool:
        """Drops the damaged element here, and goes to the next one; returns False if there is none.

        Args:
            reason: why, if the element is the last of the data. Other elements are counted as unreadable.

        Raises:
            _Cut: the data end before the next element.
        """
        found = self._go(self._following(self._at))
        self._piece.dropped["unreadable" if found else reason] += 1
        return found

    def _skip_rest(self) -> bool:
        """Skips the damaged element in which the data start, which was already counted; otherwise as `_skip`."""
        return self._go(0 if self._looks_like_event(0) else self._following(0, is_lost=True))

    def _go(self, place: int | None) -> bool:
        piece = self._piece
        if place is None and self._is_last:
            place = max((end.start(1) for end in _END.finditer(self._data, self._at)), default=None)
        elif place is None and not self._gives_up:
            raise _Cut
        piece.consumed = self._at = len(self._data) if place is None else place
        piece.lost = place is None and not self._is_last
        return place is not None

    def _following(self, begin: int, is_lost: bool = False) -> int | None:
        """Returns where the next element or the end of the list is, after a damaged element; None: not in the data.

        It is where brackets balance, including those in texts, as quotes may be missing; or at a line with the same
        indentation as the damaged element; or, if brackets are missing, at an object with members of events.
        """
        if not is_lost and (whole := _ONE_LINE.match(self._data, begin)) is not None:
            return whole.end()
        data, depth, at, keys, keys_at = self._data, 0, begin, set[bytes](), begin
        margin = self._margin(begin)
        for separator in _CANDIDATE.finditer(data, begin + (not is_lost)):
            place = separator.end()
            skipped = data[at:place]
            depth += skipped.count(b"{") + skipped.count(b"[") - skipped.count(b"}") - skipped.count(b"]")
            depth, at = max(depth, 0), place
            behind = separator[0]
            balances = depth == 0 and b"," in behind and not is_lost
            if place == len(data):
                return place if balances and behind.startswith(b"}") and not self._is_last else None
            character = data[place]
            if character == _LIST_CLOSE:
                if depth == 0 and (end := _LIST_END.match(data, place)) and (b":" in end[0] or self._is_last):
                    return place
                continue
            is_object = character == _OPEN
            if character in b"}:" or not (is_object or balances or b"\n" in behind):
                continue
            if balances and (b"\n" in behind or _BEGIN.match(data, place) or _SCALAR.match(data, place)):
                return place
            if margin and not is_lost and data.startswith(margin, place - len(margin)):
                if is_object or behind.startswith(b"}"):
                    return place
            elif is_object and (not margin or b"\n" in behind):
                keys.update(_KEY.findall(data, keys_at, place))
                keys_at = place
                if ((is_lost or len(keys) > 1) and self._looks_like_event(place)) or self._is_event(place):
                    return place
        return None

    def _margin(self, place: int) -> bytes:
        """Returns the line end and the indentation before a place; b"" if something else is before it in its line."""
        before = self._data[max(place - _MOST_MARGIN, 0) : place]
        margin = before[before.rfind(b"\n") :] if b"\n" in before else b""
        return b"" if margin.strip() else margin

    def _looks_like_event(self, place: int) -> bool:
        """Whether an object at a place, damaged or not, has members of events before the next object."""
        if not _OBJECT.match(self._data, place):
            return False
        end = self._data.find(b"{", place + 1)
        return len(set(_KEY.findall(self._data, place, end if end > 0 else len(self._data)))) > 1

    def _is_event(self, place: int) -> bool:
        """Whether an object at a place can be decoded, and has a phase.

        Raises:
            _Cut: it does not end in the data.
        """
        if time.monotonic() > self._deadline:
            return False
        try:
            value, _ = self._element(place)
        except _Cut:
            if self._is_last or self._gives_up:
                return False
            raise
        except ValueError:
            return False
        return isinstance(value, dict) and "ph" in value


def _with_rare_members(events: Sequence[_RareEvent]) -> Sequence[Event]:
    """Moves members that have no column to args."""
    for event in events:
        rare = {name: value for name in _RARE if (value := getattr(event, name)) is not NOTHING}
        if rare:
            event.args = {**rare, **(event.attr or {}), **(event.args or {})}
            event.attr = None
    return events


def _as_event(value: Any) -> Event | str:
    """Makes an event of a decoded element, or returns why it is not an event."""
    if not isinstance(value, dict):
        return "not an object"
    known = {name: value[name] for name in _MEMBERS & value.keys()}
    args: dict[str, Any] = {}
    for name in ("attr", "args"):
        given = known.pop(name, None)
        if isinstance(given, dict):
            args |= given
        elif given is not None:
            args[name] = given
    for name in ("name", "ph", "cat"):
        if name in known and not isinstance(known[name], str):
            other = known.pop(name)
            if name != "ph" and other is not None:
                known[name] = bytes(other).decode() if isinstance(other, Raw) else json.dumps(_plain(other))
    for name in ("pid", "tid", "id"):
        number = known.get(name)
        if isinstance(number, Raw):
            known[name] = text = bytes(number).decode()
            if text.lstrip("-").isdigit() and len(text) < 20:
                known[name] = int(text)
        elif number is not None and not isinstance(number, str):
            known[name] = json.dumps(_plain(number))
    for name in ("ts", "dur"):
        if known.get(name, 0) is None:
            del known[name]
    args = {name: each for name, each in value.items() if name not in _MEMBERS} | args
    try:
        return msgspec.json.decode(_text(known | ({"args": args} if args else {})), type=Event)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "unreadable"


def _plain(value: Any) -> Any:
    """Returns a value without Raw, for json.dumps."""
    match value:
        case Raw():
            return json.loads(bytes(value))
        case dict():
            return {name: _plain(each) for name, each in value.items()}
        case list():
            return [_plain(each) for each in value]
    return value


def _text(value: Any) -> bytes:
    try:
        return _encode(value)
    except UnicodeEncodeError:  # unpaired surrogates, which JSON can escape
        return _encode(_without_surrogates(value))


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_without_surrogates(name): _without_surrogates(each) for name, each in value.items()}
        case list():
            return [_without_surrogates(each) for each in value]
    return value
