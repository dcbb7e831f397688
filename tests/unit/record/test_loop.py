"""The loop: timers, unfinished work, and readers that remove one another."""

from __future__ import annotations

import os
import select
import time
from functools import partial

from iaprof.record.loop import Loop
from limits import Within


def test_timers_run_in_order_and_missed_periods_are_skipped() -> None:
    loop, seen = Loop(), []
    now = time.monotonic_ns()
    loop.at(now + 4_000_000, lambda: seen.append("late"))
    loop.at(now + 1_000_000, lambda: seen.append("early"))
    while len(seen) < 2:
        loop.turn()
    assert seen == ["early", "late"]
    beats: list[int] = []
    loop.every(2_000_000, lambda: beats.append(time.monotonic_ns()))
    time.sleep(0.02)  # ten beats
    while len(beats) < 4:
        loop.turn()
    assert beats[-1] - beats[0] >= 1_000_000  # not all at once; the first may be late
    loop.close()


def test_unfinished_work_goes_on_without_waiting(within: Within) -> None:
    loop, left = Loop(), [3]
    loop.every(10_000_000_000, lambda: None)

    def work() -> None:
        left[0] -= 1
        if not left[0]:
            loop.stop_calling("work")

    loop.keep_calling("work", work)
    with within(1):
        for _ in range(3):
            loop.turn()
        assert left == [0]
        assert not loop.is_calling("work")
    loop.close()


def test_a_reader_may_remove_another_and_a_closed_descriptor_is_forgotten() -> None:
    loop = Loop()
    seen: list[int] = []

    def read(reading: int, other: int) -> None:
        seen.append(reading)
        loop.forget(other)

    pipes = [os.pipe(), os.pipe()]
    for reading, writing in pipes:
        other = pipes[1][0] if reading == pipes[0][0] else pipes[0][0]
        loop.wait_for(reading, partial(read, reading, other), select.EPOLLONESHOT)
        os.write(writing, b"x")
    loop.turn()
    assert len(seen) == 1
    for pair in pipes:
        for fd in pair:
            os.close(fd)
    loop.forget(seen[0])
    loop.close()
    assert loop.closed
