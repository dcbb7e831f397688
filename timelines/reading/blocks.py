"""Finds where the members of events are in a block of JSON: whole arrays of places, without an object for any value.

Only JSON that is valid and as runtimes write it has blocks; events.py reads what is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.reading.events import NO_END

_QUOTE, _COLON, _COMMA, _OPEN, _CLOSE, _LIST = b'":,{}['
PRIMITIVE, TEXT, OBJECT, LIST = 0, _QUOTE, _OPEN, _LIST
"""Kinds of values: a number, true, false or null; and the characters that begin others."""
_BLANK = b" \t\r\n,"
_FRONT = 16  # bytes before a block, so that eight bytes before any place can be read
_BACK = 8
_BACKSLASH = ord("\\")
_MOST_BLANKS = 64  # beside a value
_validate = msgspec.json.Decoder(msgspec.Raw).decode
Places = NDArray[np.int64]


def _marked(characters: bytes) -> NDArray[np.bool_]:
    table = np.zeros(256, bool)
    table[list(characters)] = True
    return table


_IS_TOKEN, IS_BLANK = _marked(b'"{}[]:,').tobytes(), _marked(b" \t\r\n")
_KINDS = np.zeros(256, np.uint8)
_KINDS[[TEXT, OBJECT, LIST]] = TEXT, OBJECT, LIST
_STEP = _marked(b"{[").astype(np.int8) - _marked(b"}]")
_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)


class NotPlain(Exception):
    """A block needs more care."""


@dataclass(frozen=True)
class Members:
    """Members of objects, in n rows, in their order; places are offsets into Block.bytes."""

    event: Places  # number of the event that they belong to
    key: Places  # of the key's first character
    key_length: Places
    kind: NDArray[np.uint8]  # of the value
    start: Places  # of the value, with its quotes
    end: Places
    separator: Places  # the `,` or `}` behind it

    def take(self, rows: NDArray[np.bool_] | Places) -> Members:
        """Returns some of them."""
        return Members(*(getattr(self, name)[rows] for name in MEMBERS))

    def inside(self) -> tuple[Places, Places]:
        """Returns where values begin and end, texts without their quotes."""
        quoted = self.kind == TEXT
        return self.start + quoted, self.end - quoted


MEMBERS = tuple(Members.__dataclass_fields__)


class Block:
    """Whole events, one after the other."""

    def __init__(self, part: bytes) -> None:
        """Finds events from the start of `part` on, up to the last one that ends in it.

        Raises:
            NotPlain: there is none, or something else between them or behind the last, or JSON is invalid.
        """
        stripped = part.lstrip(_BLANK)
        before = len(part) - len(stripped)
        raw = np.frombuffer(stripped, np.uint8)
        self.has_escapes = b"\\" in stripped
        at = np.flatnonzero(np.frombuffer(stripped.translate(_IS_TOKEN), bool))
        if self.has_escapes:
            at = at[~escaped(raw, at)]
        tokens = raw.take(at)
        is_quote = tokens == _QUOTE
        quotes = np.flatnonzero(is_quote)
        if (quotes[1::2] - quotes[: len(quotes) & ~1 : 2] != 1).any():  # characters in texts
            used = is_quote | ((np.cumsum(is_quote, dtype=np.uint8) & 1) == 0)
            at, tokens = at[used], tokens[used]
        depth = np.cumsum(_STEP.take(tokens), dtype=np.int32)
        if depth.min(initial=0) < 0:
            first = int(np.argmax(depth < 0))
            at, tokens, depth = at[:first], tokens[:first], depth[:first]
        ends = np.flatnonzero((depth == 0) & (tokens == _CLOSE))
        if not len(ends):
            raise NotPlain
        count = int(ends[-1]) + 1
        stop = int(at[count - 1]) + 1
        if NO_END.match(stripped, stop):
            raise NotPlain
        self.length = before + stop
        self.text = b" " * (_FRONT - 1) + b"[" + stripped[:stop] + b"]" + b" " * (_BACK - 1)
        try:
            _validate(self.text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise NotPlain from None
        self.events = len(ends)
        self._at, self._tokens, self._depth = at[:count] + _FRONT, tokens[:count], depth[:count]
        self._colons = np.flatnonzero(self._tokens == _COLON)
        self._colon_levels = self._depth.take(self._colons)
        is_close = self._tokens == _CLOSE
        is_separator = self._tokens == _COMMA
        if np.count_nonzero(is_separator & (self._depth == 0)) != self.events - 1:
            raise NotPlain  # something between them is not an object
        is_separator |= is_close
        is_separator[1:] &= ~is_close[1:] | (self._tokens[:-1] != _OPEN)  # no object without members
        self._separators = np.flatnonzero(is_separator)
        self._separator_levels = (self._depth + is_close).take(self._separators)
        self.bytes = np.frombuffer(self.text, np.uint8)
        places = len(self.text) - 7
        self.words = np.ascontiguousarray(np.ndarray((places,), "<u8", self.text, 0, (1,)))  # 8 bytes from any place on
        self._ends = ends
        self.closes: Places = self._at.take(ends) - _FRONT  # of the braces that end events, in the stripped part

    def members(self, level: int) -> Members:
        """Returns the members of objects: 1 of the events, 2 of the objects in these.

        Raises:
            NotPlain: at this level are members in lists, or many blanks.
        """
        at, tokens = self._at, self._tokens
        colons = self._colons[self._colon_levels == level]
        separators = self._separators[self._separator_levels == level]
        if len(separators) != len(colons):
            raise NotPlain
        counts = np.diff(np.searchsorted(colons, self._ends), prepend=0)
        kind = _KINDS.take(tokens.take(colons + 1))
        key = at[colons - 2] + 1
        separator = at[separators]
        return Members(
            np.repeat(np.arange(self.events), counts),
            key,
            at[colons - 1] - key,
            kind,
            self._without_blanks(at[colons] + 1, 0, 1),
            self._without_blanks(separator, -1, -1),
            separator,
        )

    def _without_blanks(self, places: Places, offset: int, step: int) -> Places:
        for _ in range(_MOST_BLANKS):
            blank = IS_BLANK.take(self.bytes.take(places + offset))
            if not blank.any():
                return places
            places = places + step * blank
        raise NotPlain

    def first_words(self, members: Members) -> NDArray[np.uint64]:
        """Returns the first eight bytes of each key, with zeros behind shorter ones."""
        return self.words.take(members.key) & _MASKS.take(np.minimum(members.key_length, 8))

    def last_words(self, members: Members) -> NDArray[np.uint64]:
        """Returns the last eight bytes of each key; 0 for keys that are not longer."""
        words = self.words.take(members.key + np.maximum(members.key_length, 8) - 8)
        return np.where(members.key_length > 8, words, np.uint64(0))

    def have_escapes(self, starts: Places, ends: Places) -> bool:
        """Whether there is a backslash in any of these ranges, which are in ascending order."""
        if not self.has_escapes:
            return False
        found = np.flatnonzero(self.bytes == _BACKSLASH)
        return bool((np.searchsorted(found, starts) != np.searchsorted(found, ends)).any())


def escaped(raw: NDArray[np.uint8], at: Places) -> NDArray[np.bool_]:
    """Tells which places have an odd number of backslashes before them."""
    slashes = np.flatnonzero(raw == _BACKSLASH)
    if not len(slashes):
        return np.zeros(len(at), bool)
    begins = np.ones(len(slashes), bool)
    begins[1:] = np.diff(slashes) != 1
    first = slashes[begins][np.cumsum(begins) - 1]  # of the run that each belongs to
    before = np.searchsorted(slashes, at) - 1
    valid = before >= 0
    before = np.maximum(before, 0)
    follows = valid & (slashes[before] == at - 1)
    return np.asarray(follows & ((at - first[before]) % 2 == 1), bool)


def word(key: bytes) -> np.uint64:
    """Returns the first eight bytes of a key as Block.first_words does."""
    return np.uint64(int.from_bytes(key[:8], "little"))


def last_word(key: bytes) -> np.uint64:
    """Returns the last eight bytes of a key as Block.last_words does."""
    return np.uint64(int.from_bytes(key[-8:], "little") if len(key) > 8 else 0)
