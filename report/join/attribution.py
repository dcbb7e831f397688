"""Joins stalls to launches: finds which launch sites caused the stalls of each read and kernel.

A stall record holds only an address, and a read only its time. `candidates` finds the launches that can have caused the
stalls of a read in a cell of addresses, once for each pair. This module counts records by read and address, divides the
counts among the candidates, and adds them up, one row group at a time. docs/attribution.md describes the rules and
their limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.ranges import batches, ranges
from iaprof.gpu.intel.reasons import REASONS
from iaprof.report.join.addresses import Addresses
from iaprof.report.join.candidates import Candidates, Rule, TooManyAtOnce
from iaprof.report.join.cells import Cells
from iaprof.report.join.counting import dense_pairs, flatten_words, sum_by_address
from iaprof.report.join.joules import EnergyOfReads, divided_again, joules_of_rows
from iaprof.report.join.memory import return_free_memory
from iaprof.report.join.placements import ADDRESS_MASK, Placed, Site
from iaprof.report.join.seen import Seen
from iaprof.report.join.streams import Stream
from iaprof.report.join.tally import CellAddresses, Tally

MAX_INTERVALS = 1 << 20
STALL_COLUMNS = ("time_ns", "begin_ns", "stream", "w0", "w1", "w2")
_COMPACT_ROWS = 1 << 19
_MAX_RECORDS_AT_ONCE = 1 << 18
_MAX_SHARED_ROWS = 1 << 18  # (record, candidate) rows at once, for records with several candidates
_MIN_SHARE = 1e-6  # of a sample; smaller differences are rounding errors
_MAX_SLOTS = 1 << 21  # of a tally before it is flushed; about 88 bytes each
_STEP_BITS = 20
_STEPS = 1 << _STEP_BITS  # into which a sample is divided: finer than any share
# 2^64 / x, / x^2 and / x^3 with x^4 = x + 1, made odd: their multiples fill 64 bits evenly in three dimensions, as
# those of the golden ratio do in one (M. Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences", 2018).
_R3_MULTIPLIERS = (0xD1B54A32D192ED03, 0xABC98388FB8FAC03, 0x8CB92BA72F3D8DD7)


@dataclass(frozen=True)
class Joined:
    """Counts of samples by (interval, stream, site, address): each combination once, sorted in that order."""

    interval: NDArray[np.int64]  # [n]
    stream: NDArray[np.int64]  # [n]
    site: NDArray[np.int64]  # [n], index into Placed.sites
    ip: NDArray[np.uint64]  # [n], bytes; only the address bits that the records hold
    counts: NDArray[np.uint64]  # [n, reasons]
    alone: NDArray[np.uint64]  # [n], samples for which this site was the only candidate
    joules: NDArray[np.float64]  # [n]; 0 without a meter

    def only(self, rows: NDArray[np.bool_]) -> Joined:
        """Returns the rows that the mask selects: bool[n]."""
        return Joined(*(getattr(self, each.name)[rows] for each in fields(self)))


@dataclass(frozen=True)
class RowFilter:
    """Selects rows of a capture by time and, where they have one, by stream; for stalls, by the end of the read."""

    begin_ns: int = 0  # CLOCK_MONOTONIC
    end_ns: int = (1 << 64) - 1  # inclusive
    streams: frozenset[int] | None = None  # None: all


def intervals_of(times: NDArray[np.uint64], start_ns: int, interval_ns: int, what: str = "stalls") -> NDArray[np.int64]:
    """Returns the number of the interval that contains each time: int64[n]. Earlier times belong to interval 0.

    Args:
        times: uint64[n], CLOCK_MONOTONIC ns.
        start_ns: when interval 0 starts. Negative in a merged capture if this part's machine was booted after the
            first part began.
        interval_ns: length of an interval; 0: a single interval.
        what: the kind of rows, for the message.

    Raises:
        CaptureError: the times span MAX_INTERVALS intervals or more.
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
    """Joins the stalls of one capture, one row group at a time."""

    def __init__(
        self,
        placed: Placed,
        start_ns: int,
        interval_ns: int = 0,
        rule: Rule = Rule(),  # noqa: B008 (it is frozen)
        starts: Mapping[int, NDArray[np.uint64]] | None = None,
        merged: bool = False,
        reasons: Sequence[str] = REASONS,
        energy: EnergyOfReads | None = None,
        seen: Seen | None = None,
    ) -> None:
        """Prepares the join.

        Args:
            placed: kernels and launches. The join adds sites to it for stalls without a launch.
            start_ns: when interval 0 starts, CLOCK_MONOTONIC ns.
            interval_ns: length of an interval; 0: a single interval.
            rule: how stalls are joined to launches.
            starts: by placement: the offsets in bytes at which its instructions start, to tell processes apart.
            merged: count all addresses of a cell at one of them. For time lines, where a row for each instruction in
                each of many intervals would be too many.
            reasons: the reasons to count, as `reasons_of` returns them.
            energy: the energy of reads, which their samples share; None: not known.
            seen: gets when samples of each site were seen; None: nobody asks.
        """
        self._seen = seen
        self._merged, self._reasons, self._energy = merged, reasons, energy
        self._placed, self._rule, self._starts = placed, rule, starts or {}
        self._start_ns, self._interval_ns = start_ns, interval_ns
        self._unknown = placed.add_site(Site(None, 0, "", 0))
        self._ip_spaces: dict[int, _IpSpace] = {}
        self._results: list[JoinedShares] = []
        self._rows, self._compact_at = 0, _COMPACT_ROWS

    def add(self, table: pa.Table, known: list[Stream], row_filter: RowFilter = RowFilter()) -> int:
        """Joins one row group.

        Args:
            table: STALL_COLUMNS of `stall` rows.
            known: the capture's streams, by index.
            row_filter: the reads to join.

        Returns:
            The number of records in the joined reads.

        Raises:
            CaptureError: the lists of words differ in length, or the header lacks a stream.
        """
        records = 0
        times, stream_of = table["time_ns"].to_numpy(), table["stream"].to_numpy()
        in_time = (times >= np.uint64(row_filter.begin_ns)) & (times <= np.uint64(row_filter.end_ns))
        for stream in np.unique(stream_of).tolist():
            if stream >= len(known):
                raise CaptureError("the capture has stalls of a stream that its header does not name")
            if row_filter.streams is not None and stream not in row_filter.streams:
                continue
            here = in_time & (stream_of == stream)
            rows = table if here.all() else table.filter(pa.array(here))
            words, lengths = flatten_words(rows, known[stream].layout.words)
            records += int(lengths.sum())
            ends = rows["time_ns"].to_numpy()
            reads = _Reads(
                rows["begin_ns"].to_numpy(), ends, intervals_of(ends, self._start_ns, self._interval_ns), lengths
            )
            until = np.cumsum(lengths)
            for some in batches(lengths, _MAX_RECORDS_AT_ONCE):
                within = slice(int(until[some.start] - lengths[some.start]), int(until[some.stop - 1]))
                if within.start < within.stop:
                    self._join(known[stream], reads.only(some), [word[within] for word in words])
        return records

    def joined_shares(self) -> JoinedShares:
        """Returns the sums of all row groups added so far, as shares of samples."""
        for space in self._ip_spaces.values():
            for stream in space.tallies:
                self._flush(space, stream)
        none = np.empty(0, np.int64)
        empty = JoinedShares(none, none, none, np.empty(0, np.uint64), np.empty((len(self._reasons) + 2, 0)))
        self._results = [merge_shares(self._results or [empty])]
        return self._results[0]

    def _join(self, stream: Stream, reads: _Reads, words: list[NDArray[np.uint64]]) -> None:
        """Joins a batch of reads of one stream, which is small enough for the CPU's caches."""
        space = self._ip_space(stream)
        address = space.number(stream.layout.ips(words) & np.uint64(ADDRESS_MASK))
        cell = space.cell_addresses.cell[address]
        # The candidates are found once for each distinct (read, cell).
        read = np.repeat(np.arange(len(reads.lengths)), reads.lengths)
        pairs, pair_of = dense_pairs(read, cell, len(reads.lengths), len(space.cell_addresses.count))
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
        tally, subsample = space.tally(stream.index, len(self._reasons) + 2), float(stream.subsample)
        cell_of_share = pair_cell[shares.pair]
        blocks = tally.blocks(
            reads.intervals[pair_read[shares.pair]],
            cell_of_share,
            shares.site,
            space.cell_addresses.count[cell_of_share],
        )
        first = np.searchsorted(shares.pair, np.arange(len(pairs) + 1))
        pair_of, place, counts = sum_by_address(
            stream.layout,
            self._reasons,
            pair_of,
            space.cell_addresses.place[address],
            space.cell_addresses.count[pair_cell],
            words,
        )
        if self._seen is not None:
            read = pair_read[shares.pair]
            samples = self._seen.samples(pair_of, counts, len(pairs))[shares.pair] * shares.share * subsample
            self._seen.add(stream.index, shares.site, reads.begins[read], reads.ends[read], samples)
        # The first candidate of each pair, which usually is the only one ...
        entry = first[pair_of]
        alone = _add_shares(tally, blocks[entry] + place, shares.share[entry] * subsample, counts)
        tally.add(len(counts), blocks[entry] + place, alone * shares.alone[pair_of])
        if self._energy is not None:  # at the first candidate: `to_whole_counts` divides it
            energy = self._energy.of_reads(stream.index, reads.ends)
            joules = joules_of_rows(energy, pair_read[pair_of], counts)
            tally.add(len(counts) + 1, blocks[entry] + place, joules)
        # ... and the others.
        others = np.diff(first)[pair_of] - 1
        several = np.flatnonzero(others)
        for some in batches(others[several], _MAX_SHARED_ROWS):
            repeat = others[several[some]]
            row = np.repeat(several[some], repeat)
            entry = ranges(first[pair_of[several[some]]] + 1, repeat)
            _add_shares(
                tally, blocks[entry] + place[row], shares.share[entry] * subsample, [each[row] for each in counts]
            )
        if tally.slots > _MAX_SLOTS:
            self._flush(space, stream.index)

    def _ip_space(self, stream: Stream) -> _IpSpace:
        if stream.layout.ip_bits not in self._ip_spaces:
            cells = Cells(self._placed, stream.layout.address_mask, self._starts)
            candidates = Candidates(self._placed, cells, self._rule, self._unknown)
            self._ip_spaces[stream.layout.ip_bits] = _IpSpace(cells, candidates, self._merged)
            return_free_memory()
        return self._ip_spaces[stream.layout.ip_bits]

    def _flush(self, space: _IpSpace, stream: int) -> None:
        """Moves a stream's sums to `_results` and empties its tally; merges the results when they have doubled."""
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

    begins: NDArray[np.uint64]  # [n], ns; no record was sampled before
    ends: NDArray[np.uint64]  # [n], ns
    intervals: NDArray[np.int64]  # [n]
    lengths: NDArray[np.int64]  # [n], records

    def only(self, some: slice) -> _Reads:
        """Returns a slice of the reads."""
        return _Reads(self.begins[some], self.ends[some], self.intervals[some], self.lengths[some])


class _IpSpace:
    """Addresses, cells, candidates and sums for all streams whose records hold the same number of address bits."""

    def __init__(self, cells: Cells, candidates: Candidates, merged: bool) -> None:
        self.candidates = candidates
        self.cell_addresses = CellAddresses()
        self.tallies: dict[int, Tally] = {}  # by stream
        self._cells = cells
        self._addresses = Addresses()
        self._merged = merged
        # With `merged`, all addresses of a cell have one number, and the cell's first address stands for them.
        self._merged_number = np.empty(0, np.int64)  # [addresses]
        self._number_of_cell: dict[int, int] = {}
        self._merged_ips: list[int] = []  # by that number

    @property
    def ips(self) -> NDArray[np.uint64]:
        """uint64[numbers]: the address that has each number."""
        return np.array(self._merged_ips, np.uint64) if self._merged else self._addresses.ips

    def number(self, ips: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the number of each address: int64[n]. With `merged`, all addresses of a cell share one."""
        numbers = self._addresses.number(ips)
        if not self._merged:
            new = self._addresses.ips[len(self.cell_addresses.cell) :]
            if len(new):
                self.cell_addresses.add(self._cells.cells_of(new), len(self._cells.members))
            return numbers
        new = self._addresses.ips[len(self._merged_number) :]
        if len(new):
            cells = self._cells.cells_of(new)
            distinct, first = np.unique(cells, return_index=True)
            new_cells = [
                index
                for index, cell in zip(first.tolist(), distinct.tolist(), strict=True)
                if cell not in self._number_of_cell
            ]
            for index in new_cells:
                self._number_of_cell[int(cells[index])] = len(self._merged_ips)
                self._merged_ips.append(int(new[index]))
            self.cell_addresses.add(cells[new_cells], len(self._cells.members))
            self._merged_number = np.append(
                self._merged_number, [self._number_of_cell[cell] for cell in cells.tolist()]
            )
        return self._merged_number[numbers]

    def tally(self, stream: int, columns: int) -> Tally:
        """Returns the stream's tally."""
        return self.tallies.setdefault(stream, Tally(columns))


@dataclass(frozen=True)
class JoinedShares:
    """Fractional counts of samples by (interval, stream, site, address); `Joined` has whole counts."""

    interval: NDArray[np.int64]  # [n]
    stream: NDArray[np.int64]  # [n]
    site: NDArray[np.int64]  # [n]
    ip: NDArray[np.uint64]  # [n], bytes
    shares: NDArray[np.float64]  # [reasons + 2, n]; then of all reasons, with this site the only candidate; and joules


def _add_shares(
    tally: Tally, target: NDArray[np.int64], share: NDArray[np.float64], counts: list[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Adds counts times share to the slots at `target`; returns what it added, summed over all reasons."""
    total = np.zeros(len(target))
    for column, each in enumerate(counts):
        some = np.flatnonzero(each)  # a record has few reasons
        values = each[some] * share[some]
        tally.add(column, target[some], values)
        total[some] += values
    return total


def merge_shares(results: list[JoinedShares]) -> JoinedShares:
    """Merges one or more results: sorted, each (interval, stream, site, address) once."""
    names = ("interval", "stream", "site", "ip")
    columns: list[Any] = [np.concatenate([getattr(result, name) for result in results]) for name in names]
    order = np.lexsort(columns[::-1])
    columns = [column[order] for column in columns]
    new = np.ones(len(order), bool)
    if len(order):
        new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    first = np.flatnonzero(new)
    shares = np.empty((len(results[0].shares), len(first)))
    for index in range(len(shares) if len(order) else 0):  # row by row: all at once takes several times the memory
        shares[index] = np.add.reduceat(np.concatenate([result.shares[index] for result in results])[order], first)
    interval, stream, site, ip = (column[new] for column in columns)
    return JoinedShares(interval, stream, site, ip, shares)


def to_whole_counts(result: JoinedShares) -> Joined:
    """Rounds shares to whole counts: each within 1 of its share, and the sum at each address exact.

    Rounding down leaves fractions of samples. Each such sample goes to one of the sites that share it, which wins as
    often as its fraction says. If the largest fraction always won, the other sites would lose most of their samples
    where intervals are short and samples few.
    """
    order = np.lexsort((result.site, result.ip, result.stream, result.interval))
    new = np.ones(len(order), bool)
    if len(order):
        new[1:] = np.any([c[order][1:] != c[order][:-1] for c in (result.interval, result.stream, result.ip)], axis=0)
    group = np.cumsum(new) - 1
    first = order[new]
    # The phases are even over the addresses of an interval and over the intervals of an address, and reproducible.
    turn = result.interval[first].astype(np.uint64) * np.uint64(_R3_MULTIPLIERS[0])
    turn += (result.ip[first] >> np.uint64(3)) * np.uint64(_R3_MULTIPLIERS[1])
    *by_reason, alone_shares, joules = result.shares
    whole = np.empty((len(order), len(by_reason)), np.uint64)
    for column, shares in enumerate(by_reason):
        counts = np.floor(shares + _MIN_SHARE)
        left = np.rint((shares - counts)[order] * _STEPS).astype(np.int64)
        sharing = np.flatnonzero(left > 0)
        phase = (turn + np.uint64(column * _R3_MULTIPLIERS[2] % (1 << 64)) >> np.uint64(64 - _STEP_BITS)).astype(
            np.int64
        )
        counts[order[sharing[_winners(left[sharing], group[sharing], phase)]]] += 1
        whole[:, column] = counts
    alone = np.minimum(np.rint(alone_shares).astype(np.uint64), whole.sum(axis=1))
    some = whole.any(axis=1)
    # The energy of an address's reads goes to whoever has their samples.
    if joules.any():
        number = np.empty(len(order), np.int64)
        number[order] = group
        joules = divided_again(joules, number, whole.sum(axis=1, dtype=np.uint64), len(first))
    columns: list[Any] = [result.interval, result.stream, result.site, result.ip, whole, alone, joules]
    return Joined(*(column if some.all() else column[some] for column in columns))


def _winners(left: NDArray[np.int64], group: NDArray[np.int64], phase: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Selects the rows that get one of their group's remaining samples: bool[n].

    This is systematic sampling: a group's fractions lie side by side on a line that has a mark at every whole number
    plus the phase, and a row wins if a mark falls on its fraction. So a group has as many winners as its fractions add
    up to.

    Args:
        left: int64[n], fractions of a sample in units of 1 / _STEPS, above 0 and at most _STEPS.
        group: int64[n], ascending.
        phase: int64[groups], 0 to _STEPS - 1.
    """
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    number = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(group))))
    reach = np.cumsum(left)
    reach -= (reach - left)[begins][number]
    # A group's fractions add up to whole samples, but for the rounding of each to steps.
    total = np.maximum.reduceat(reach, begins)[number] if len(begins) else reach
    exact = (total + _STEPS // 2) // _STEPS * _STEPS
    reach = np.where(reach == total, exact, np.minimum(reach, exact))
    marks = (reach + phase[group]) // _STEPS
    before = np.append(0, marks[:-1])
    before[begins] = 0
    drawn: NDArray[np.bool_] = marks > before
    return drawn
