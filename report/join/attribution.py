"""Joins stalls to launches: finds which launch sites caused the stalls of each read and kernel.

A stall record holds only an address, and a read only its time. `candidates` finds the launches that can have caused the
stalls of a read in a cell of addresses, once for each pair. This module adds up the samples of pairs that are divided
alike, and divides the sums among the candidates, one row group at a time. docs/attribution.md describes the rules and
their limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.basics.heap import return_free_memory
from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.distinct import groups, numbered
from iaprof.formats.ranges import batches, ranges
from iaprof.gpu.code import ADDRESS_MASK
from iaprof.gpu.samples import Fields, SampleLayout
from iaprof.gpu.vendors import FIRST_REASONS
from iaprof.report.join.candidates import Candidates, Rule, Shares, TooManyAtOnce
from iaprof.report.join.cells import Cells
from iaprof.report.join.placements import Placed, Site
from iaprof.report.join.records import PLACE_BITS, Addresses, ReadCells, add, sum_columns
from iaprof.report.join.seen import Seen
from iaprof.report.join.shares import R3_MULTIPLIERS, EnergyOfReads, JoinedShares, joules_of_rows, merge_shares
from iaprof.report.join.streams import Stream
from iaprof.report.join.tally import CellAddresses, Tally

_LARGEST_NARROW, _LARGEST_WIDE = (1 << 32) - 1, (1 << 63) - 1  # sums of counts of 8 bits, and of more
_MAX_SLOTS_PER_RECORD = 2  # for samples that are to be divided: more slots would take longer than sorting

MOST_CANDIDATES = 64
"""The most among which all samples are divided."""
_MOST_DRAWN = 16
_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


def alike(
    cell: NDArray[np.int64], interval: NDArray[np.int64], shares: Shares, first: NDArray[np.int64], pairs: _Ints
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Groups pairs that have the same cell, interval and candidates, with the same shares.

    Args:
        cell: int64[all pairs].
        interval: int64[all pairs].
        shares: the candidates of all pairs.
        first: int64[all pairs + 1], each pair's first share.
        pairs: int64[n], which to group.

    Returns:
        One pair of each group, and the group of each of the pairs: int64[groups], int64[n].
    """
    count = np.diff(first)[pairs]
    entries = ranges(first[pairs], count)
    entry, _ = groups(shares.site[entries], shares.share[entries].view(np.int64))
    begins = np.cumsum(count) - count
    group, _ = groups(cell[pairs], interval[pairs], shares.alone[pairs].astype(np.int64))
    for place in range(int(count.max(initial=0))):
        more = np.flatnonzero(count > place)
        # Pairs without so many candidates keep lower numbers.
        group[more] = groups(group[more], entry[begins[more] + place])[0] + len(pairs) * (place + 1)
    group, one = groups(group)
    return pairs[one], group


def flatten_words(rows: pa.Table, layout: SampleLayout) -> tuple[list[NDArray[np.uint64]], NDArray[np.int64]]:
    """Returns the words of all records, uint64[records] each, and the number of records of each read.

    Raises:
        CaptureError: the lists of words differ in length, or one is missing: these are not rows of that layout.
    """
    columns, lengths = [], np.empty(0, np.int64)
    for word, name in enumerate(layout.rows.columns[: layout.words]):
        if name not in rows.column_names:
            raise CaptureError("the capture has stalls of a stream that has other rows")
        column = rows[name]
        lists = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if lists.null_count:
            raise CaptureError(f"the capture has stalls without their word {word}")
        here = np.diff(lists.offsets.to_numpy())
        if word and not np.array_equal(here, lengths):
            raise CaptureError("the capture has stalls whose words do not belong together")
        lengths = here.astype(np.int64)
        columns.append(lists.flatten().to_numpy())
    return columns, lengths


def drawn(
    share: _Floats, first: _Ints, stop: _Ints, samples: _Floats, ips: NDArray[np.uint64], times: NDArray[np.uint64]
) -> tuple[_Ints, _Ints, _Floats]:
    """Draws candidates for rows: as many as a row has samples, and at least 1, but not more than _MOST_DRAWN.

    Args:
        share: float64[n], of all pairs' candidates, those of a pair together; the shares of a pair add up to 1.
        first: int64[rows], the first candidate of the row's pair.
        stop: int64[rows], the one behind the last.
        samples: float64[rows].
        ips: uint64[rows], bytes; with `times`, which candidates are drawn depends on these.
        times: uint64[rows], ns, of the read.

    Returns:
        The drawn candidates: their rows, ascending, their indices, and the part of the row's samples that each gets.
    """
    number = np.clip(samples, 1, _MOST_DRAWN).astype(np.int64)
    row = np.repeat(np.arange(len(number)), number)
    turn = times * np.uint64(R3_MULTIPLIERS[0]) + (ips >> np.uint64(3)) * np.uint64(R3_MULTIPLIERS[1])
    phase = (turn >> np.uint64(11)) * 2.0**-53
    mark = np.arange(len(row)) - (np.cumsum(number) - number)[row]
    reach = np.cumsum(share)
    position = (reach - share)[first][row] + (mark + phase[row]) / number[row]
    candidate = np.searchsorted(reach, position, side="right")
    return row, np.clip(candidate, first[row], stop[row] - 1), 1 / number[row]


MAX_INTERVALS = 1 << 20
_COMPACT_ROWS = 1 << 19
_MAX_RECORDS_AT_ONCE = 1 << 20
_MOST_NUMBERED = 1 << 18  # records whose new addresses become known together
_MASK = np.uint64(ADDRESS_MASK)
_MAX_SHARED_ROWS = 1 << 18  # (record, candidate) rows at once, for records with several candidates
_MAX_SLOTS = 1 << 21  # of a tally before it is flushed; about 88 bytes each


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
        by_time_ns: int | None = None,
        reasons: Sequence[str] = FIRST_REASONS,
        energy: EnergyOfReads | None = None,
        seen: Seen | None = None,
        count: Callable[[int], None] = lambda candidates: None,
    ) -> None:
        """Prepares the join.

        Args:
            placed: kernels and launches. The join adds sites to it for stalls without a launch.
            start_ns: when interval 0 starts, CLOCK_MONOTONIC ns.
            interval_ns: length of an interval; 0: a single interval.
            rule: how stalls are joined to launches.
            starts: by placement: the offsets in bytes at which its instructions start, to tell processes apart.
            by_time_ns: length of the intervals by which samples are counted once more, all addresses of a cell at one
                of them; 0: a single interval; None: not at all. For time lines, where a row for each instruction in
                each of many intervals would be too many.
            reasons: the reasons to count, as `reasons_of` returns them.
            energy: the energy of reads, which their samples share; None: not known.
            seen: gets when samples of each site were seen; None: nobody asks.
            count: see `Candidates`.
        """
        self._seen, self._count = seen, count
        self._by_time_ns, self._reasons, self._energy = by_time_ns, reasons, energy
        self._placed, self._rule, self._starts = placed, rule, starts or {}
        self._start_ns, self._interval_ns = start_ns, interval_ns
        self._unknown = placed.add_site(Site(None, 0, "", 0))
        self._ip_spaces: dict[tuple[int, int], _IpSpace] = {}
        self.beside_others = 0
        """The number of records in reads during which processes without kernels had jobs on a GPU."""
        self._results, self._results_by_time = _Results(len(reasons)), _Results(len(reasons))

    def add(self, table: pa.Table, known: list[Stream], row_filter: RowFilter = RowFilter()) -> int:
        """Joins one row group.

        Args:
            table: rows of samples.
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
            words, lengths = flatten_words(rows, known[stream].layout)
            records += int(lengths.sum())
            ends = rows["time_ns"].to_numpy()
            if (jobs := self._placed.jobs) is not None:
                self.beside_others += int(lengths[jobs.others.overlap(rows["begin_ns"].to_numpy(), ends)].sum())
            intervals = intervals_of(ends, self._start_ns, self._interval_ns)
            moments = intervals_of(ends, self._start_ns, self._by_time_ns or 0)
            reads = _Reads(rows["begin_ns"].to_numpy(), ends, intervals, moments, lengths)
            until = np.cumsum(lengths)
            for some in batches(lengths, _MAX_RECORDS_AT_ONCE):
                within = slice(int(until[some.start] - lengths[some.start]), int(until[some.stop - 1]))
                if within.start < within.stop:
                    self._join(known[stream], reads.only(some), [word[within] for word in words])
        return records

    def joined_shares(self) -> JoinedShares:
        """Returns the sums of all row groups added so far, as shares of samples."""
        for space in self._ip_spaces.values():
            for stream in space.sums:
                self._flush(space, stream)
        return self._results.merged()

    def shares_by_time(self) -> JoinedShares | None:
        """Returns the sums by time of all row groups added so far; None if nobody asked for them."""
        return None if self._by_time_ns is None else self._results_by_time.merged()

    def cut_addresses(self) -> int:
        """Returns the number of addresses in so many kernels that only some of these were looked at."""
        return sum(space.cut_addresses() for space in self._ip_spaces.values())

    def _join(self, stream: Stream, reads: _Reads, words: list[NDArray[np.uint64]]) -> None:
        """Joins a batch of reads of one stream."""
        space, fields, packed = self._ip_space(stream), stream.layout.fields, stream.layout.packed(words)
        numbers = space.numbers(fields, packed[0], reads.lengths)
        # The candidates are found once for each distinct (read, cell).
        found = ReadCells(numbers, reads.lengths, len(space.cell_addresses.count))
        try:
            shares = space.candidates.weigh(
                found.cell, reads.begins[found.read], reads.ends[found.read], len(reads.lengths) > 1, stream.index
            )
        except TooManyAtOnce:
            middle = len(reads.lengths) // 2
            record = int(reads.lengths[:middle].sum())
            for half, records in ((slice(middle), slice(record)), (slice(middle, None), slice(record, None))):
                self._join(stream, reads.only(half), [word[records] for word in words])
            return
        pairs = _Pairs(found.read, found.cell, shares)
        sums = self._sums(space, stream, len(numbers))
        divided, group = self._to_divide(pairs, reads)
        whole, several = np.flatnonzero(group < 0), np.flatnonzero(group >= 0)
        candidate = pairs.first[whole]
        first_slot = np.zeros(len(group), np.int64)
        first_slot[whole] = sums.blocks(
            reads.intervals[found.read[whole]],
            found.cell[whole],
            shares.site[candidate] << 1 | shares.alone[whole],
            space.cell_addresses.count[found.cell[whole]],
        )
        # The samples that are to be divided go to spare slots.
        places = space.cell_addresses.count[divided.cell]
        first_place = np.cumsum(places) - places
        first_slot[several] = sums.slots + first_place[group[several]]
        spare, used = int(places.sum()), None
        if spare > _MAX_SLOTS_PER_RECORD * len(numbers):  # only those that are used
            slots = found.of_records(first_slot)
            there = np.flatnonzero(slots >= sums.slots)
            used, number = numbered(slots[there] - sums.slots)
            slots[there], spare = sums.slots + number, len(used)
            add(fields, packed, slots, sums.with_spare(spare))
        else:
            found.add(fields, packed, first_slot, sums.with_spare(spare))
        place, values = sums.take_spare(spare)
        place = place if used is None else used[place]
        counts = self._by_reason(stream, values)
        pair = np.searchsorted(first_place, place, side="right") - 1
        self._divide(stream, reads, divided, pair, place - first_place[pair], counts)
        if self._by_time_ns is not None or self._seen is not None:
            columns, type_ = sum_columns(fields)
            by_pair = np.zeros((len(group), columns), type_)
            found.add(fields, packed, np.arange(len(group)), by_pair, places=False)
            of_pairs = self._by_reason(stream, by_pair)
            if self._seen is not None:
                _see(self._seen, stream, reads, pairs, of_pairs)
            if self._by_time_ns is not None:
                self._divide_by_time(stream, reads, pairs, of_pairs)
        if sums.slots > _MAX_SLOTS or space.tally(stream, len(self._reasons) + 2).slots > _MAX_SLOTS:
            self._flush(space, stream)

    def _sums(self, space: _IpSpace, stream: Stream, records: int) -> Tally:
        """Returns the sums of undivided samples of a stream, with room for so many more records.

        Raises:
            CaptureError: there is not so much room.
        """
        columns, type_ = sum_columns(stream.layout.fields)
        sums = space.sums.setdefault(stream, Tally(columns, type_))
        most = _LARGEST_NARROW if type_ is np.uint32 else _LARGEST_WIDE
        if records > (room := space.room.get(stream, most // stream.layout.most)):
            room = (most - sums.largest()) // stream.layout.most
        if records > room:
            self._flush(space, stream)
            room = most // stream.layout.most
        if records > room:
            raise CaptureError(f"the capture has a read of {records:,} records, more than a GPU has room for")
        space.room[stream] = room - records
        return sums

    def _by_reason(self, stream: Stream, sums: NDArray[Any]) -> list[_Floats]:
        """Returns rows of sums, [n, columns of `sum_columns`], by reason: float64[n] each."""
        column = {reason: number for number, reason in enumerate(stream.layout.fields.reasons)}
        return [
            sums[:, column[reason]].astype(np.float64) if reason in column else np.zeros(len(sums))
            for reason in self._reasons
        ]

    def _to_divide(self, pairs: _Pairs, reads: _Reads) -> tuple[_Pairs, NDArray[np.int64]]:
        """Groups the pairs whose samples are added up before they are divided: those that are divided alike.

        Returns:
            One pair of each group, and the number of each pair's group, -1 if it has only one candidate.
        """
        number = np.arange(len(pairs.read))
        if self._energy is not None:  # of each read, by its samples
            return pairs, number
        count = np.diff(pairs.first)
        few, many = np.flatnonzero((count > 1) & (count <= MOST_CANDIDATES)), np.flatnonzero(count > MOST_CANDIDATES)
        one, group = alike(pairs.cell, reads.intervals[pairs.read], pairs.shares, pairs.first, few)
        number[:] = -1
        number[few], number[many] = group, len(one) + np.arange(len(many))
        return pairs.only(np.append(one, many)), number

    def _divide(
        self,
        stream: Stream,
        reads: _Reads,
        pairs: _Pairs,
        pair_of: NDArray[np.int64],
        place: NDArray[np.int64],
        counts: list[NDArray[np.float64]],
    ) -> None:
        """Divides samples among the candidates of their pairs.

        Args:
            stream: the reads' stream.
            reads: the reads.
            pairs: each for itself, or for a group.
            pair_of: int64[n], the pair of each sum, ascending.
            place: int64[n], the number of its address within its cell.
            counts: float64[n] for each reason, the sums.
        """
        space, shares, first = self._ip_space(stream), pairs.shares, pairs.first
        joules = np.zeros(len(pair_of))
        if self._energy is not None:
            energy = self._energy.of_reads(stream.index, reads.ends)
            joules = joules_of_rows(energy, pairs.read[pair_of], counts)
        is_crowd = np.diff(first) > MOST_CANDIDATES
        if is_crowd.any():
            rows = np.flatnonzero(is_crowd[pair_of])
            cells = pairs.cell[pair_of[rows]]
            of_crowds = _Rows(
                pair_of[rows],
                pairs.read[pair_of[rows]],
                space.ips[space.cell_addresses.numbers(cells, place[rows])],
                [each[rows] for each in counts],
                joules[rows],
            )
            self._draw(stream, reads.ends, of_crowds, reads.intervals, pairs, self._results)
            rows = np.flatnonzero(~is_crowd[pair_of])
            pair_of, place, joules = pair_of[rows], place[rows], joules[rows]
            counts = [each[rows] for each in counts]
            shares = shares.only(~is_crowd[shares.pair])
            first = np.searchsorted(shares.pair, np.arange(len(pairs.read) + 1))
        tally, subsample = space.tally(stream, len(self._reasons) + 2), float(stream.subsample)
        cell_of_share = pairs.cell[shares.pair]
        blocks = tally.blocks(
            reads.intervals[pairs.read[shares.pair]],
            cell_of_share,
            shares.site,
            space.cell_addresses.count[cell_of_share],
        )
        # The first candidate of each pair ...
        entry = first[pair_of]
        alone = _add_shares(tally, blocks[entry] + place, shares.share[entry] * subsample, counts)
        tally.add(len(counts), blocks[entry] + place, alone * shares.alone[pair_of])
        if self._energy is not None:  # at the first candidate: `to_whole_counts` divides it
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

    def _divide_by_time(self, stream: Stream, reads: _Reads, pairs: _Pairs, counts: list[NDArray[np.float64]]) -> None:
        """Divides the samples of pairs, float64[pairs] for each reason, whatever their addresses."""
        space, shares, count = self._ip_space(stream), pairs.shares, np.diff(pairs.first)
        joules = np.zeros(len(count))
        if self._energy is not None:
            joules = joules_of_rows(self._energy.of_reads(stream.index, reads.ends), pairs.read, counts)
        crowds = np.flatnonzero(count > MOST_CANDIDATES)
        if len(crowds):
            rows = _Rows(
                crowds,
                pairs.read[crowds],
                space.first_ips[pairs.cell[crowds]],
                [each[crowds] for each in counts],
                joules[crowds],
            )
            self._draw(stream, reads.ends, rows, reads.moments, pairs, self._results_by_time)
        entry = np.flatnonzero(count[shares.pair] <= MOST_CANDIDATES)
        pair, share = shares.pair[entry], shares.share[entry] * float(stream.subsample)
        values = np.zeros((len(counts) + 2, len(entry)))
        for column, each in enumerate(counts):
            np.multiply(each[pair], share, out=values[column])
        is_first = entry == pairs.first[pair]
        values[-2] = values[:-2].sum(axis=0) * (shares.alone[pair] & is_first)
        values[-1] = joules[pair] * is_first  # at the first candidate: `to_whole_counts` divides it
        streams, ips = np.full(len(entry), stream.index), space.first_ips[pairs.cell[pair]]
        moments = reads.moments[pairs.read[pair]]
        self._results_by_time.keep(JoinedShares(moments, streams, shares.site[entry], ips, values))

    def _draw(
        self,
        stream: Stream,
        times: NDArray[np.uint64],
        rows: _Rows,
        intervals: NDArray[np.int64],
        pairs: _Pairs,
        into: _Results,
    ) -> None:
        """Divides the samples of rows, which have very many candidates, among some of these.

        Args:
            stream: the reads' stream.
            times: uint64[reads], ns.
            rows: the samples, by pair and address.
            intervals: int64[reads].
            pairs: the pairs of the rows.
            into: gets the shares.
        """
        shares, first = pairs.shares, pairs.first
        row, entry, part = drawn(
            shares.share,
            first[rows.pair],
            first[rows.pair + 1],
            np.sum(rows.counts, axis=0),
            rows.ip,
            times[rows.read],
        )
        for some in batches(np.ones(len(row), np.int64), _MAX_SHARED_ROWS):
            here, share = row[some], part[some]
            values = np.zeros((len(rows.counts) + 2, len(here)))
            for column, counts in enumerate(rows.counts):
                values[column] = counts[here] * share * stream.subsample
            values[-1] = rows.joules[here] * share
            found = (
                intervals[rows.read[here]],
                np.full(len(here), stream.index),
                shares.site[entry[some]],
                rows.ip[here],
            )
            into.keep(merge_shares([JoinedShares(*found, values)]))

    def _ip_space(self, stream: Stream) -> _IpSpace:
        key = stream.layout.address_mask, stream.layout.unit_bits
        if key not in self._ip_spaces:
            cells = Cells(self._placed, stream.layout.address_mask, self._starts)
            candidates = Candidates(self._placed, cells, self._rule, self._unknown, self._count)
            self._ip_spaces[key] = _IpSpace(cells, candidates, stream.layout.unit_bits)
            return_free_memory()
        return self._ip_spaces[key]

    def _flush(self, space: _IpSpace, stream: Stream) -> None:
        """Moves a stream's sums to the results and empties its tallies."""
        columns, number = len(self._reasons) + 2, stream.index
        sums = space.sums[stream].take(space.cell_addresses)
        values = np.zeros((columns, len(sums.site)))
        for column, counts in enumerate(self._by_reason(stream, sums.values)):
            np.multiply(counts, float(stream.subsample), out=values[column])
        values[-2] = values[:-2].sum(axis=0) * (sums.site & 1)
        streams, ips = np.full(len(sums.site), number), space.ips[sums.address]
        self._results.keep(JoinedShares(sums.interval, streams, sums.site >> 1, ips, values))
        sums = space.tally(stream, columns).take(space.cell_addresses)
        streams, ips = np.full(len(sums.site), number), space.ips[sums.address]
        self._results.keep(JoinedShares(sums.interval, streams, sums.site, ips, sums.values.T.copy()))


class _Results:
    """Shares that are merged now and then."""

    def __init__(self, reasons: int) -> None:
        none = np.empty(0, np.int64)
        empty = JoinedShares(none, none, none, np.empty(0, np.uint64), np.empty((reasons + 2, 0)))
        self._found = [empty]
        self._rows, self._merge_at = 0, _COMPACT_ROWS

    def keep(self, result: JoinedShares) -> None:
        """Appends a result, and merges all when they have doubled."""
        self._found.append(result)
        self._rows += len(result.ip)
        if self._rows > self._merge_at:
            self._rows = len(self.merged().ip)
            self._merge_at = max(_COMPACT_ROWS, 2 * self._rows)

    def merged(self) -> JoinedShares:
        """Merges all results."""
        self._found = [merge_shares(self._found)]
        return self._found[0]


@dataclass(frozen=True)
class _Reads:
    """Reads of one stream."""

    begins: NDArray[np.uint64]  # [n], ns; no record was sampled before
    ends: NDArray[np.uint64]  # [n], ns
    intervals: NDArray[np.int64]  # [n]
    moments: NDArray[np.int64]  # [n], the intervals of sums by time
    lengths: NDArray[np.int64]  # [n], records

    def only(self, some: slice) -> _Reads:
        """Returns a slice of the reads."""
        return _Reads(*(getattr(self, each.name)[some] for each in fields(self)))


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a read and a cell of addresses, or one pair of each group of pairs that are divided in the same way."""

    read: NDArray[np.int64]  # [n]
    cell: NDArray[np.int64]  # [n]
    shares: Shares

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """int64[n + 1]: each pair's first share."""
        return np.searchsorted(self.shares.pair, np.arange(len(self.read) + 1))

    def only(self, pairs: NDArray[np.int64]) -> _Pairs:
        """Returns the pairs with these numbers."""
        count = np.diff(self.first)[pairs]
        entries = ranges(self.first[pairs], count)
        shares = self.shares
        pair = np.repeat(np.arange(len(pairs)), count)
        kept = Shares(pair, shares.site[entries], shares.share[entries], shares.alone[pairs])
        return _Pairs(self.read[pairs], self.cell[pairs], kept)


@dataclass(frozen=True)
class _Rows:
    """Samples of one stream, by (read, cell) pair and address."""

    pair: NDArray[np.int64]  # [n]
    read: NDArray[np.int64]  # [n], index of the pair's read
    ip: NDArray[np.uint64]  # [n], bytes
    counts: list[NDArray[np.float64]]  # [n] for each reason
    joules: NDArray[np.float64]  # [n]


class _IpSpace:
    """Addresses, cells, candidates and sums for all streams whose records hold the same bits of addresses."""

    def __init__(self, cells: Cells, candidates: Candidates, unit_bits: int) -> None:
        self.candidates = candidates
        self.cell_addresses = CellAddresses()
        self.sums: dict[Stream, Tally] = {}
        """Sums of samples that have only one candidate, in rows as `sum_columns` says.

        A slot's site is twice the number of its site, and one more if the site is all that launched the kernel."""
        self.room: dict[Stream, int] = {}
        """How many more records have room in these."""
        self._tallies: dict[Stream, Tally] = {}
        self._cells = cells
        self._addresses = Addresses(unit_bits)
        self.first_ips = np.empty(0, np.uint64)
        """uint64[cells]: the first address of each that was seen."""

    @property
    def ips(self) -> NDArray[np.uint64]:
        """uint64[numbers]: the address that has each number."""
        return self._addresses.ips

    def numbers(self, where: Fields, words: NDArray[np.uint64], lengths: _Ints) -> _Ints:
        """Returns the number of each record's address, see records.py: int64[n].

        Args:
            where: says where records have their addresses.
            words: uint64[n], the first words of records.
            lengths: int64[reads], the number of records of each.
        """
        numbers = np.empty(len(words), np.int64)
        if not self._addresses.find(words, where, numbers):
            return numbers
        until = np.cumsum(lengths)
        # How many addresses become known at once decides which cells are cut, and which address stands for a cell.
        for some in batches(lengths, _MOST_NUMBERED):
            within = slice(int(until[some.start] - lengths[some.start]), int(until[some.stop - 1]))
            unknown = within.start + np.flatnonzero(numbers[within] < 0)
            if len(unknown):
                new, found = words[unknown], np.empty(len(unknown), np.int64)
                ips = (new & np.uint64(where.address_mask)) << np.uint64(where.address_shift) & _MASK
                self._add_cells(self._addresses.add(ips))
                self._addresses.find(new, where, found)
                numbers[unknown] = found
        return numbers

    def _add_cells(self, new: NDArray[np.uint64]) -> None:
        """Finds the cells of addresses that are new: uint64[n], bytes."""
        cells = self._cells.cells_of(new)
        before = len(self.first_ips)
        known = len(self._cells.members) - before
        self.first_ips = np.append(self.first_ips, np.zeros(known, np.uint64))
        distinct, first = np.unique(cells, return_index=True)
        unseen = distinct >= before
        unseen[~unseen] = self.cell_addresses.count[distinct[~unseen]] == 0
        self.first_ips[distinct[unseen]] = new[first[unseen]]
        places = self.cell_addresses.add(cells, len(self._cells.members))
        self._addresses.set_last(cells << PLACE_BITS | places)

    def cut_addresses(self) -> int:
        """Returns the number of addresses in cells that lack some of their placements."""
        return int(self.cell_addresses.count[sorted(self._cells.cut)].sum())

    def tally(self, stream: Stream, columns: int) -> Tally:
        """Returns the stream's sums of shares."""
        return self._tallies.setdefault(stream, Tally(columns))


def _see(seen: Seen, stream: Stream, reads: _Reads, pairs: _Pairs, counts: list[NDArray[np.float64]]) -> None:
    """Tells when the samples of pairs, float64[pairs] for each reason, were seen at each of their sites."""
    shares, read = pairs.shares, pairs.read[pairs.shares.pair]
    samples = seen.samples(counts)[shares.pair]
    samples *= shares.share * stream.subsample
    seen.add(stream.index, shares.site, reads.begins[read], reads.ends[read], samples)


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
