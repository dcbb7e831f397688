"""Joining stalls to launches: for each read of stalls and each kernel, who launched it.

A record says no more than an address, and a read no more than when it was made. Who can have launched what it saw is
worked out once for each read and cell of addresses (report.candidates); here records are counted by read and address,
shared out, and added up, row group by row group on all cores. docs/attribution.md describes the rules and their limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.ranges import ranges
from iaprof.gpu.intel.reasons import REASONS
from iaprof.gpu.records import RecordLayout
from iaprof.report.join.addresses import Addresses
from iaprof.report.join.candidates import Candidates, Rule, TooManyAtOnce
from iaprof.report.join.cells import Cells
from iaprof.report.join.memory import give_back
from iaprof.report.join.placements import ADDRESS_MASK, Placed, Site
from iaprof.report.join.streams import Stream
from iaprof.report.join.tally import CellAddresses, Tally

MAX_INTERVALS = 1 << 20
STALL_COLUMNS = ("time_ns", "begin_ns", "stream", "w0", "w1", "w2")
_COMPACT_ROWS = 1 << 19
_RECORDS_AT_ONCE = 1 << 18
_ROWS_AT_ONCE = 1 << 18  # that become of records which are shared out among several places
_SMALLEST_SHARE = 1e-6  # of a sample that counts
_MOST_PLACES = 1 << 21  # of sums, 88 bytes each
_DENSEST = 8  # places of a table for each record that goes into it
_STEP_BITS = 20
_STEPS = 1 << _STEP_BITS  # of a sample: finer than shares are
# 2^64 / x, / x^2 and / x^3 with x^4 = x + 1, odd: their multiples fill 64 bits evenly in three dimensions, as those of
# the golden ratio do in one (M. Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences", 2018).
_TURNS = (0xD1B54A32D192ED03, 0xABC98388FB8FAC03, 0x8CB92BA72F3D8DD7)


@dataclass(frozen=True)
class Joined:
    """Distinct (interval, stream, site, address) and their counts, sorted in that order."""

    interval: NDArray[np.int64]  # [n]
    stream: NDArray[np.int64]  # [n]
    site: NDArray[np.int64]  # [n], index into Placed.sites
    ip: NDArray[np.uint64]  # [n], bytes; as much of the address as the records hold
    counts: NDArray[np.uint64]  # [n, m], by reason
    alone: NDArray[np.uint64]  # [n], samples for which there was no other site

    def only(self, rows: NDArray[np.bool_]) -> Joined:
        """The same with some of the rows: bool[n]."""
        return Joined(*(getattr(self, each.name)[rows] for each in fields(self)))


@dataclass(frozen=True)
class RowFilter:
    """Which reads are wanted: those that ended within, and of these streams."""

    begin_ns: int = 0
    end_ns: int = (1 << 64) - 1
    streams: frozenset[int] | None = None  # None for all


def intervals_of(times: NDArray[np.uint64], start_ns: int, interval_ns: int, what: str = "stalls") -> NDArray[np.int64]:
    """The number of the interval in which each time is: int64[n]. What was before the first is the first's.

    Args:
        times: uint64[n], CLOCK_MONOTONIC ns.
        start_ns: when interval 0 starts. Before the clock's 0, where a machine was started later than the first of a
            merged capture's parts.
        interval_ns: length of an interval; 0 for everything in one.
        what: has these times.

    Raises:
        CaptureError: there are too many intervals.
    """
    if not interval_ns:
        return np.zeros(len(times), np.int64)
    start = np.uint64(max(start_ns, 0))
    since = np.maximum(times, start) - start + np.uint64(max(-start_ns, 0))
    intervals = since // np.uint64(interval_ns)
    if len(intervals) and intervals.max() >= MAX_INTERVALS:
        raise CaptureError(
            f"the capture's {what} span {intervals.max():,} intervals: choose longer ones with --interval"
        )
    return intervals.astype(np.int64)


class Attribution:
    """Joins the stalls of one capture, row group by row group."""

    def __init__(
        self,
        placed: Placed,
        start_ns: int,
        interval_ns: int = 0,
        rule: Rule = Rule(),  # noqa: B008 (it is frozen)
        starts: Mapping[int, NDArray[np.uint64]] | None = None,
        merged: bool = False,
        reasons: Sequence[str] = REASONS,
    ) -> None:
        """Prepares the search for kernels by address.

        Args:
            placed: kernels and launches. Sites for what has no launch are added to it.
            start_ns: when interval 0 starts, CLOCK_MONOTONIC ns.
            interval_ns: length of an interval; 0 for all stalls in one.
            rule: how stalls are joined to launches.
            starts: by placement: the offsets in bytes at which its instructions start, to tell processes apart.
            merged: addresses that can belong to the same kernels are added up at one of them: what is wanted is
                where time went, and a row for each instruction in each of many intervals would be too many.
            reasons: that are counted, as `reasons_of` has them.
        """
        self._merged, self._reasons = merged, reasons
        self._placed, self._rule, self._starts = placed, rule, starts or {}
        self._start_ns, self._interval_ns = start_ns, interval_ns
        self._unknown = placed.add_site(Site(None, 0, "", 0))
        self._ip_spaces: dict[int, _IpSpace] = {}
        self._results: list[JoinedShares] = []
        self._rows, self._compact_at = 0, _COMPACT_ROWS

    def add(self, table: pa.Table, known: list[Stream], row_filter: RowFilter = RowFilter()) -> int:
        """Joins one row group of `stall` rows (columns time_ns, begin_ns, stream, w0, w1, w2).

        Returns:
            How many records it had.

        Raises:
            CaptureError: its columns do not fit together.
        """
        records = 0
        times, stream_of = table["time_ns"].to_numpy(), table["stream"].to_numpy()
        wanted = (times >= np.uint64(row_filter.begin_ns)) & (times <= np.uint64(row_filter.end_ns))
        for stream in np.unique(stream_of).tolist():
            if stream >= len(known):
                raise CaptureError("the capture has stalls of a stream that its header does not name")
            if row_filter.streams is not None and stream not in row_filter.streams:
                continue
            here = wanted & (stream_of == stream)
            rows = table if here.all() else table.filter(pa.array(here))
            words, lengths = _flat(rows, known[stream].layout.words)
            records += int(lengths.sum())
            ends = rows["time_ns"].to_numpy()
            reads = _Reads(
                rows["begin_ns"].to_numpy(), ends, intervals_of(ends, self._start_ns, self._interval_ns), lengths
            )
            until = np.cumsum(lengths)
            for some in _chunks(lengths, _RECORDS_AT_ONCE):
                within = slice(int(until[some.start] - lengths[some.start]), int(until[some.stop - 1]))
                if within.start < within.stop:
                    self._join(known[stream], reads.only(some), [word[within] for word in words])
        return records

    def joined_shares(self) -> JoinedShares:
        """All that was added, as shares."""
        for space in self._ip_spaces.values():
            for stream in space.tallies:
                self._flush(space, stream)
        none = np.empty(0, np.int64)
        empty = JoinedShares(none, none, none, np.empty(0, np.uint64), np.empty((len(self._reasons) + 1, 0)))
        self._results = [merge_shares(self._results or [empty])]
        return self._results[0]

    def _join(self, stream: Stream, reads: _Reads, words: list[NDArray[np.uint64]]) -> None:
        """Joins a few reads: so few that what is worked with stays in the processor's caches."""
        space = self._ip_space(stream)
        address = space.number(stream.layout.ips(words) & np.uint64(ADDRESS_MASK))
        cell = space.cell_addresses.cell[address]
        # Each read and cell that come together are looked at once.
        read = np.repeat(np.arange(len(reads.lengths)), reads.lengths)
        pairs, pair_of = _dense(read, cell, len(reads.lengths), len(space.cell_addresses.count))
        pair_read, pair_cell = np.divmod(pairs, len(space.cell_addresses.count))
        try:
            shares = space.candidates.weigh(
                pair_cell, reads.begins[pair_read], reads.ends[pair_read], len(reads.lengths) > 1
            )
        except TooManyAtOnce:
            middle = len(reads.lengths) // 2
            record = int(reads.lengths[:middle].sum())
            for some, records in ((slice(middle), slice(record)), (slice(middle, None), slice(record, None))):
                self._join(stream, reads.only(some), [word[records] for word in words])
            return
        tally, subsample = space.tally(stream.index, len(self._reasons) + 1), float(stream.subsample)
        cell_of_share = pair_cell[shares.pair]
        blocks = tally.blocks(
            reads.intervals[pair_read[shares.pair]],
            cell_of_share,
            shares.site,
            space.cell_addresses.count[cell_of_share],
        )
        first = np.searchsorted(shares.pair, np.arange(len(pairs) + 1))
        pair_of, place, counts = _by_pair_and_address(
            stream.layout,
            self._reasons,
            pair_of,
            space.cell_addresses.place[address],
            space.cell_addresses.count[pair_cell],
            words,
        )
        # The first place of each pair, which usually is the only one.
        entry = first[pair_of]
        alone = _add(tally, blocks[entry] + place, shares.share[entry] * subsample, counts)
        tally.add(len(counts), blocks[entry] + place, alone * shares.alone[pair_of])
        # And what other places there are.
        others = np.diff(first)[pair_of] - 1
        several = np.flatnonzero(others)
        for some in _chunks(others[several], _ROWS_AT_ONCE):
            repeat = others[several[some]]
            row = np.repeat(several[some], repeat)
            entry = ranges(first[pair_of[several[some]]] + 1, repeat)
            _add(tally, blocks[entry] + place[row], shares.share[entry] * subsample, [each[row] for each in counts])
        if tally.places > _MOST_PLACES:
            self._flush(space, stream.index)

    def _ip_space(self, stream: Stream) -> _IpSpace:
        if stream.layout.ip_bits not in self._ip_spaces:
            cells = Cells(self._placed, stream.layout.address_mask, self._starts)
            candidates = Candidates(self._placed, cells, self._rule, self._unknown)
            self._ip_spaces[stream.layout.ip_bits] = _IpSpace(cells, candidates, self._merged)
            give_back()
        return self._ip_spaces[stream.layout.ip_bits]

    def _flush(self, space: _IpSpace, stream: int) -> None:
        """Makes room for other sums."""
        sums = space.tallies[stream].take(space.cell_addresses)
        count = len(sums.site)
        ips = space.ips[sums.address]
        self._results.append(JoinedShares(sums.interval, np.full(count, stream), sums.site, ips, sums.values))
        self._rows += count
        if self._rows > self._compact_at:
            self._results = [merge_shares(self._results)]
            self._rows = len(self._results[0].ip)
            self._compact_at = max(_COMPACT_ROWS, 2 * self._rows)


@dataclass(frozen=True)
class _Reads:
    """Reads of one stream."""

    begins: NDArray[np.uint64]  # [n], ns
    ends: NDArray[np.uint64]  # [n], ns
    intervals: NDArray[np.int64]  # [n]
    lengths: NDArray[np.int64]  # [n], records

    def only(self, some: slice) -> _Reads:
        """Some of them."""
        return _Reads(self.begins[some], self.ends[some], self.intervals[some], self.lengths[some])


class _IpSpace:
    """What is known of the addresses of one layout of records."""

    def __init__(self, cells: Cells, candidates: Candidates, merged: bool) -> None:
        self.candidates = candidates
        self.cell_addresses = CellAddresses()
        self.tallies: dict[int, Tally] = {}  # by stream
        self._cells = cells
        self._addresses = Addresses()
        self._merged = merged
        self._first = np.empty(0, np.int64)  # of each address: the number of the one at which it is added up
        self._of_cell: dict[int, int] = {}  # the number of that address of each cell
        self._merged_ips: list[int] = []

    @property
    def ips(self) -> NDArray[np.uint64]:
        """The address of each number."""
        return np.array(self._merged_ips, np.uint64) if self._merged else self._addresses.ips

    def number(self, ips: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The number of each address; those of a cell have one number where they are merged."""
        numbers = self._addresses.number(ips)
        if not self._merged:
            new = self._addresses.ips[len(self.cell_addresses.cell) :]
            if len(new):
                self.cell_addresses.add(self._cells.of(new), len(self._cells.members))
            return numbers
        new = self._addresses.ips[len(self._first) :]
        if len(new):
            cells = self._cells.of(new)
            met, first = np.unique(cells, return_index=True)
            unmet = [
                index for index, cell in zip(first.tolist(), met.tolist(), strict=True) if cell not in self._of_cell
            ]
            for index in unmet:
                self._of_cell[int(cells[index])] = len(self._merged_ips)
                self._merged_ips.append(int(new[index]))
            self.cell_addresses.add(cells[unmet], len(self._cells.members))
            self._first = np.append(self._first, [self._of_cell[cell] for cell in cells.tolist()])
        return self._first[numbers]

    def tally(self, stream: int, columns: int) -> Tally:
        """The sums of a stream."""
        return self.tallies.setdefault(stream, Tally(columns))


@dataclass(frozen=True)
class JoinedShares:
    """Distinct (interval, stream, site, address) of some stalls, and their shares of samples."""

    interval: NDArray[np.int64]
    stream: NDArray[np.int64]
    site: NDArray[np.int64]
    ip: NDArray[np.uint64]
    shares: NDArray[np.float64]  # [m + 1, n]: by reason, and those of all reasons that only this site can have launched


def _dense(
    read: NDArray[np.int64], cell: NDArray[np.int64], reads: int, cells: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct read * cells + cell, ascending; and which of them each row is."""
    key = read * cells + cell
    if reads * cells > _DENSEST * len(key) + _DENSEST:
        found, which = np.unique(key, return_inverse=True)
        return found, which.astype(np.int64)
    there = np.zeros(reads * cells, bool)
    there[key] = True
    return np.flatnonzero(there), (np.cumsum(there, dtype=np.int64) - 1)[key]


def _by_pair_and_address(
    layout: RecordLayout,
    reasons: Sequence[str],
    pair_of: NDArray[np.int64],
    place: NDArray[np.int64],
    places: NDArray[np.int64],
    words: list[NDArray[np.uint64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[NDArray[np.float64]]]:
    """Records of a pair with one address added up: pair, place of the address in its cell, counts by reason.

    Args:
        layout: of the records.
        reasons: that are counted.
        pair_of: int64[records].
        place: int64[records].
        places: int64[pairs], how many each pair's cell has.
        words: of the records.
    """
    first = np.cumsum(places) - places
    size = int(places.sum())
    if size > _DENSEST * len(pair_of):  # too sparse for a table: each record for itself
        return pair_of, place, [layout.counts(words, reason).astype(np.float64) for reason in reasons]
    key = first[pair_of] + place
    records = np.bincount(key, minlength=size)
    rows = np.flatnonzero(records)
    counts: list[NDArray[np.float64]] = []
    # Several counters as digits of one number: a sum of numbers below 2^53 is exact in floating point.
    bits = int(records.max() * 255).bit_length()
    together = max(1, min(53 // bits, len(reasons)))
    for group in range(0, len(reasons), together):
        some = reasons[group : group + together]
        packed = np.zeros(len(key), np.uint64)
        for digit, reason in enumerate(some):
            layout.add_counts(words, reason, digit * bits, packed)
        sums = np.bincount(key, packed.astype(np.float64), size)[rows].astype(np.int64)
        counts += [(sums >> (digit * bits) & ((1 << bits) - 1)).astype(np.float64) for digit in range(len(some))]
    pair = np.repeat(np.arange(len(places)), np.diff(np.searchsorted(rows, np.append(first, size))))
    return pair, rows - first[pair], counts


def _flat(rows: pa.Table, words: int) -> tuple[list[NDArray[np.uint64]], NDArray[np.int64]]:
    columns, lengths = [], np.empty(0, np.int64)
    for word in range(words):
        column = rows[f"w{word}"]
        lists = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if lists.null_count:
            raise CaptureError(f"the capture has stalls without their word {word}")
        here = np.diff(lists.offsets.to_numpy())
        if word and not np.array_equal(here, lengths):
            raise CaptureError("the capture has stalls whose words do not belong together")
        lengths = here.astype(np.int64)
        columns.append(lists.flatten().to_numpy())
    return columns, lengths


def _chunks(sizes: NDArray[np.int64], most: int) -> Iterator[slice]:
    """Rows, which become so many each, in parts that do not become more than `most`; a single row may."""
    until = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = int(until[first - 1]) if first else 0
        stop = max(int(np.searchsorted(until, before + most, side="right")), first + 1)
        yield slice(first, stop)
        first = stop


def _add(
    tally: Tally, target: NDArray[np.int64], share: NDArray[np.float64], counts: list[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Adds shares of columns of counts to sums; gives what was added for all reasons together."""
    total = np.zeros(len(target))
    for column, each in enumerate(counts):
        values = each * share
        tally.add(column, target, values)
        total += values
    return total


def merge_shares(results: list[JoinedShares]) -> JoinedShares:
    """All parts in one, sorted, each (interval, stream, site, address) once; there is at least one."""
    names = ("interval", "stream", "site", "ip")
    columns: list[Any] = [np.concatenate([getattr(result, name) for result in results]) for name in names]
    order = np.lexsort(columns[::-1])
    columns = [column[order] for column in columns]
    new = np.ones(len(order), bool)
    if len(order):
        new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    first = np.flatnonzero(new)
    shares = np.empty((len(results[0].shares), len(first)))
    for index in range(len(shares) if len(order) else 0):  # one by one: all at once would take several times the memory
        shares[index] = np.add.reduceat(np.concatenate([result.shares[index] for result in results])[order], first)
    interval, stream, site, ip = (column[new] for column in columns)
    return JoinedShares(interval, stream, site, ip, shares)


def to_whole_counts(result: JoinedShares) -> Joined:
    """Shares as whole counts that add up to what was recorded at each address, each less than 1 from its share.

    What is left of a sample after rounding down goes to one of the sites that share it, each of which gets it as often
    as its part says: were it always the one with the largest part, the others would lose most of theirs where intervals
    are short and samples few.
    """
    order = np.lexsort((result.site, result.ip, result.stream, result.interval))
    new = np.ones(len(order), bool)
    if len(order):
        new[1:] = np.any([c[order][1:] != c[order][:-1] for c in (result.interval, result.stream, result.ip)], axis=0)
    group = np.cumsum(new) - 1
    first = order[new]
    # Even over the addresses of an interval and over the intervals of an address, and the same in every report.
    turn = result.interval[first].astype(np.uint64) * np.uint64(_TURNS[0])
    turn += (result.ip[first] >> np.uint64(3)) * np.uint64(_TURNS[1])
    *by_reason, alone_shares = result.shares
    whole = np.empty((len(order), len(by_reason)), np.uint64)
    for column, shares in enumerate(by_reason):
        counts = np.floor(shares + _SMALLEST_SHARE)
        left = np.rint((shares - counts)[order] * _STEPS).astype(np.int64)
        sharing = np.flatnonzero(left > 0)
        phase = (turn + np.uint64(column * _TURNS[2] % (1 << 64)) >> np.uint64(64 - _STEP_BITS)).astype(np.int64)
        counts[order[sharing[_drawn(left[sharing], group[sharing], phase)]]] += 1
        whole[:, column] = counts
    alone = np.minimum(np.rint(alone_shares).astype(np.uint64), whole.sum(axis=1))
    some = whole.any(axis=1)
    columns: list[Any] = [result.interval, result.stream, result.site, result.ip, whole, alone]
    return Joined(*(column if some.all() else column[some] for column in columns))


def _drawn(left: NDArray[np.int64], group: NDArray[np.int64], phase: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows get one of the samples that are left: of each group as many as its parts add up to.

    The parts of a group lie side by side on a line, on which there is a mark at every whole number of samples, moved by
    the phase: who has a mark in its part is drawn.

    Args:
        left: int64[n], parts of a sample in _STEPS, above 0 and at most _STEPS.
        group: int64[n], ascending.
        phase: int64[groups], 0 to _STEPS - 1.
    """
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    number = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(group))))
    reach = np.cumsum(left)
    reach -= (reach - left)[begins][number]
    # What a group's parts add up to is whole, but for what rounding each of them made of it.
    total = np.maximum.reduceat(reach, begins)[number] if len(begins) else reach
    exact = (total + _STEPS // 2) // _STEPS * _STEPS
    reach = np.where(reach == total, exact, np.minimum(reach, exact))
    marks = (reach + phase[group]) // _STEPS
    before = np.append(0, marks[:-1])
    before[begins] = 0
    drawn: NDArray[np.bool_] = marks > before
    return drawn
