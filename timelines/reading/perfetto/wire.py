"""The wire format of Protocol Buffers (https://protobuf.dev/programming-guides/encoding/), for many messages at once.

A step of the loop in `fields` reads one field of every message that has more fields: a hundred thousand in a call of
NumPy. The few messages with the most fields are read a field at a time. Messages are untrusted: a field that goes
beyond the end of its message, a varint of more than 10 bytes, a group or the field number 0 ends the message, which is
then marked as damaged; the fields before it are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
PADDING = 16  # zero bytes after the data, so that reading a number needs no check
_MOST_VARINT = 10  # bytes
_FEW = 48  # messages: fewer are read one after the other
_MOST_SINGLE = 1 << 21  # fields that are read so in one call
_MASK64 = (1 << 64) - 1

Places = NDArray[np.int64]


def padded(data: bytes) -> NDArray[np.uint8]:
    """Returns the bytes that the functions here read."""
    return np.frombuffer(data + bytes(PADDING), np.uint8)


@dataclass
class Fields:
    """Fields of messages. Those of a message are in their order, but not adjacent."""

    owner: Places  # [m], the message that each is of
    number: NDArray[np.int64]  # [m]
    kind: NDArray[np.uint8]  # [m], the wire type
    value: NDArray[np.uint64]  # [m], the number, or the length of bytes
    place: Places  # [m], where its bytes begin
    damaged: NDArray[np.bool_]  # [n], for each message

    def of(self, number: int, kind: int) -> NDArray[np.int64]:
        """Returns the rows of a field. Fields of another wire type are ignored."""
        return np.flatnonzero((self.number == number) & (self.kind == kind))

    def column(self, number: int, default: int = 0, kind: int = VARINT) -> NDArray[np.uint64]:
        """Returns a number for each message: the last one that it has, or a default."""
        rows = self.of(number, kind)
        found = np.full(len(self.damaged), default, np.uint64)
        found[self.owner[rows]] = self.value[rows]
        return found

    def signed(self, number: int) -> NDArray[np.int64]:
        """Returns an int32 or int64 for each message; 0 if it has none."""
        return self.column(number).view(np.int64)

    def doubles(self, number: int) -> NDArray[np.float64]:
        """Returns a double for each message; 0 if it has none."""
        return self.column(number, kind=FIXED64).view(np.float64)

    def has(self, number: int, kind: int = VARINT) -> NDArray[np.bool_]:
        """Tells which messages have a field."""
        found = np.zeros(len(self.damaged), bool)
        found[self.owner[self.of(number, kind)]] = True
        return found

    def spans(self, number: int) -> tuple[Places, Places, Places]:
        """Returns nested messages or texts: owners, begins and ends, in the order of the file."""
        rows = self.of(number, BYTES)
        rows = rows[np.argsort(self.place[rows], kind="stable")]
        return self.owner[rows], self.place[rows], self.place[rows] + self.value[rows].view(np.int64)


def fields(data: NDArray[np.uint8], starts: Places, ends: Places) -> Fields:
    """Reads the fields of messages.

    Args:
        data: see `padded`.
        starts: int64[n], where messages begin.
        ends: int64[n], where they end, within the data.
    """
    steps: list[tuple[Any, ...]] = []
    damaged = np.zeros(len(starts), bool)
    owner: Places = np.flatnonzero(starts < ends)
    at, end = starts[owner], ends[owner]
    while len(at) > _FEW:
        tag, after, good = _varints(data, at)
        kind = (tag & np.uint64(7)).astype(np.uint8)
        number = (tag >> np.uint64(3)).view(np.int64)
        value, behind, readable = _varints(data, np.minimum(after, len(data) - PADDING))
        place = after
        is_varint = kind == VARINT
        if not is_varint.all():
            place = np.where(kind == BYTES, behind, after)
            for fixed, size in ((FIXED64, 8), (FIXED32, 4)):
                rows = np.flatnonzero(kind == fixed)
                if len(rows):
                    value[rows] = _fixed(data, np.minimum(after[rows], len(data) - PADDING), size)
                    behind[rows] = after[rows] + size
                    readable[rows] = True
            rows = np.flatnonzero(kind == BYTES)
            fits = value[rows] <= (end[rows] - np.minimum(behind[rows], end[rows])).view(np.uint64)
            behind[rows] += np.where(fits, value[rows], 0).view(np.int64)
            readable[rows] &= fits
            readable &= is_varint | (kind == BYTES) | (kind == FIXED64) | (kind == FIXED32)
        good &= readable & (behind <= end) & (number > 0)
        if not good.all():
            damaged[owner[~good]] = True
            owner, number, kind, value = owner[good], number[good], kind[good], value[good]
            place, behind, end = place[good], behind[good], end[good]
        steps.append((owner, number, kind, value, place))
        more = behind < end
        owner, at, end = owner[more], behind[more], end[more]
    if len(at):
        steps.append(_singly(data, owner, at, end, damaged))
    owners, numbers, kinds, values, places = (
        np.concatenate([np.empty(0, type_), *(step[column] for step in steps)])
        for column, type_ in enumerate((np.int64, np.int64, np.uint8, np.uint64, np.int64))
    )
    return Fields(owners, numbers, kinds, values, places, damaged)


def _varints(data: NDArray[np.uint8], at: Places) -> tuple[NDArray[np.uint64], Places, NDArray[np.bool_]]:
    """Reads varints: their values, where they end, and which are valid."""
    byte = data[at]
    value = byte.astype(np.uint64)
    behind = at + 1
    good = np.ones(len(at), bool)
    rows = np.flatnonzero(byte >= 0x80)
    if len(rows):
        value[rows] &= np.uint64(0x7F)
    for count in range(1, _MOST_VARINT):
        if not len(rows):
            break
        byte = data[at[rows] + count]
        value[rows] |= (byte & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * count)
        behind[rows] += 1
        rows = rows[byte >= 0x80]
    good[rows] = False
    return value, behind, good


def _fixed(data: NDArray[np.uint8], at: Places, size: int) -> NDArray[np.uint64]:
    """Reads numbers of a fixed size."""
    found = np.zeros((len(at), 8), np.uint8)
    found[:, :size] = data[at[:, None] + np.arange(size)]
    return np.asarray(found.view("<u8")[:, 0], np.uint64)


def _singly(
    data: NDArray[np.uint8], owner: Places, at: Places, end: Places, damaged: NDArray[np.bool_]
) -> tuple[Any, ...]:
    """Reads the fields of a few messages. A message with too many fields is damaged."""
    owners, numbers, kinds, values, places = [], [], [], [], []
    left = _MOST_SINGLE
    for message, start, stop in zip(owner.tolist(), at.tolist(), end.tolist(), strict=True):
        found, good = message_fields(data[start:stop].tobytes(), left)
        left -= len(found)
        if not good:
            damaged[message] = True
        for number, kind, value, place in found:
            owners.append(message)
            numbers.append(number)
            kinds.append(kind)
            values.append(value)
            places.append(place + start)
    return (
        np.array(owners, np.int64), np.array(numbers, np.int64), np.array(kinds, np.uint8),
        np.array(values, np.uint64), np.array(places, np.int64),
    )  # fmt: skip


Field = tuple[int, int, int, int]
"""Number, wire type, value (or length), and where its bytes begin."""


def message_fields(data: bytes, most: int = 1 << 16) -> tuple[list[Field], bool]:
    """Reads at most so many fields of one message. Returns them, and whether these are all."""
    found: list[Field] = []
    at, size = 0, len(data)
    try:
        while at < size:
            if len(found) >= most:
                return found, False
            tag, at = varint(data, at)
            number, kind = tag >> 3, tag & 7
            place = at
            if kind == VARINT:
                value, at = varint(data, at)
            elif kind == BYTES:
                value, place = varint(data, at)
                at = place + value
            elif kind in (FIXED64, FIXED32):
                at += 8 if kind == FIXED64 else 4
                value = int.from_bytes(data[place:at], "little")
            else:
                return found, False
            if at > size or not 0 < number < 1 << 29:
                return found, False
            found.append((number, kind, value, place))
    except IndexError:
        return found, False
    return found, True


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads a varint, of 64 bits; returns it, and where it ends.

    Raises:
        IndexError: the data end before it does, or it is too long.
    """
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    for count in range(1, _MOST_VARINT):
        byte = data[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value & _MASK64, at + count + 1
    raise IndexError
