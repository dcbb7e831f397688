"""Arguments of events (DebugAnnotation): columns of those that a capture has columns for, JSON texts of others."""

from __future__ import annotations

import itertools
import json
import math
import struct
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.reading.answer import ABSENT, NO_TEXT
from iaprof.timelines.reading.event_columns import BANDWIDTH, INTEGERS, MOST_ARGS, TEXTS, Texts
from iaprof.timelines.reading.numbers import integers
from iaprof.timelines.reading.perfetto import wire
from iaprof.timelines.reading.perfetto.protos import DebugAnnotation, InternedData, NestedValue
from iaprof.timelines.reading.perfetto.sequences import Sequences
from iaprof.timelines.reading.perfetto.wire import Places

_A = DebugAnnotation
_NUMBERS = (
    (_A.BOOL_VALUE, wire.VARINT),
    (_A.UINT_VALUE, wire.VARINT),
    (_A.INT_VALUE, wire.VARINT),
    (_A.POINTER_VALUE, wire.VARINT),
    (_A.DOUBLE_VALUE, wire.FIXED64),
    (_A.STRING_VALUE_IID, wire.VARINT),
)
_NESTED = (_A.NESTED_VALUE, _A.LEGACY_JSON_VALUE, _A.DICT_ENTRIES, _A.ARRAY_VALUES)
_PREFIXES = ("debug.", "args.")  # that Perfetto's trace_processor puts before names
_DEEPEST = 32
_MOST_INSIDE = 1 << 19  # nested values in a batch
_INT64 = 1 << 63
_BLANK = "null"


@dataclass
class Members:
    """The arguments of events, m of them, in the order of the file."""

    owner: Places  # [m], the event
    name: NDArray[np.int64]  # [m], index into `names`
    names: list[str]
    kind: NDArray[np.int64]  # [m], the number of the field with the value; 0 if there is none
    bits: NDArray[np.uint64]  # [m], the value, if it is a number
    texts: NDArray[np.object_]  # [m], bytes of texts; JSON (str) of nested values

    def rows(self, events: NDArray[np.bool_]) -> Places:
        """Returns the rows of some events."""
        return np.flatnonzero(events[self.owner])


class Reader:
    """Reads the arguments of a batch's events."""

    def __init__(self, data: NDArray[np.uint8], content: bytes, sequences: Sequences) -> None:
        self._data, self._content, self._sequences = data, content, sequences
        self._left = _MOST_INSIDE
        self.refused = 0  # values that are nested too deeply, are too many, or of unknown kinds

    def read(self, owner: Places, starts: Places, ends: Places, generation: NDArray[np.int64]) -> Members:
        """Reads messages; `generation` has that of each message."""
        fields = wire.fields(self._data, starts, ends)
        count = len(owner)
        names = Texts()
        name = np.full(count, names[""], np.int64)
        iids = fields.column(_A.NAME_IID)
        rows = np.flatnonzero(iids)
        if len(rows):
            found, of_row = self._sequences.distinct(InternedData.DEBUG_ANNOTATION_NAMES, generation[rows], iids[rows])
            name[rows] = np.array([names[_name(text or b"")] for text in found], np.int64)[of_row]
        given, begins, stops = fields.spans(_A.NAME)
        if len(given):
            name[given] = self._codes_of_names(begins, stops, names)
        kind = np.zeros(count, np.int64)
        bits = np.zeros(count, np.uint64)
        for number, type_ in _NUMBERS:
            rows = fields.of(number, type_)
            kind[fields.owner[rows]] = number
            bits[fields.owner[rows]] = fields.value[rows]
        texts = np.full(count, None, object)
        given, begins, stops = fields.spans(_A.STRING_VALUE)
        if len(given):
            kind[given] = _A.STRING_VALUE
            texts[given] = _objects(
                map(self._content.__getitem__, map(slice, begins.tolist(), stops.tolist())), len(given)
            )
        rows = np.flatnonzero(kind == _A.STRING_VALUE_IID)
        if len(rows):
            found, of_row = self._sequences.distinct(
                InternedData.DEBUG_ANNOTATION_STRING_VALUES, generation[rows], bits[rows]
            )
            kind[rows] = _A.STRING_VALUE
            texts[rows] = _objects((text or b"" for text in found), len(found))[of_row]
        for number in _NESTED:
            for row in np.unique(fields.owner[fields.of(number, wire.BYTES)]).tolist():
                kind[row] = number
                message = self._content[int(starts[row]) : int(ends[row])]
                texts[row] = json_text(self._value(message, int(generation[row]), 0))
        self.refused += int((kind == 0).sum())
        return Members(owner, name, list(names), kind, bits, texts)

    def _codes_of_names(self, begins: Places, stops: Places, names: Texts) -> NDArray[np.int64]:
        codes: dict[bytes, int] = {}
        found = []
        for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True):
            text = self._content[begin:stop]
            if text not in codes:
                codes[text] = names[_name(text)]
            found.append(codes[text])
        return np.array(found, np.int64)

    def _value(self, message: bytes, generation: int, depth: int) -> Any:
        """Returns the value of an annotation with nested values."""
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            self.refused += 1
            return None
        value: Any = None
        members: dict[str, Any] = {}
        elements: list[Any] = []
        is_dict = is_array = False
        for number, kind, found, place in wire.message_fields(message)[0]:
            inside = message[place : place + found] if kind == wire.BYTES else b""
            match number:
                case _A.DICT_ENTRIES if kind == wire.BYTES:
                    is_dict = True
                    members[self._name_of(inside, generation)] = self._value(inside, generation, depth + 1)
                case _A.ARRAY_VALUES if kind == wire.BYTES:
                    is_array = True
                    elements.append(self._value(inside, generation, depth + 1))
                case _A.NESTED_VALUE if kind == wire.BYTES:
                    value = self._nested(inside, depth + 1)
                case _A.LEGACY_JSON_VALUE if kind == wire.BYTES:
                    value = _decoded(inside)
                case _:
                    value = self._simple(number, found, inside, generation, value)
        return members if is_dict else elements if is_array else value

    def _simple(self, number: int, bits: int, content: bytes, generation: int, other: Any) -> Any:
        match number:
            case _A.BOOL_VALUE:
                return bits != 0
            case _A.UINT_VALUE:
                return bits
            case _A.INT_VALUE:
                return _signed(bits)
            case _A.DOUBLE_VALUE:
                return _double(bits)
            case _A.POINTER_VALUE:
                return f"0x{bits:x}"
            case _A.STRING_VALUE:
                return content.decode("utf-8", "replace")
            case _A.STRING_VALUE_IID:
                return self._interned(InternedData.DEBUG_ANNOTATION_STRING_VALUES, bits, generation)
        return other

    def _interned(self, kind: int, iid: int, generation: int) -> str:
        return self._sequences.texts.get((kind, generation), {}).get(iid, b"").decode("utf-8", "replace")

    def _name_of(self, message: bytes, generation: int) -> str:
        name = ""
        for number, kind, value, place in wire.message_fields(message, 8)[0]:
            if number == _A.NAME and kind == wire.BYTES:
                name = message[place : place + value].decode("utf-8", "replace")
            elif number == _A.NAME_IID and kind == wire.VARINT:
                name = self._interned(InternedData.DEBUG_ANNOTATION_NAMES, value, generation)
        return name

    def _nested(self, message: bytes, depth: int) -> Any:
        """Returns a nested value in the older form."""
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            self.refused += 1
            return None
        type_ = 0
        keys: list[str] = []
        values: list[Any] = []
        elements: list[Any] = []
        value: Any = None
        for number, kind, found, place in wire.message_fields(message)[0]:
            inside = message[place : place + found] if kind == wire.BYTES else b""
            match number:
                case NestedValue.NESTED_TYPE:
                    type_ = found
                case NestedValue.DICT_KEYS:
                    keys.append(inside.decode("utf-8", "replace"))
                case NestedValue.DICT_VALUES if kind == wire.BYTES:
                    values.append(self._nested(inside, depth + 1))
                case NestedValue.ARRAY_VALUES if kind == wire.BYTES:
                    elements.append(self._nested(inside, depth + 1))
                case NestedValue.INT_VALUE:
                    value = _signed(found)
                case NestedValue.DOUBLE_VALUE:
                    value = _double(found)
                case NestedValue.BOOL_VALUE:
                    value = found != 0
                case NestedValue.STRING_VALUE:
                    value = inside.decode("utf-8", "replace")
        if type_ == NestedValue.DICT:
            return dict(zip(keys, values, strict=False))
        return elements if type_ == NestedValue.ARRAY else value


class Columns:
    """The columns of the arguments of a table's rows."""

    def __init__(self, members: Members, place: NDArray[np.int64], count: int, texts: Texts) -> None:
        """Takes the arguments of some events.

        Args:
            members: of all events.
            place: int64[events], the row of the table that each event has; -1 for others.
            count: rows of the table.
            texts: get what is text.
        """
        self._members, self._count, self._texts = members, count, texts
        of_table = place[members.owner] >= 0
        self._rows = np.flatnonzero(of_table)
        self._place = place[members.owner[self._rows]]
        self.bad_values = self.cut_args = 0

    def known(self) -> dict[str, NDArray[Any]]:
        """Removes arguments that have a column, and returns the columns. Arguments of another type stay."""
        columns: dict[str, NDArray[Any]] = {}
        members = self._members
        left = np.ones(len(self._rows), bool)
        for code, name in enumerate(members.names):
            read = _NUMBER_OF.get(name)
            if read is None and name not in TEXTS:
                continue
            at = np.flatnonzero(members.name[self._rows] == code)
            if not len(at):
                continue
            rows = self._rows[at]
            if read is None:
                column, absent = TEXTS[name], NO_TEXT
                values, good = self._text_codes(name, rows)
            else:
                column, absent = _COLUMN_OF[name], ABSENT
                values, good = read(members, rows)
            found = columns.get(column)
            if found is None:
                found = columns[column] = np.full(
                    self._count, np.nan if column == "bandwidth" else absent, values.dtype
                )
            place = self._place[at]
            self.bad_values += int((~good & (members.kind[rows] != 0)).sum())
            found[place[good]] = values[good]
            left[at[good]] = False
        self._rows, self._place = self._rows[left], self._place[left]
        return columns

    def _text_codes(self, name: str, rows: Places) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        kinds = self._members.kind[rows]
        good = kinds == _A.STRING_VALUE
        if TEXTS[name] == "peers":
            good |= (kinds == _A.INT_VALUE) | (kinds == _A.UINT_VALUE)
        texts = self._texts
        codes = [
            (texts[each.decode("utf-8", "replace")] if isinstance(each, bytes) else texts[str(_signed(bits))])
            if is_good
            else NO_TEXT
            for each, bits, is_good in zip(
                self._members.texts[rows], self._members.bits[rows].tolist(), good.tolist(), strict=True
            )
        ]
        return np.array(codes, np.int32), good

    def rest(self, more: dict[int, dict[str, Any]] | None = None) -> dict[str, NDArray[Any]]:
        """Returns JSON texts of the arguments that are left.

        Args:
            more: by row of the table, values of members that come first.
        """
        texts = self._texts_of(self._rows)
        place = self._place
        if more:
            extra = [
                (row, f"{json.dumps(name)}:{json_text(value)}")
                for row, each in more.items()
                for name, value in each.items()
            ]
            texts = [text for _, text in extra] + texts
            place = np.concatenate([np.array([row for row, _ in extra], np.int64), place])
        if not texts:
            return {}
        if len(place) > 1 and (np.diff(place) < 0).any():
            order = np.argsort(place, kind="stable")
            place = place[order]
            texts = [texts[row] for row in order.tolist()]
        rows = place[np.append(True, place[1:] != place[:-1])]
        bounds = [*np.flatnonzero(np.append(True, place[1:] != place[:-1])).tolist(), len(place)]
        objects = [
            f"{{{','.join(texts[start:stop])}}}".encode("utf-8", "replace")
            for start, stop in itertools.pairwise(bounds)
        ]
        lengths = np.fromiter(map(len, objects), np.int64, len(objects))
        fits = lengths <= MOST_ARGS
        if not fits.all():
            self.cut_args += int((~fits).sum())
            objects = [text for text, is_kept in zip(objects, fits.tolist(), strict=True) if is_kept]
            rows, lengths = rows[fits], lengths[fits]
        return {"args_row": rows, "args_length": lengths, "args": np.frombuffer(b"".join(objects), np.uint8)}

    def _texts_of(self, rows: Places) -> list[str]:
        """Returns `"name":value` of members."""
        members = self._members
        values = np.full(len(rows), _BLANK, object)
        kinds, bits = members.kind[rows], members.bits[rows]
        for kind, texts_of in _TEXTS_OF.items():
            at = np.flatnonzero(kinds == kind)
            if len(at):
                values[at] = _objects(texts_of(bits[at]), len(at))
        at = np.flatnonzero(kinds == _A.STRING_VALUE)
        if len(at):
            quoted = _Quoted()
            values[at] = _objects(map(quoted.__getitem__, members.texts[rows[at]].tolist()), len(at))
        at = np.flatnonzero(np.isin(kinds, _NESTED))
        values[at] = members.texts[rows[at]]
        names = [f"{json.dumps(name, ensure_ascii=False)}:" for name in members.names]
        return list(map(str.__add__, map(names.__getitem__, members.name[rows].tolist()), values.tolist()))


class _Quoted(dict[bytes, str]):
    """Texts as JSON has them."""

    def __missing__(self, content: bytes) -> str:
        found = self[content] = json.dumps(content.decode("utf-8", "replace"), ensure_ascii=False)
        return found


def _numbers(bits: NDArray[np.uint64]) -> Iterable[str]:
    return map(str, bits.tolist())


_TEXTS_OF: dict[int, Callable[[NDArray[np.uint64]], Iterable[str]]] = {
    _A.BOOL_VALUE: lambda bits: ("true" if bit else "false" for bit in bits.tolist()),
    _A.UINT_VALUE: _numbers,
    _A.INT_VALUE: lambda bits: map(str, bits.view(np.int64).tolist()),
    _A.DOUBLE_VALUE: lambda bits: (
        repr(value) if math.isfinite(value) else _BLANK for value in bits.view(np.float64).tolist()
    ),
    _A.POINTER_VALUE: lambda bits: (f'"0x{bit:x}"' for bit in bits.tolist()),
}


def _integers(members: Members, rows: Places) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns arguments as integers, and which are integers: also doubles without decimals, and texts."""
    kinds, bits = members.kind[rows], members.bits[rows]
    values = bits.view(np.int64).copy()
    good = (kinds == _A.INT_VALUE) | ((kinds == _A.UINT_VALUE) & (values >= 0))
    at = np.flatnonzero(kinds == _A.STRING_VALUE)
    if len(at):
        values[at], good[at] = integers(members.texts[rows[at]].tolist())
    at = np.flatnonzero(kinds == _A.DOUBLE_VALUE)
    if len(at):
        doubles = bits[at].view(np.float64)
        whole = np.abs(np.nan_to_num(doubles, nan=0.5)) < 1 << 53
        whole &= np.nan_to_num(doubles) == np.rint(np.nan_to_num(doubles))
        values[at] = np.where(whole, np.nan_to_num(doubles), 0).astype(np.int64)
        good[at] = whole & ~np.isnan(doubles)
    return values, good & (values != ABSENT)


def _doubles(members: Members, rows: Places) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns arguments as finite doubles, and which are such numbers."""
    kinds, bits = members.kind[rows], members.bits[rows]
    values = np.where(kinds == _A.INT_VALUE, bits.view(np.int64).astype(float), bits.astype(float))
    is_double = kinds == _A.DOUBLE_VALUE
    values[is_double] = bits[is_double].view(np.float64)
    good = is_double | (kinds == _A.INT_VALUE) | (kinds == _A.UINT_VALUE)
    for at in np.flatnonzero(kinds == _A.STRING_VALUE).tolist():
        try:
            values[at], good[at] = float(members.texts[rows[at]]), True
        except ValueError:
            continue
    return values, good & np.isfinite(values)


_COLUMN_OF = {**INTEGERS, BANDWIDTH: "bandwidth"}
_NUMBER_OF: dict[str, Callable[[Members, Places], tuple[NDArray[Any], NDArray[np.bool_]]]] = {
    **dict.fromkeys(INTEGERS, _integers),
    BANDWIDTH: _doubles,
}


def _objects(values: Iterable[Any], count: int) -> NDArray[np.object_]:
    return np.fromiter(values, object, count)


def _name(content: bytes) -> str:
    text = content[:MOST_ARGS].decode("utf-8", "replace")
    for prefix in _PREFIXES:
        text = text.removeprefix(prefix)
    return text


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= _INT64 else bits


def _double(bits: int) -> float | None:
    found: float = struct.unpack("<d", array("Q", [bits]))[0]
    return found if math.isfinite(found) else None


def _decoded(content: bytes) -> Any:
    """Returns the value of a JSON text; the text itself if it is not JSON."""
    text = content.decode("utf-8", "replace")
    try:
        return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError):
        return text


def _finite(text: str) -> float | None:
    found = float(text)
    return found if math.isfinite(found) else None


def json_text(value: Any) -> str:
    """Returns a value as JSON, null if it is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        return _BLANK
