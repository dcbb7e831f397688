"""Cuts a trace into packets, including those in compressed packets."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.reading.perfetto import wire, zstandard
from iaprof.timelines.reading.perfetto.protos import SYNCHRONIZATION, TracePacket
from iaprof.timelines.reading.perfetto.wire import Fields, Places

_TAG = 10  # Trace.packet (trace.proto): field 1, bytes
_COMPRESSED = 0x0392  # the two bytes of the tag of compressed_packets, which such a packet begins with
_ZSTD = 0x08AA  # of zstd_compressed_packets
MOST_PACKETS = 1 << 17  # of a batch
_MOST_INFLATED = 16 << 20  # bytes of one packet; Perfetto's service compresses 1 MiB at most
_MOST_EXPANDED = 16 << 20  # bytes of a batch, after which no further packet is expanded
_MOST_LONGER = 1 << 40  # bytes: more makes no difference
_NUMBERS = 1000  # above those of a packet's fields
_MARKER = bytes([0xA2, 0x02, len(SYNCHRONIZATION)]) + SYNCHRONIZATION


@dataclass
class Batch:
    """Packets of a trace."""

    data: NDArray[np.uint8]  # see wire.padded
    starts: Places
    ends: Places
    consumed: int = 0  # bytes up to where the next batch begins
    is_damaged: bool = False  # there is no packet at `consumed`
    longer: int = 0  # bytes of the packet at `consumed`, if it does not end in the data
    dropped: Counter[str] = field(default_factory=Counter)  # packets that could not be expanded, by reason
    needs_zstd: bool = False  # some packets could not be expanded, as zstandard.load was not called

    def fields(self) -> Fields:
        """Reads the fields of the packets."""
        return wire.fields(self.data, self.starts, self.ends)


def read(data: bytes) -> Batch:
    """Cuts a batch from the beginning of data, which starts with a packet."""
    cut = _cut(data, MOST_PACKETS)
    bundles = [
        row for row, (start, end) in enumerate(zip(cut.starts, cut.ends, strict=True)) if _is_bundle(data, start, end)
    ]
    starts, ends = np.array(cut.starts, np.int64), np.array(cut.ends, np.int64)
    if not bundles:
        return Batch(wire.padded(data), starts, ends, cut.at, cut.is_damaged, cut.longer)
    return _expanded(data, cut, bundles)


def _is_bundle(data: bytes, start: int, end: int) -> bool:
    return end - start > 2 and data[start] | data[start + 1] << 8 in (_COMPRESSED, _ZSTD)


@dataclass
class _Cut:
    starts: list[int]
    ends: list[int]
    at: int = 0
    is_damaged: bool = False
    longer: int = 0


def _cut(data: bytes, most: int) -> _Cut:
    """Finds where packets begin and end, up to a number of them."""
    starts: list[int] = []
    ends: list[int] = []
    at, size = 0, len(data)
    cut = _Cut(starts, ends)
    while at < size and len(starts) < most:
        if data[at] != _TAG:
            cut.is_damaged = True
            break
        try:
            length, start = (
                wire.varint(data, at + 1) if at + 1 < size and data[at + 1] > 0x7F else (data[at + 1], at + 2)
            )
        except IndexError:
            if size - at > 10:
                cut.is_damaged = True
            else:
                cut.longer = size - at + 1
            break
        if start + length > size:
            cut.longer = min(start + length - at, _MOST_LONGER)
            break
        starts.append(start)
        at = start + length
        ends.append(at)
    cut.at = at
    return cut


def _expanded(data: bytes, cut: _Cut, bundles: list[int]) -> Batch:
    """Replaces compressed packets by the packets in them, until the batch is large enough."""
    pieces: list[bytes] = []
    starts: list[Places] = []
    ends: list[Places] = []
    dropped: Counter[str] = Counter()
    size = count = row = 0
    has_zstd = any(data[cut.starts[bundle]] == _ZSTD & 0xFF for bundle in bundles)
    needs_zstd = has_zstd and not zstandard.is_loaded()

    def plain(until: int) -> None:
        nonlocal size, count, row
        if row < until:
            piece = data[cut.starts[row] : cut.ends[until - 1]]
            shift = size - cut.starts[row]
            pieces.append(piece)
            starts.append(np.array(cut.starts[row:until], np.int64) + shift)
            ends.append(np.array(cut.ends[row:until], np.int64) + shift)
            size += len(piece)
            count += until - row
            row = until

    consumed = cut.at
    for bundle in bundles:
        plain(bundle)
        if size > _MOST_EXPANDED or count > MOST_PACKETS:
            consumed = _packet_start(cut, bundle)
            break
        inner = _inflated(data[cut.starts[bundle] : cut.ends[bundle]], dropped)
        row = bundle + 1
        if inner is not None:
            packets = _cut(inner, _MOST_INFLATED)
            if packets.is_damaged or packets.longer:
                dropped["damaged in a compressed packet"] += 1
            nested = [_is_bundle(inner, start, end) for start, end in zip(packets.starts, packets.ends, strict=True)]
            if any(nested):
                dropped["compressed twice"] += sum(nested)
            kept = ~np.array(nested, bool)
            pieces.append(inner)
            starts.append(np.array(packets.starts, np.int64)[kept] + size)
            ends.append(np.array(packets.ends, np.int64)[kept] + size)
            size += len(inner)
            count += len(packets.starts)
    else:
        plain(len(cut.starts))
        return Batch(
            wire.padded(b"".join(pieces)), np.concatenate(starts) if starts else np.empty(0, np.int64),
            np.concatenate(ends) if ends else np.empty(0, np.int64), consumed, cut.is_damaged, cut.longer, dropped,
            needs_zstd,
        )  # fmt: skip
    found = wire.padded(b"".join(pieces)), np.concatenate(starts), np.concatenate(ends)
    return Batch(*found, consumed, dropped=dropped, needs_zstd=needs_zstd)


def _packet_start(cut: _Cut, row: int) -> int:
    """Returns where a packet's tag is: where the one before it ends."""
    return cut.ends[row - 1] if row else 0


def _inflated(packet: bytes, dropped: Counter[str]) -> bytes | None:
    """Returns the packets in a compressed one; None if it is damaged or expands too much."""
    fields, _ = wire.message_fields(packet)
    contents = [
        (number, packet[place : place + value])
        for number, kind, value, place in fields
        if kind == wire.BYTES and number in (TracePacket.COMPRESSED_PACKETS, TracePacket.ZSTD_COMPRESSED_PACKETS)
    ]
    if len(contents) != 1:
        dropped["damaged compressed packet"] += 1
        return None
    number, content = contents[0]
    if number == TracePacket.ZSTD_COMPRESSED_PACKETS:
        return _unpacked(content, dropped)
    inflate = zlib.decompressobj()
    try:
        inner = inflate.decompress(content, _MOST_INFLATED)
    except zlib.error:
        dropped["damaged compressed packet"] += 1
        return None
    if not inflate.eof and inflate.unconsumed_tail:
        dropped["compressed packet that is too long"] += 1
        return None
    if not inflate.eof:
        dropped["damaged compressed packet"] += 1
    return inner


def _unpacked(content: bytes, dropped: Counter[str]) -> bytes | None:
    if not zstandard.is_loaded():
        return None  # Batch.needs_zstd says so
    try:
        inner, is_all = zstandard.unpacked(content, _MOST_INFLATED)
    except ValueError:
        dropped["damaged compressed packet"] += 1
        return None
    if not is_all:
        dropped["compressed packet that is too long"] += 1
        return None
    return inner


def find(data: bytes) -> int | None:
    """Returns where a packet with Perfetto's marker begins, in data that start in a damaged place; None without one."""
    at = data.find(_MARKER)
    while at >= 0:
        if at >= 2 and data[at - 2] == _TAG and data[at - 1] < 0x80:
            return at - 2
        at = data.find(_MARKER, at + 1)
    return None


def is_trace(start: bytes) -> bool:
    """Whether a file with this beginning may be Perfetto's: its first packet has fields that packets can have."""
    cut = _cut(start, 1)
    if cut.is_damaged or start[:1] != bytes([_TAG]):
        return False
    if cut.starts:
        fields, good = wire.message_fields(start[cut.starts[0] : cut.ends[0]])
        return good and all(number < _NUMBERS for number, *_ in fields)
    _, at = wire.varint(start + bytes(12), 1)
    tag, _ = wire.varint(start[at:] + bytes(12), 0)
    return 0 < tag >> 3 < _NUMBERS and tag & 7 in (wire.VARINT, wire.FIXED64, wire.BYTES)
