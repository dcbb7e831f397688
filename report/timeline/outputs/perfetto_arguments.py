"""Imported arguments, JSON texts, as Perfetto's debug annotations."""

from __future__ import annotations

import math
import struct

import msgspec
import pyarrow as pa
from msgspec import Raw

from iaprof.formats.perfetto import columns
from iaprof.formats.perfetto.columns import varint
from iaprof.formats.perfetto.packets import ANNOTATION_NAMES, PacketWriter, annotation_field, event_field

_decode = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_decode_text = msgspec.json.Decoder(str).decode
_MOST_NAMES = 1 << 16  # that are interned; others are written with their arguments
_LEAST, _LARGEST = -(1 << 63), (1 << 64) - 1
_TAG = columns.tag(event_field("debug_annotations"), columns.BYTES)
_NAME_IID, _NAME = annotation_field("name_iid"), annotation_field("name")
_INT, _UINT, _DOUBLE = (annotation_field(f"{type_}_value") for type_ in ("int", "uint", "double"))
_STRING, _BOOL, _JSON = (annotation_field(name) for name in ("string_value", "bool_value", "legacy_json_value"))
_NUMBER = frozenset(b"-0123456789")
_QUOTE = ord('"')
_INT_TAG, _STRING_TAG = columns.tag(_INT, columns.VARINT), columns.tag(_STRING, columns.BYTES)
_DOUBLE_TAG = columns.tag(_DOUBLE, columns.FIXED64)
_MOST_FLOAT = 1 << 1000
_pack = struct.Struct("<d").pack


class ImportedArguments:
    """Makes annotations of the members of events."""

    def __init__(self, out: PacketWriter) -> None:
        """Args: what names are interned in."""
        self._out = out
        self._names: dict[str, bytes] = {}  # the field with the name

    def annotations(self, members: pa.StringArray) -> pa.BinaryArray:
        """Returns the annotations of n events, as fields of these.

        Args:
            members: of JSON objects, without braces; null where there are none.
        """
        encoded = members.dictionary_encode()  # the arguments of many events are the same
        texts = [f"{{{text}}}" for text in encoded.dictionary.to_pylist()]
        found = pa.array([self._fields(each) for each in self._decoded(texts)], pa.binary())
        return found.take(encoded.indices)

    def _fields(self, members: dict[str, Raw]) -> bytes:
        """Returns the annotations of one event."""
        parts = []
        for name, raw in members.items():
            value = _value(bytes(raw))
            if value is not None:
                inside = (self._names.get(name) or self._name(name)) + value
                parts.append(_TAG + varint(len(inside)) + inside)
        return b"".join(parts)

    @staticmethod
    def _decoded(texts: list[str]) -> list[dict[str, Raw]]:
        try:
            return _decode(f"[{','.join(texts)}]")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            found = []
            for text in texts:  # some that Arrow or a merge of captures has damaged
                try:
                    found += _decode(f"[{text}]")
                except (msgspec.MsgspecError, ValueError, RecursionError):
                    found.append({"args": Raw(msgspec.json.encode(text))})
            return found

    def _name(self, name: str) -> bytes:
        if len(self._names) >= _MOST_NAMES:
            return columns.one(_NAME, name.encode("utf-8", "replace"))
        self._names[name] = field = columns.one(_NAME_IID, self._out.intern(ANNOTATION_NAMES, name))
        return field


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
