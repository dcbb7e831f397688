"""Records of a BPF ring buffer, in memory with the kernel's layout."""

import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from iaprof.bpf.maps import MOST_HELD_NS, RingBuffer
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.waits import WAIT
from iaprof.formats.wire.launches import Counter
from iaprof.record.capture.finish import finish
from iaprof.record.journal import Journal
from iaprof.record.sources.launches import Launches
from iaprof.record.spool import Spool, SpoolReader

SIZE = mmap.PAGESIZE
RECORD = np.dtype([("number", "<u8"), ("more", "<u8"), ("last", "<u8")])
BUSY, DISCARDED = 1 << 31, 1 << 30
RINGS = (
    "launches", "list_events", "stacks", "python_stacks", "codes", "samples", "waits", "compiled", "chunks", "modules",
    "messages", "pieces", "paths",
)  # fmt: skip


def ring_of() -> SimpleNamespace:
    """A ring buffer of which there is nothing to say."""
    return SimpleNamespace(misfits=0, unread=0, take_held=list)


class Producer:
    """Writes like the kernel: a page with the consumer's position, one with the producer's, and the data twice."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("ring")
        os.truncate(self.fd, 2 * mmap.PAGESIZE + 2 * SIZE)
        self.position = 0

    def write(self, payload: bytes, flags: int = 0, length: int | None = None) -> int:
        """Writes a record; returns its position."""
        at = self.position
        header = struct.pack("<II", (len(payload) if length is None else length) | flags, 0)
        record = header + payload
        for offset, byte in enumerate(record + bytes(-len(record) % 8), at):
            self._put(offset, bytes([byte]))
        self.position = at + len(record) + -len(record) % 8
        os.pwrite(self.fd, struct.pack("<Q", self.position), mmap.PAGESIZE)
        return at

    def finish(self, at: int, length: int) -> None:
        """Completes a busy record."""
        for offset, byte in enumerate(struct.pack("<I", length), at):
            self._put(offset, bytes([byte]))

    def _put(self, offset: int, byte: bytes) -> None:
        for copy in (0, SIZE):
            os.pwrite(self.fd, byte, 2 * mmap.PAGESIZE + copy + offset % SIZE)

    def consumed(self) -> int:
        return int(struct.unpack("<Q", os.pread(self.fd, 8, 0))[0])


def record(number: int) -> bytes:
    return struct.pack("<QQQ", number, number + 1, number + 2)


@pytest.fixture
def producer() -> Iterator[Producer]:
    made = Producer()
    yield made
    os.close(made.fd)


@pytest.fixture
def ring(producer: Producer) -> Iterator[RingBuffer]:
    made = RingBuffer(producer.fd, SIZE, RECORD)
    yield made
    made.close()


def numbers(ring: RingBuffer) -> list[int]:
    read = ring.read()
    assert (read["last"] == read["number"] + 2).all()
    return [int(number) for number in read["number"]]


def test_records_come_in_order_when_the_buffer_wraps_around(producer: Producer, ring: RingBuffer) -> None:
    # 32 bytes each: the buffer is filled and emptied three times
    for start in range(0, 3 * SIZE // 32, 100):
        for number in range(start, start + 100):
            producer.write(record(number))
        assert numbers(ring) == list(range(start, start + 100))
        assert producer.consumed() == producer.position
    assert ring.misfits == 0


@pytest.mark.parametrize("length", [0, 1, 8, 16, 17, 23, 25, 32, 40, 200])
def test_a_record_of_another_length_is_counted_and_those_around_it_are_read(
    producer: Producer, ring: RingBuffer, length: int
) -> None:
    # when records of another length come between others, two in a row, and across the buffer's end
    for turn in range(40):
        for number in range(3):
            producer.write(record(10 * turn + number))
        producer.write(b"\xff" * length)
        producer.write(b"\xff" * length)
        producer.write(record(10 * turn + 3))
        # then all other records are read
        assert numbers(ring) == [10 * turn + number for number in range(4)]
        assert ring.misfits == 2 * (turn + 1)
        assert producer.consumed() == producer.position


def test_a_single_record_of_another_length_is_consumed(producer: Producer, ring: RingBuffer) -> None:
    producer.write(b"short")
    assert numbers(ring) == []
    assert ring.misfits == 1
    assert producer.consumed() == producer.position


def test_discarded_records_of_any_length_are_skipped(producer: Producer, ring: RingBuffer) -> None:
    producer.write(record(1), DISCARDED)
    producer.write(record(2))
    producer.write(bytes(8), DISCARDED)
    producer.write(record(3))
    assert numbers(ring) == [2, 3]
    assert ring.misfits == 1


@pytest.mark.parametrize("payload", [record(7), b"\xff" * 40])
def test_reading_stops_at_a_record_that_is_being_written(producer: Producer, ring: RingBuffer, payload: bytes) -> None:
    # given an incomplete record
    producer.write(record(1))
    busy = producer.write(payload, BUSY)
    producer.write(record(2))
    assert numbers(ring) == [1]
    assert producer.consumed() == busy
    # when it is completed
    producer.finish(busy, len(payload))
    # then it is read, or counted as a misfit
    fits = len(payload) == RECORD.itemsize
    assert numbers(ring) == ([7, 2] if fits else [2])
    assert ring.misfits == (0 if fits else 1)


def test_a_record_that_is_held_too_long_is_told_when_it_ends(
    producer: Producer, ring: RingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])

    def read_at(at: int) -> list[tuple[int, int]]:
        now[0] = at
        ring.read()
        return ring.take_held()

    # given a record that is finished in time
    busy = producer.write(record(1), BUSY)
    assert read_at(100) == []
    producer.finish(busy, RECORD.itemsize)
    assert read_at(100 + MOST_HELD_NS) == []
    # when another one is not finished while others come and are read before and after it
    producer.write(record(2))
    busy = producer.write(record(3), BUSY)
    start = 5 * MOST_HELD_NS
    assert read_at(start) == []
    producer.write(record(4))
    assert read_at(start + MOST_HELD_NS + 1) == []
    assert ring.unread == 2 * (RECORD.itemsize + 8)
    producer.finish(busy, RECORD.itemsize)
    # then that time is told, once
    assert read_at(start + MOST_HELD_NS + 2) == [(start, start + MOST_HELD_NS + 2)]
    assert read_at(start + 9 * MOST_HELD_NS) == []
    assert ring.unread == 0


def test_records_that_hold_up_others_one_after_the_other(
    producer: Producer, ring: RingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    first, second = producer.write(record(1), BUSY), producer.write(record(2), BUSY)
    ring.read()
    producer.finish(first, RECORD.itemsize)
    now[0] += 2 * MOST_HELD_NS
    ring.read()
    producer.finish(second, RECORD.itemsize)
    now[0] += 3 * MOST_HELD_NS
    assert numbers(ring) == [2]
    assert [end - begin for begin, end in ring.take_held()] == [2 * MOST_HELD_NS, 3 * MOST_HELD_NS]


def test_what_is_held_up_is_a_loss_of_the_capture(tmp_path: Path) -> None:
    rings = {name: ring_of() for name in RINGS}
    rings["stacks"].take_held = lambda: [(5, 1_300_000_005)]
    rings["samples"].unread = 64
    probes = SimpleNamespace(counters=lambda: dict.fromkeys(Counter, 0), detach=lambda: None, **rings)
    waits = np.zeros(0, WAIT)
    probes.unended_waits = probes.take_short_waits = lambda *_: waits
    taking = Launches(None, probes, None, None, Mock(), Mock(), Mock())  # type: ignore[arg-type]
    taking.read = lambda: None  # type: ignore[method-assign]
    spool = Spool(tmp_path / "s")
    taking._journal = Journal(spool, print, print)
    taking.losses()
    taking.finish()
    spool.close()
    finish(SpoolReader(tmp_path / "s"), tmp_path / "c")
    rows = CaptureReader(tmp_path / "c").table("loss").to_pylist()
    held, unread = (next(row for row in rows if row["what"] == what) for what in ("held up", "unread"))
    assert (held["source"], held["count"], held["begin_ns"], held["time_ns"]) == ("stacks", None, 5, 1_300_000_005)
    assert held["detail"].startswith("for 1.3 s a thread that got no CPU held up")
    assert (unread["source"], unread["count"]) == ("cpu samples", 64)


def test_a_length_beyond_the_written_data_skips_the_rest(producer: Producer, ring: RingBuffer) -> None:
    # given an impossible header, so that the next record cannot be found
    producer.write(record(1))
    producer.write(record(2), length=SIZE)
    producer.write(record(3))
    assert numbers(ring) == [1]
    assert ring.misfits == 1
    # then later records are read
    producer.write(record(4))
    assert numbers(ring) == [4]


def test_a_truncated_record_is_skipped(producer: Producer, ring: RingBuffer) -> None:
    producer.write(b"1234", length=RECORD.itemsize)
    assert numbers(ring) == []
    assert ring.misfits == 1
    producer.write(record(4))
    assert numbers(ring) == [4]


def test_records_of_another_length_are_losses_of_the_capture(tmp_path: Path) -> None:
    # given a recording with two such records, and later another one
    rings = {name: ring_of() for name in RINGS}
    probes = SimpleNamespace(counters=lambda: dict.fromkeys(Counter, 0), **rings)
    taking = Launches(None, probes, None, None, Mock(), Mock(), Mock())  # type: ignore[arg-type]
    spool = Spool(tmp_path / "s")
    taking._journal = Journal(spool, print, print)
    rings["launches"].misfits = 1
    rings["chunks"].misfits = 1
    taking.losses()
    rings["launches"].misfits = 2
    taking.losses()
    taking.losses()
    spool.close()
    # when
    finish(SpoolReader(tmp_path / "s"), tmp_path / "c")
    # then
    rows = CaptureReader(tmp_path / "c").table("loss").to_pylist()
    found = [(row["source"], row["count"]) for row in rows if row["what"] == "wrong length"]
    assert found == [("launches", 1), ("kernels", 1), ("launches", 1)]
    assert {row["detail"] for row in rows if row["what"] == "wrong length"} == {
        "records of unexpected length in the ring buffer: they were skipped"
    }
