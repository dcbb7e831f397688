"""Copies are read while the learner is busy: in order, each once, and no more than there is memory for."""

from __future__ import annotations

import os
import select

import numpy as np
import pytest
from numpy.typing import NDArray

from iaprof.record.unwinding.copy_reader import CopyReader
from waiting import until

RECORD = np.dtype([("number", "<u8")])


class Ring:
    """A ring buffer that a pipe stands for; BPF writes to it with `put`."""

    misfits = 3

    def __init__(self) -> None:
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)

    def fileno(self) -> int:
        return self._readable

    def put(self, *numbers: int) -> None:
        os.write(self._writable, np.array(numbers, "<u8").tobytes())

    def holds(self) -> bool:
        return bool(select.select([self._readable], [], [], 0)[0])

    def read(self) -> NDArray[np.void]:
        try:
            data = os.read(self._readable, 1 << 16)
        except BlockingIOError:
            data = b""
        return np.frombuffer(data, RECORD)


@pytest.fixture
def ring() -> Ring:
    return Ring()


def numbers(reader: CopyReader) -> list[int]:
    found: list[int] = reader.read()["number"].tolist()
    return found


def test_the_ring_buffer_has_room_while_nobody_takes_what_was_read(ring: Ring) -> None:
    reader = CopyReader(ring)  # type: ignore[arg-type]
    for number in range(5):
        ring.put(number)
        until(lambda: not ring.holds())
    assert select.select([reader], [], [], 60)[0]
    # then everything comes at once, in order, and once
    assert numbers(reader) == [0, 1, 2, 3, 4]
    assert numbers(reader) == []
    assert not select.select([reader], [], [], 0)[0]
    assert reader.misfits == 3


def test_what_the_thread_has_not_read_yet_comes_too(ring: Ring) -> None:
    reader = CopyReader(ring, most_bytes=0)  # type: ignore[arg-type]
    ring.put(1)
    seen = numbers(reader)
    ring.put(2, 3)
    seen += numbers(reader)
    assert seen == [1, 2, 3]


def test_no_more_is_read_ahead_than_there_is_memory_for(ring: Ring) -> None:
    reader = CopyReader(ring, most_bytes=16)  # type: ignore[arg-type]
    # given as much as that
    ring.put(1, 2)
    until(lambda: not reader._has_room.is_set())
    # when more comes, it stays until the first ones are taken
    ring.put(3)
    assert ring.holds()
    assert numbers(reader) == [1, 2, 3]
    ring.put(4)
    until(lambda: not ring.holds())
    assert numbers(reader) == [4]
