"""Times of packets, in ns of the trace's clock: incremental clocks, and snapshots that relate clocks.

As protos/perfetto/trace/clock_snapshot.proto says: ids from 64 to 127 are clocks of a sequence; an incremental clock's
times add up from its last snapshot on; a time of another clock is converted by the last snapshot before it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.reading.perfetto import wire
from iaprof.timelines.reading.perfetto.protos import Clock, ClockSnapshot
from iaprof.timelines.reading.perfetto.wire import Places

LARGEST = 1 << 62  # ns: differences of two times fit into int64
_MOST_SNAPSHOTS = 1 << 14  # snapshots of a clock: above, every second one is dropped
_MOST_CLOCKS = 1 << 14
_OF_EVENTS = -1  # in place of a clock's id: times in events, in us
Key = tuple[int, int]
"""A clock: its sequence, 0 for those of the whole trace, and its id."""


def key(sequence: int, clock: int) -> Key:
    """Returns a clock's key."""
    return (sequence if Clock.FIRST_OF_SEQUENCE <= clock <= Clock.LAST_OF_SEQUENCE else 0), clock


@dataclass
class _Relation:
    """The times of a clock and of the trace's clock at the same instants."""

    own: list[int] = field(default_factory=list)
    trace: list[int] = field(default_factory=list)

    def add(self, own: int, trace: int) -> None:
        if self.own and own < self.own[-1]:
            place = int(np.searchsorted(np.array(self.own), own))
            self.own.insert(place, own)
            self.trace.insert(place, trace)
        else:
            self.own.append(own)
            self.trace.append(trace)
        if len(self.own) > _MOST_SNAPSHOTS:
            self.own, self.trace = self.own[::2], self.trace[::2]

    def converted(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        own, trace = np.array(self.own, np.int64), np.array(self.trace, np.int64)
        place = np.maximum(np.searchsorted(own, times, "right") - 1, 0)
        return times + (trace - own)[place]


@dataclass
class _Incremental:
    """An incremental clock: its times are differences."""

    last: int  # ns
    resets: list[tuple[int, int]] = field(default_factory=list)  # rows of the batch, and the clock's time from there on


class Clocks:
    """The clocks of a trace."""

    def __init__(self) -> None:
        """Starts without snapshots."""
        self.trace_clock: Key | None = None
        self.unrelated: Counter[int] = Counter()  # number of times of clocks that no snapshot relates, by clock
        self._relations: dict[Key, _Relation] = {}
        self._units: dict[Key, int] = {}  # ns
        self._incremental: dict[Key, _Incremental] = {}

    def snapshot(self, row: int, sequence: int, message: bytes) -> None:
        """Reads a snapshot, in the packet of a row."""
        shown: dict[Key, int] = {}
        primary = 0
        for number, kind, value, place in wire.message_fields(message)[0]:
            if number == ClockSnapshot.PRIMARY_TRACE_CLOCK and kind == wire.VARINT:
                primary = value
            elif number == ClockSnapshot.CLOCKS and kind == wire.BYTES:
                clock = {each[0]: each[2] for each in wire.message_fields(message[place : place + value])[0]}
                id_ = key(sequence, clock.get(Clock.CLOCK_ID, 0))
                unit = clock.get(Clock.UNIT_MULTIPLIER_NS, 0) or 1
                time = clock.get(Clock.TIMESTAMP, 0) * unit
                if max(time, unit) >= LARGEST or len(self._units) >= _MOST_CLOCKS:
                    continue
                self._units[id_] = unit
                shown[id_] = time
                if clock.get(Clock.IS_INCREMENTAL):
                    self._incremental.setdefault(id_, _Incremental(time)).resets.append((row, time))
        if primary and self.trace_clock is None:
            self.trace_clock = key(sequence, primary)
        if self.trace_clock is None and (0, Clock.BOOTTIME) in shown:
            self.trace_clock = 0, Clock.BOOTTIME
        self._relate(shown)

    def _relate(self, shown: dict[Key, int]) -> None:
        """Relates the clocks of a snapshot to the trace's clock, if it has that clock or one that is related to it."""
        trace_clock = self.trace_clock
        if trace_clock in shown:
            at = shown[trace_clock]
        else:
            known = next((each for each in shown if each in self._relations), None)
            if known is None:
                return
            at = int(self._relations[known].converted(np.array([shown[known]]))[0])
        for id_, time in shown.items():
            if id_ != trace_clock:
                self._relations.setdefault(id_, _Relation()).add(time, at)

    def times(
        self, sequence: NDArray[np.int64], clock: NDArray[np.int64], raw: NDArray[np.uint64], groups: list[Places],
        packets: Places,
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:  # fmt: skip
        """Converts the times of packets that have one.

        Args:
            sequence: int64[n].
            clock: int64[n], ids; 0 is the trace's.
            raw: uint64[n], as the packets have them.
            groups: rows of one sequence and clock each, in their order.
            packets: int64[n], their rows in the batch, to find the snapshots before them.

        Returns:
            int64[n]; bool[n], which are times of 62 bits.
        """
        found = np.zeros(len(raw), np.int64)
        good = np.ones(len(raw), bool)
        for rows in groups:
            id_ = key(int(sequence[rows[0]]), int(clock[rows[0]]) or Clock.BOOTTIME)
            own, fits = self._own_times(id_, packets[rows], raw[rows])
            good[rows] = fits
            own[~fits] = 0
            if not clock[rows[0]]:
                found[rows] = own  # of the trace's clock, whichever that is
                continue
            if self.trace_clock is None:
                self.trace_clock = id_  # no snapshot has come yet
            if id_ != self.trace_clock:
                if id_ in self._relations:
                    own = self._relations[id_].converted(own)
                else:
                    self.unrelated[id_[1]] += len(rows)
            found[rows] = own
        good &= np.abs(found) < LARGEST
        return np.where(good, found, 0), good

    def _own_times(
        self, id_: Key, rows: Places, raw: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        unit = self._units.get(id_, 1)
        fits = raw < np.uint64(LARGEST // unit)
        own = np.where(fits, raw, 0).view(np.int64) * unit
        incremental = self._incremental.get(id_)
        if incremental is None:
            return own, fits
        fits &= np.cumsum(own, dtype=np.float64) < float(LARGEST)
        own = np.where(fits, own, 0)
        sums = np.cumsum(own)
        base = np.full(len(rows), incremental.last, np.int64)
        for row, time in incremental.resets:
            place = int(np.searchsorted(rows, row))
            base[place:] = time - (int(sums[place - 1]) if place else 0)
        incremental.resets.clear()
        found = base + sums
        fits &= np.abs(found) < LARGEST
        if len(found):
            incremental.last = int(found[-1]) if fits[-1] else 0
        return found, fits

    def reference(self, row: int, sequence: int, microseconds: int) -> None:
        """Sets the time to which the differences in a sequence's events (timestamp_delta_us) are added."""
        if microseconds >= LARGEST // 1000:
            return
        id_ = sequence, _OF_EVENTS
        self._units[id_] = 1000
        time = 1000 * microseconds
        self._incremental.setdefault(id_, _Incremental(time)).resets.append((row, time))

    def has_reference(self, sequence: int) -> bool:
        """Whether `reference` was called for a sequence."""
        return (sequence, _OF_EVENTS) in self._incremental

    def event_times(
        self, sequence: int, rows: Places, microseconds: NDArray[np.uint64], is_difference: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Converts times that a sequence's events have themselves, of CLOCK_MONOTONIC: see `times`."""
        if is_difference:
            own, good = self._own_times((sequence, _OF_EVENTS), rows, microseconds)
        else:
            good = microseconds < np.uint64(LARGEST // 1000)
            own = np.where(good, microseconds, 0).view(np.int64) * 1000
        monotonic = 0, Clock.MONOTONIC
        if monotonic in self._relations and monotonic != self.trace_clock:
            own = self._relations[monotonic].converted(np.where(good, own, 0))
        good = good & (np.abs(own) < LARGEST)
        return np.where(good, own, 0), good

    def end_batch(self) -> None:
        """Applies snapshots at the end of a batch, after the last times of their clocks."""
        for each in self._incremental.values():
            if each.resets:
                each.last = each.resets[-1][1]
                each.resets.clear()
