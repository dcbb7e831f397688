"""Damaged and malicious traces of Perfetto's: what can be read is, all else is counted, and nothing takes long."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from iaprof.basics.errors import IaprofError
from iaprof.formats.perfetto import columns
from iaprof.timelines.reading.perfetto import packets, wire, zstandard
from iaprof.timelines.reading.perfetto.packets import is_trace
from iaprof.timelines.reading.perfetto.protos import SYNCHRONIZATION
from unit.timelines.reading.importing import rows_without_file
from unit.timelines.reading.perfetto.making import INSTANT, Maker, annotate, random_trace, zstd

WHOLE = 1 << 20
MARKER = bytes(pb.Trace(packet=[pb.TracePacket(synchronization_marker=SYNCHRONIZATION)]).SerializeToString())


def instants(count: int, name: str = "x") -> bytes:
    made = Maker()
    for number in range(count):
        made.event(INSTANT, number, 0, name)
    return made.bytes()


def packet(content: bytes) -> bytes:
    return columns.one(1, content)


@pytest.mark.parametrize("piece_bytes", [70, WHOLE])
def test_reading_goes_on_at_the_next_marker_after_damage(piece_bytes: int) -> None:
    content = instants(3) + b"\xff" * 200 + instants(5) + MARKER + instants(4, "y") + b"\0" * 90
    rows, facts = rows_without_file(content, piece_bytes)
    assert [row["name"] for row in rows["instant"]] == ["x"] * 3 + ["y"] * 4
    assert facts.counts.dropped == {"unreadable": 2}
    assert facts.problems == ["bytes that are not packets, at 2 places: what is up to the next marker was not read"]


@pytest.mark.parametrize("cut", [1, 2, 7])
def test_a_packet_that_is_cut_off_at_the_end_of_the_file_is_counted(cut: int) -> None:
    rows, facts = rows_without_file(instants(3)[:-cut], WHOLE)
    assert len(rows["instant"]) == 2
    assert facts.counts.dropped == {"cut off at the end of the file": 1}


def test_packets_longer_than_a_piece_are_read(tmp_path: object) -> None:
    made = Maker()
    annotate(made.event(INSTANT, 1, 0, "x"), "long", "y" * 5000)
    made.event(INSTANT, 2, 0, "z")
    rows, _ = rows_without_file(made.bytes(), 64)
    assert [row["name"] for row in rows["instant"]] == ["x", "z"]
    assert len(rows["instant"][0]["args"]["long"]) == 5000


def test_a_packet_that_says_to_be_huge_ends_the_file() -> None:
    content = instants(2) + b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f" + instants(1)
    _, facts = rows_without_file(content, WHOLE)
    assert facts.counts.instants == 2
    assert facts.counts.dropped == {"cut off at the end of the file": 1}


@pytest.mark.parametrize(
    "content",
    [
        b"\x5a\x7f\x48\x03",  # an event that is longer than its packet
        b"\x5a\x0c\x48" + b"\xff" * 11,  # a varint of 11 bytes
        b"\x5a\x02\x03\x00",  # a group
        b"\x5a\x02\x00\x00",  # field 0
        b"\x40\xff",  # the packet ends in a varint
    ],
)
def test_messages_that_say_what_cannot_be_are_counted_as_damaged(content: bytes) -> None:
    rows, facts = rows_without_file(instants(1) + packet(content) * 100 + instants(2), WHOLE)
    assert len(rows["instant"]) == 3
    assert facts.counts.dropped == {"damaged": 100}


def test_compressed_packets_that_are_bombs_damaged_or_in_each_other_are_counted() -> None:
    inside = columns.one(50, zlib.compress(instants(2, "inner")))
    bomb = columns.one(50, zlib.compress(bytes(40 << 20)))
    twice = columns.one(50, zlib.compress(packet(inside)))
    content = (
        instants(1) + packet(bomb) + packet(columns.one(50, b"none")) + packet(inside) + packet(twice) + instants(1)
    )
    rows, facts = rows_without_file(content, WHOLE)
    assert [row["name"] for row in rows["instant"]] == ["x", "inner", "inner", "x"]
    assert facts.counts.dropped == {
        "compressed packet that is too long": 1, "damaged compressed packet": 1, "compressed twice": 1,
    }  # fmt: skip


def test_the_same_with_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstandard, "_open", None)
    inside = columns.one(133, zstd(instants(2, "inner")))
    batch = packets.read(instants(1) + packet(inside) + instants(1))
    assert (batch.needs_zstd, len(batch.starts), batch.dropped) == (True, 2, {})
    zstandard.load()
    bad = [
        zstd(bytes(40 << 20)), b"none", zstd(instants(1))[:-3], zstd(packet(columns.one(50, zlib.compress(b""))))
    ]  # fmt: skip
    content = packet(inside) + b"".join(packet(columns.one(133, each)) for each in bad) + instants(1)
    rows, facts = rows_without_file(content, WHOLE)
    assert [row["name"] for row in rows["instant"]] == ["inner", "inner", "x"]
    assert facts.counts.dropped == {
        "compressed packet that is too long": 1, "damaged compressed packet": 2, "compressed twice": 1,
    }  # fmt: skip


def test_many_compressed_packets_are_expanded_a_few_at_a_time() -> None:
    large = packet(columns.one(50, zlib.compress(instants(1, "n" * 16000) * 500)))
    rows, facts = rows_without_file(large * 6, WHOLE)
    assert facts.counts.instants == len(rows["instant"]) == 3000


def test_arguments_nested_deeply_are_cut_and_told() -> None:
    made = Maker()
    value = made.event(INSTANT, 1, 0, "x").debug_annotations.add(name="deep")
    for _ in range(80):
        value = value.dict_entries.add(name="n")
    rows, facts = rows_without_file(made.bytes(), WHOLE)
    assert rows["instant"][0]["args"] is not None
    assert any("nested too deeply" in problem for problem in facts.problems)


def test_a_message_with_a_million_fields_takes_seconds_at_most() -> None:
    content = instants(1) + packet(b"\x50\x01" * 1_500_000) + instants(1)
    _, facts = rows_without_file(content, 8 << 20)
    assert facts.counts.instants == 2


def test_texts_are_bounded_in_number() -> None:
    made = Maker()
    found = made.begin()
    for number in range(1, 1000):
        found.interned_data.event_names.add(iid=number << 50, name="n" * 60000)
    made.event(INSTANT, 1, 0).name_iid = 5 << 50
    rows, facts = rows_without_file(made.bytes(), 64 << 20)
    assert rows["instant"][0]["name"].startswith("nnn")
    assert facts.problems == ["interned texts, of which there are too many: 161"]


@pytest.mark.parametrize(
    "start", [b"\n[{", b"\n\n", b"", b"string 1\n", b"\x0a\x00", b"\x0a\x05hello", b"\x1f\x8b", b"\n" + b"text " * 40]
)
def test_other_files_are_not_taken_for_traces(start: bytes) -> None:
    assert is_trace(start) == (start == b"\x0a\x00")


def test_traces_are_known_by_their_packets() -> None:
    assert is_trace(random_trace(1)[:4096])
    assert is_trace(instants(1))
    assert is_trace(packet(columns.one(50, bytes(70000)))[:4096])


def _check(content: bytes, piece_bytes: int) -> None:
    try:
        rows_without_file(content, piece_bytes)  # checks that counts add up
    except IaprofError as error:
        assert "\n" not in str(error)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(strategies.integers(0, 1 << 30), strategies.sampled_from([100, 3000, WHOLE]))
def test_damaged_traces_add_up(seed: int, piece_bytes: int) -> None:
    rng = random.Random(seed)
    content = bytearray(random_trace(rng.randrange(8), 60))
    for _ in range(rng.choice([1, 3, 30])):
        place = rng.randrange(len(content))
        match rng.randrange(3):
            case 0:
                content[place] = rng.randrange(256)
            case 1:
                del content[place : place + rng.randrange(20)]
            case _:
                content[place:place] = rng.randbytes(rng.randrange(12))
    _check(bytes(content), piece_bytes)


@settings(max_examples=40, deadline=None)
@given(strategies.binary(max_size=300))
def test_any_bytes_in_a_packet_add_up(content: bytes) -> None:
    _check(instants(1) + packet(content) + packet(columns.one(11, content)) + packet(columns.one(60, content)), WHOLE)


@settings(max_examples=60, deadline=None)
@given(strategies.lists(strategies.binary(max_size=60), min_size=1, max_size=120))
def test_columns_of_fields_are_those_of_each_message_alone(messages: list[bytes]) -> None:
    ends = np.cumsum([len(each) for each in messages])
    starts = ends - np.array([len(each) for each in messages])
    found = wire.fields(wire.padded(b"".join(messages)), starts, ends)
    for number, message in enumerate(messages):
        rows = np.flatnonzero(found.owner == number)
        own = zip(
            found.number[rows].tolist(), found.kind[rows].tolist(), found.value[rows].tolist(),
            (found.place[rows] - starts[number]).tolist(), strict=True,
        )  # fmt: skip
        expected, good = wire.message_fields(message)
        assert sorted(own, key=lambda field: field[3]) == expected
        assert found.damaged[number] == (not good)
