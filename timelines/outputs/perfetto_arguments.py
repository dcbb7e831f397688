"""Imported arguments (JSON texts) as Perfetto's debug annotations: by columns where members have the usual forms."""

from __future__ import annotations

import math
import struct

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Raw
from numpy.typing import NDArray

from iaprof.formats.distinct import groups
from iaprof.formats.perfetto import columns
from iaprof.formats.perfetto.columns import Bytes, varint
from iaprof.formats.perfetto.packets import ANNOTATION, ANNOTATION_NAMES, EVENT, PacketWriter
from iaprof.timelines.reading import blocks
from iaprof.timelines.reading.blocks import PRIMITIVE, TEXT, Block, Members, NotPlain

_decode = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_MOST_NAMES = 1 << 16  # names that are interned; others are written with each argument
_FEW = 16  # texts, which columns do not make faster
_LEAST, _LARGEST = -(1 << 63), (1 << 64) - 1
_ANNOTATIONS = EVENT["debug_annotations"]
_TAG = columns.tag(_ANNOTATIONS, columns.BYTES)
_NAME_IID, _NAME = ANNOTATION["name_iid"], ANNOTATION["name"]
_INT, _UINT, _DOUBLE = (ANNOTATION[f"{type_}_value"] for type_ in ("int", "uint", "double"))
_STRING, _BOOL, _JSON = (ANNOTATION[name] for name in ("string_value", "bool_value", "legacy_json_value"))
_NUMBER = frozenset(b"-0123456789")
_QUOTE = ord('"')
_INT_TAG, _STRING_TAG = columns.tag(_INT, columns.VARINT), columns.tag(_STRING, columns.BYTES)
_DOUBLE_TAG = columns.tag(_DOUBLE, columns.FIXED64)
_MOST_FLOAT = 1 << 1000
_DECIMALS = r"^-?\d+\.\d+$"
_NO_TEXT = pa.scalar(b"", pa.binary())
_pack = struct.Struct("<d").pack


class ImportedArguments:
    """Makes annotations of the members of events."""

    def __init__(self, out: PacketWriter) -> None:
        """Args: the writer, which interns names."""
        self._out = out
        self._names: dict[str, bytes] = {}  # the field with the name

    def annotations(self, members: pa.StringArray) -> Bytes:
        """Returns the annotations of n events, as fields of these.

        Args:
            members: of JSON objects, without braces; null where there are none.
        """
        encoded = members.dictionary_encode()  # the arguments of many events are the same
        texts = encoded.dictionary
        found = self._whole(texts) if len(texts) > _FEW else None
        if found is None:
            found = pa.array([self._fields(_members(text)) for text in texts.to_pylist()], pa.binary())
        return found.take(encoded.indices)

    def _whole(self, texts: pa.StringArray) -> Bytes | None:
        """Returns the annotations of objects, column by column; None if some members do not have the usual forms."""
        objects = pc.binary_join_element_wise("{", texts, "},", "").cast(pa.binary())
        try:
            block = Block(columns.joined(objects))
            # A text may contain braces and quotes, so that together with its neighbours it becomes other objects.
            if not np.array_equal(np.cumsum(columns.lengths_of(objects)), block.closes + 2):
                return None
            members = block.members(1)
            codes, names = blocks.encoded(block, members.key, members.key + members.key_length)
            if len(set(names)) < len(names) or len(groups(members.event, codes)[1]) < len(codes):
                return None  # a name twice in an object: the last one counts
            values = _values(block, members)
        except NotPlain:
            return None
        fields = pa.array([self._names.get(name) or self._name(name) for name in names], pa.binary())
        made = pc.fill_null(columns.contents(_ANNOTATIONS, fields.take(pa.array(codes)), values), _NO_TEXT)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(columns.lengths_of(made))])
        firsts = np.searchsorted(members.event, np.arange(len(texts) + 1))
        return pa.Array.from_buffers(
            pa.binary(),
            len(texts),
            [None, pa.py_buffer(ends[firsts].astype(np.int32)), pa.py_buffer(columns.joined(made))],
        )

    def _fields(self, members: dict[str, Raw]) -> bytes:
        """Returns the annotations of one event."""
        fields = []
        for name, raw in members.items():
            value = _value(bytes(raw))
            if value is not None:
                inside = (self._names.get(name) or self._name(name)) + value
                fields.append(_TAG + varint(len(inside)) + inside)
        return b"".join(fields)

    def _name(self, name: str) -> bytes:
        if len(self._names) >= _MOST_NAMES:
            return columns.one(_NAME, name.encode("utf-8", "replace"))
        self._names[name] = field = columns.one(_NAME_IID, self._out.intern(ANNOTATION_NAMES, name))
        return field


def _members(text: str) -> dict[str, Raw]:
    """Returns the members of an object; a text that is not an object (captures are untrusted) is one member."""
    try:
        return _decode(f"{{{text}}}")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {"args": Raw(msgspec.json.encode(f"{{{text}}}"))}


def _values(block: Block, members: Members) -> Bytes:
    """Returns the fields with values; null for null.

    Raises:
        NotPlain: a text is too long, or has escapes that are not characters.
    """
    kinds = [(members.kind == PRIMITIVE, _primitives), (members.kind == TEXT, _texts)]
    kinds.append((~(kinds[0][0] | kinds[1][0]), _nested))
    made, places = [], []
    for is_of_kind, make in kinds:
        rows = np.flatnonzero(is_of_kind)
        if len(rows):
            made.append(make(block, *members.take(rows).inside()))
            places.append(rows)
    return _put_back(made, places)


def _put_back(made: list[Bytes], places: list[NDArray[np.int64]]) -> Bytes:
    """Joins columns, each of which has some of the rows, into one in the order of rows."""
    if len(made) == 1:
        return made[0]
    back = np.empty(sum(map(len, places)), np.int64)
    back[np.concatenate(places)] = np.arange(len(back))
    return pa.concat_arrays(made).take(pa.array(back))


def _texts(block: Block, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Bytes:
    codes, distinct = blocks.encoded(block, starts, ends)
    made = columns.contents(_STRING, pa.array([text.encode() for text in distinct], pa.binary()))
    return made.take(pa.array(codes))


def _nested(block: Block, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Bytes:
    return columns.contents(_JSON, blocks.strings(block, starts, ends).cast(pa.binary()))


def _primitives(block: Block, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Bytes:
    values, are_whole = blocks.decimal_numbers(block, starts, ends)
    whole, others = np.flatnonzero(are_whole), np.flatnonzero(~are_whole)
    made, places = [columns.numbers(_INT, values[whole])], [whole]
    if len(others):
        encoded = blocks.strings(block, starts[others], ends[others]).dictionary_encode()
        made.append(_odd_primitives(encoded.dictionary).take(encoded.indices))
        places.append(others)
    return _put_back(made, places)


def _odd_primitives(texts: pa.StringArray) -> Bytes:
    """Returns the fields of numbers with decimals or many digits, and of values that are not numbers."""
    has_decimals = pc.match_substring_regex(texts, _DECIMALS)
    numbers = pc.if_else(has_decimals, texts, pa.scalar("inf")).cast(pa.float64()).to_numpy()
    is_double = np.isfinite(numbers)
    doubles, others = np.flatnonzero(is_double), np.flatnonzero(~is_double)
    made = pa.array([_value(text.encode()) for text in texts.take(pa.array(others)).to_pylist()], pa.binary())
    return _put_back([columns.doubles(_DOUBLE, numbers[doubles]), made], [doubles, others])


def _value(raw: bytes) -> bytes | None:
    """Returns the field with a value; None for null."""
    first = raw[0]
    if first in _NUMBER:
        return _number(raw)
    if first == _QUOTE:
        # Most texts have no escapes: then they are UTF-8 already.
        text = raw[1:-1] if b"\\" not in raw else _decode_text(raw).encode("utf-8", "replace")
        return _STRING_TAG + varint(len(text)) + text
    if first in b"tf":
        return columns.one(_BOOL, int(first == ord("t")))
    return None if first == ord("n") else columns.one(_JSON, raw)


def _number(raw: bytes) -> bytes | None:
    try:
        value = int(raw)
    except ValueError:  # has decimals, or thousands of digits
        number = float(raw)
        return _DOUBLE_TAG + _pack(number) if math.isfinite(number) else columns.one(_STRING, raw)
    if 0 <= value < 1 << 63:
        return _INT_TAG + varint(value)
    if _LEAST <= value <= _LARGEST:
        return columns.one(_UINT if value > 0 else _INT, value)
    return _DOUBLE_TAG + _pack(float(value)) if abs(value) < _MOST_FLOAT else columns.one(_STRING, raw)
