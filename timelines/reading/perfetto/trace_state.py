"""The state of a trace between batches: its sequences, clocks, tracks, flows and counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.reading.perfetto.clocks import Clocks
from iaprof.timelines.reading.perfetto.protos import Clock, TracePacket
from iaprof.timelines.reading.perfetto.render_stages import Queues
from iaprof.timelines.reading.perfetto.sequences import Sequences, State, inverse
from iaprof.timelines.reading.perfetto.tracks import Name, Tracks
from iaprof.timelines.reading.perfetto.wire import Fields

_MOST_OPEN = 1 << 19
START, STEP, END = "stf"
PHASES = START + STEP + END


@dataclass
class Flows:
    """The flows of a trace that have begun and not ended."""

    left_out: int = 0  # flows that were too many to keep: their next step becomes a start
    _open: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))  # ids, ascending

    def phases(
        self, ids: NDArray[np.uint64], times: NDArray[np.int64], is_last: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Returns an index into PHASES for each reference of an event to a flow.

        Args:
            ids: uint64[n], in the order of the file.
            times: int64[n], ns.
            is_last: bool[n], whether the event ends the flow.
        """
        order = np.lexsort((times, ids))
        sorted_ids, ends = ids[order], is_last[order]
        first = np.append(True, sorted_ids[1:] != sorted_ids[:-1])[: len(ids)]
        last = np.append(first[1:], True)[: len(ids)]
        starts = first & ~np.isin(sorted_ids, self._open)
        starts[1:] |= ~first[1:] & ends[:-1]
        found = np.empty(len(ids), np.int64)
        found[order] = np.where(ends, PHASES.index(END), np.where(starts, PHASES.index(START), PHASES.index(STEP)))
        still_open = np.setdiff1d(self._open, sorted_ids[last & ends], assume_unique=True)
        self._open = np.union1d(still_open, sorted_ids[last & ~ends])
        if len(self._open) > _MOST_OPEN:
            self.left_out += len(self._open) - _MOST_OPEN
            self._open = self._open[:_MOST_OPEN]
        return found


_MOST_UNDESCRIBED = 1 << 17


class TraceState:
    """The state of a trace, at the end of the last batch that was read."""

    def __init__(self, tracks: Tracks) -> None:
        """Args: tracks that are known before."""
        self.sequences, self.clocks, self.tracks = Sequences(), Clocks(), tracks
        self.flows = Flows()
        self.queues = Queues()
        self.unread: Counter[int] = Counter()  # fields of events that are not read, by number
        self.late = 0  # beginnings and ends before others of an earlier batch
        self.undescribed: set[int] = set()  # tracks that had events before their descriptors
        self.refused = 0  # arguments
        self.sums: dict[tuple[int, int], float] = {}  # incremental counters, by generation and track
        self.latest: dict[int, int] = {}  # time of the last slice of a track

    def end_batch(self) -> None:
        """Drops the state that only the batch needed."""
        self.sequences.end_batch()
        self.clocks.end_batch()
        current = {each.generation for each in self.sequences.known.values()}
        for key in [key for key in self.sums if key[0] not in current]:
            del self.sums[key]

    def places(self, uuid: NDArray[np.uint64], sequence: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Returns the pids and tids of events of tracks."""
        of_row, first = inverse(uuid.view(np.int64))
        places = []
        for row in first.tolist():
            track = int(uuid[row])
            place = self.tracks.place(track)
            places.append(place)
            if not place.is_known and len(self.undescribed) < _MOST_UNDESCRIBED:
                self.undescribed.add(track)
        pid = np.array([place.pid for place in places], np.int64)[of_row]
        tid = np.array([place.tid for place in places], np.int64)[of_row]
        if self.tracks.threads and not self.tracks.known.get(0):
            rows = np.flatnonzero(uuid == 0)
            for own in np.unique(sequence[rows]).tolist():
                if own in self.tracks.threads:
                    at = rows[sequence[rows] == own]
                    pid[at], tid[at] = self.tracks.threads[own]
        return pid, tid

    def read_descriptors(self, content: bytes, packets: Fields, state: State) -> list[Name]:
        """Reads the descriptors of tracks and threads; returns names that are new."""
        described = []
        owner, starts, ends = packets.spans(TracePacket.TRACK_DESCRIPTOR)
        for row, start, end in zip(owner.tolist(), starts.tolist(), ends.tolist(), strict=True):
            found = self.tracks.describe(content[start:end])
            if found is not None:
                described.append(found[0])
                if found[1].reference_us is not None and state.is_valid[row]:
                    self.clocks.reference(row, int(state.sequence[row]), found[1].reference_us)
        owner, starts, ends = packets.spans(TracePacket.THREAD_DESCRIPTOR)
        names = []
        for row, start, end in zip(owner.tolist(), starts.tolist(), ends.tolist(), strict=True):
            sequence = int(state.sequence[row])
            track = self.tracks.describe_thread(sequence, content[start:end])
            if track.reference_us is not None and state.is_valid[row]:
                self.clocks.reference(row, sequence, track.reference_us)
            if track.name and track.pid is not None and track.tid is not None:
                names.append(Name("thread_name", track.pid, track.tid, track.name))
        return names + self.tracks.new_names(list(dict.fromkeys(described)))

    def times(self, content: bytes, packets: Fields, state: State) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the times of packets in ns, and which have one."""
        owner, starts, ends = packets.spans(TracePacket.CLOCK_SNAPSHOT)
        for row, start, end in zip(owner.tolist(), starts.tolist(), ends.tolist(), strict=True):
            self.clocks.snapshot(row, int(state.sequence[row]), content[start:end])
        times = np.zeros(len(packets.damaged), np.int64)
        rows = np.flatnonzero(packets.has(TracePacket.TIMESTAMP))
        defaults = np.array([each.clock for each in state.all_defaults], np.int64)
        clock = packets.column(TracePacket.TIMESTAMP_CLOCK_ID).view(np.int64)
        clock = np.where(clock == 0, defaults[state.defaults], clock)[rows]
        own = (clock >= Clock.FIRST_OF_SEQUENCE) & (clock <= Clock.LAST_OF_SEQUENCE)
        sequence = np.where(own, state.sequence[rows], 0)
        of_row, first = inverse(sequence, clock)
        order = np.argsort(of_row, kind="stable")
        groups = np.split(order, np.cumsum(np.bincount(of_row, minlength=len(first)))[:-1]) if len(rows) else []
        raw = packets.column(TracePacket.TIMESTAMP)[rows]
        # Snapshots are found by the rows of packets.
        found, good = self.clocks.times(sequence, clock, raw, groups, rows)
        times[rows] = found
        has = np.zeros(len(times), bool)
        has[rows] = good
        return times, has
