"""Finds the members of events in a block of JSON, and reads their numbers and texts: whole arrays, without objects.

Only valid JSON in the form that runtimes write becomes blocks; event_decoding.py reads all other.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from iaprof.timelines.reading import numbers
from iaprof.timelines.reading.event_decoding import NO_END

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
    """A block has something other than the usual forms, which the decoder for single events has to read."""


@dataclass(frozen=True)
class Members:
    """Members of objects, in n rows, in their order; places are offsets into Block.bytes."""

    event: Places  # number of the event that each belongs to
    key: Places  # of the key's first character
    key_length: Places
    kind: NDArray[np.uint8]  # of the value
    start: Places  # of the value, with its quotes
    end: Places
    separator: Places  # of the `,` or `}` after the value

    def take(self, rows: NDArray[np.bool_] | Places) -> Members:
        """Returns the given rows."""
        return Members(*(getattr(self, name)[rows] for name in MEMBERS))

    def inside(self) -> tuple[Places, Places]:
        """Returns where values begin and end, texts without their quotes."""
        quoted = self.kind == TEXT
        return self.start + quoted, self.end - quoted


MEMBERS = tuple(Members.__dataclass_fields__)


class Block:
    """A block of JSON with whole events."""

    def __init__(self, data: bytes) -> None:
        """Finds events from the start of `data` on, up to the last one that ends in it.

        Raises:
            NotPlain: there is no event, something else is between events or after the last, or the JSON is invalid.
        """
        stripped = data.lstrip(_BLANK)
        before = len(data) - len(stripped)
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
            raise NotPlain  # something between events is not an object
        is_separator |= is_close
        is_separator[1:] &= ~is_close[1:] | (self._tokens[:-1] != _OPEN)  # no object without members
        self._separators = np.flatnonzero(is_separator)
        self._separator_levels = (self._depth + is_close).take(self._separators)
        self.bytes = np.frombuffer(self.text, np.uint8)
        places = len(self.text) - 7
        self.words = np.ascontiguousarray(np.ndarray((places,), "<u8", self.text, 0, (1,)))  # 8 bytes from any place on
        self._ends = ends
        self.closes: Places = self._at.take(ends) - _FRONT  # of the braces that end events, in the stripped data

    def members(self, level: int) -> Members:
        """Returns the members of objects: 1 of the events, 2 of the objects in these.

        Raises:
            NotPlain: this level has members in lists, or much white space.
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
        """Returns the first eight bytes of each key, with zeros after shorter ones."""
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
    """Tells which places are escaped: they have an odd number of backslashes before them."""
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


_ZEROS, _LOW, _HIGH = np.uint64(0x3030303030303030), np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x8080808080808080)
_ABOVE_9 = np.uint64(0x4646464646464646)  # added to a digit, it leaves the upper bit clear
_KEPT = np.array([0, *(((1 << 64) - 1) ^ ((1 << 8 * (8 - count)) - 1) for count in range(1, 9))], np.uint64)
_PAIRS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
_SCALES = np.uint64(10), np.uint64(100), np.uint64(10000)
_MOST_DIGITS, _MOST_WHOLE = 16, 15
_LOWER = np.uint64(0x2020202020202020)
# Added to a byte below 128, these set its upper bit if it is not below the character.
_FROM_0, _FROM_COLON, _FROM_A, _FROM_G = (np.uint64((0x80 - ord(each)) * 0x0101010101010101) for each in "0:ag")
_MINUS, _DOT = b"-."
_MOST_TEXT = 1 << 14


def integers(block: Block, starts: Places, ends: Places) -> NDArray[np.int64]:
    """Reads integers, decimal or with 0x, as numbers.integers does.

    Raises:
        NotPlain: a value is not such a number.
    """
    values, known = decimal_numbers(block, starts, ends)
    if not known.all():
        rows = np.flatnonzero(~known)
        hexadecimal, found = _hexadecimals(block, starts[rows], ends[rows])
        values[rows], known[rows] = hexadecimal, found
    return _with_odd(block, starts, ends, values, known, hexadecimal=True)


def whole_numbers(block: Block, starts: Places, ends: Places) -> NDArray[np.int64]:
    """Reads JSON integers of up to 16 digits.

    Raises:
        NotPlain: a value is something else.
    """
    values, known = decimal_numbers(block, starts, ends)
    if not known.all():
        raise NotPlain
    return values


def canonical(block: Block, starts: Places, ends: Places) -> None:
    """Checks that JSON integers have up to 16 digits, and are not -0.

    Raises:
        NotPlain: a value is something else.
    """
    if ((whole_numbers(block, starts, ends) == 0) & (ends - starts > 1)).any():
        raise NotPlain


def nanoseconds(block: Block, starts: Places, ends: Places) -> NDArray[np.int64]:
    """Reads times in us, as numbers.nanoseconds does, in ns.

    Raises:
        NotPlain: a value is not such a number.
    """
    decimals = np.zeros(len(starts), np.int64)
    for count in (1, 2, 3):
        is_dot = block.bytes.take(ends - count - 1) == _DOT
        decimals[is_dot & (ends - count - 1 > starts)] = count
    has_dot = decimals > 0
    whole_ends = ends - decimals - has_dot
    values, known = decimal_numbers(block, starts, whole_ends)
    known &= whole_ends - starts <= _MOST_WHOLE
    values *= 1000
    if has_dot.any():
        fraction, good = decimal_numbers(block, np.where(has_dot, ends - decimals, starts), ends)
        good &= block.bytes.take(ends - decimals) != _MINUS
        fraction *= np.array([0, 100, 10, 1]).take(decimals)
        negative = block.bytes.take(starts) == _MINUS
        values += np.where(has_dot, np.where(negative, -fraction, fraction), 0)
        known &= good | ~has_dot
    return _with_odd(block, starts, ends, values, known, hexadecimal=False)


def _with_odd(
    block: Block,
    starts: Places,
    ends: Places,
    values: NDArray[np.int64],
    known: NDArray[np.bool_],
    *,
    hexadecimal: bool,
) -> NDArray[np.int64]:
    """Reads the values that are left one by one."""
    if known.all():
        return values
    rows = np.flatnonzero(~known)
    places = zip(starts[rows].tolist(), ends[rows].tolist(), strict=True)
    texts = [block.text[start:end] for start, end in places]
    found, good = numbers.integers(texts) if hexadecimal else numbers.nanoseconds(texts)
    if not good.all():
        raise NotPlain
    values[rows] = found
    return values


def decimal_numbers(block: Block, starts: Places, ends: Places) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Reads integers of up to 16 decimal digits. Returns int64[n], and which values are such integers."""
    negative = block.bytes.take(starts) == _MINUS
    lengths = ends - starts - negative
    known = (lengths > 0) & (lengths <= _MOST_DIGITS)
    low, good = _eight(block, ends, np.clip(lengths, 0, 8))
    known &= good
    values = low
    if lengths.max(initial=0) > 8:
        high, good = _eight(block, np.maximum(ends - 8, 8), np.clip(lengths - 8, 0, 8))
        known &= good
        values = high * 100_000_000 + low
    return np.where(negative, -values, values), known


def _eight(block: Block, ends: Places, lengths: Places) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Reads the last 0 to 8 digits before `ends`: all eight bytes of a word at once."""
    kept = _KEPT.take(lengths)
    digits = (block.words.take(ends - 8) & kept) | (_ZEROS & ~kept)
    good = ((digits + _ABOVE_9) | (digits - _ZEROS)) & _HIGH == 0
    digits &= _LOW
    # The first digit is in the lowest byte: neighbours are joined to numbers of two, four and eight digits.
    digits = (digits * _SCALES[0] + (digits >> np.uint64(8))) & _PAIRS[0]
    digits = (digits * _SCALES[1] + (digits >> np.uint64(16))) & _PAIRS[1]
    digits = (digits * _SCALES[2] + (digits >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return digits.view(np.int64), good


def _hexadecimals(block: Block, starts: Places, ends: Places) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Reads up to 15 hexadecimal digits after 0x. Returns int64[n], and which values are such integers."""
    lengths = ends - starts - 2
    marked = (block.bytes.take(starts) == ord("0")) & (block.bytes.take(starts + 1) | 32 == ord("x"))
    known = marked & (lengths > 0) & (lengths < 16)
    low, good = _eight_hexadecimals(block, ends, np.clip(lengths, 0, 8))
    known &= good
    high, good = _eight_hexadecimals(block, np.maximum(ends - 8, 8), np.clip(lengths - 8, 0, 8))
    return ((high << np.uint64(32)) | low).view(np.int64), known & good


def _eight_hexadecimals(block: Block, ends: Places, lengths: Places) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    kept = _KEPT.take(lengths)
    digits = (block.words.take(ends - 8) & kept) | (_ZEROS & ~kept)
    lower = digits | _LOWER
    is_digit = (digits + _FROM_0) & ~(digits + _FROM_COLON)
    is_letter = (lower + _FROM_A) & ~(lower + _FROM_G) & _HIGH
    good = ((is_digit | is_letter) & ~digits & _HIGH) == _HIGH
    values = (digits & _LOW) + (is_letter >> np.uint64(7)) * np.uint64(9)
    values = ((values << np.uint64(4)) | (values >> np.uint64(8))) & _PAIRS[0]
    values = ((values << np.uint64(8)) | (values >> np.uint64(16))) & _PAIRS[1]
    return ((values << np.uint64(16)) | (values >> np.uint64(32))) & np.uint64(0xFFFFFFFF), good


def strings(block: Block, starts: Places, ends: Places) -> pa.StringArray:
    """Returns the texts between offsets."""
    offsets = np.full(2 * len(starts) + 1, len(block.text), np.int32)
    offsets[:-1:2], offsets[1::2] = starts, ends
    # Every second element is the text between two of them.
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(block.text)]
    every = pa.Array.from_buffers(pa.string(), 2 * len(starts), buffers)
    return every.take(pa.array(np.arange(0, 2 * len(starts), 2)))


def content(block: Block, starts: Places, ends: Places) -> NDArray[np.uint8]:
    """Returns the bytes of ranges, concatenated."""
    _, offsets, data = strings(block, starts, ends).buffers()
    return np.frombuffer(data, np.uint8)[: np.frombuffer(offsets, np.int32)[len(starts)]].copy()


def encoded(block: Block, starts: Places, ends: Places) -> tuple[NDArray[np.int32], list[str]]:
    """Reads texts, without their quotes. Returns their codes, and the text of each code.

    Raises:
        NotPlain: a text is too long, or has escapes that are not characters.
    """
    if (ends - starts).max(initial=0) > _MOST_TEXT:
        raise NotPlain
    found = strings(block, starts, ends).dictionary_encode()
    distinct = found.dictionary.to_pylist()
    if block.has_escapes:
        for row in np.flatnonzero(pc.match_substring(found.dictionary, "\\")).tolist():
            try:
                distinct[row] = msgspec.json.decode(f'"{distinct[row]}"'.encode(), type=str)
                distinct[row].encode()
            except (msgspec.MsgspecError, ValueError):
                raise NotPlain from None
    return found.indices.to_numpy(), distinct


def doubles(block: Block, starts: Places, ends: Places) -> NDArray[np.float64]:
    """Reads JSON numbers.

    Raises:
        NotPlain: a value is something else, or too large for a double.
    """
    try:
        values = strings(block, starts, ends).cast(pa.float64()).to_numpy()
    except pa.ArrowInvalid:
        raise NotPlain from None
    if not (np.abs(values) < 1e300).all():
        raise NotPlain
    return np.asarray(values)
