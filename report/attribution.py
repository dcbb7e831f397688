"""Joining stalls to launches: for each read of stalls and each kernel, who launched it.

A record says no more than an address, and a read no more than when it was made. The rule here: of the kernels that
contain the address, the one that was launched last before the read ended, and the place that launched it. What no
kernel contains, or no launch explains, is kept and labelled. docs/attribution.md describes the rule and its limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture import CaptureError, CaptureReader
from iaprof.formats.stalls import REASONS, Layout
from iaprof.report.placements import ADDRESS_MASK, Placed, Site
from iaprof.symbols.layers import Layers

MAX_INTERVALS = 1 << 20
MAX_SUBSAMPLE = 1 << 30
_LAYOUTS = {layout.value: layout for layout in Layout}
_COMPACT_ROWS = 1 << 21


@dataclass(frozen=True)
class Stream:
    """What a capture's header says of one stream."""

    index: int
    layout: Layout
    ip_version: tuple[int, int]
    subsample: int = 1  # each record stands for so many


@dataclass(frozen=True)
class Joined:
    """Distinct (interval, stream, site, address) and their counts, sorted in that order."""

    interval: NDArray[np.int64]  # [n]
    stream: NDArray[np.int64]  # [n]
    site: NDArray[np.int64]  # [n], index into Placed.sites
    ip: NDArray[np.uint64]  # [n], bytes; as much of the address as the records hold
    counts: NDArray[np.uint64]  # [n, 10], in the order of REASONS


def streams(header: dict[str, object]) -> list[Stream]:
    """The streams of a capture.

    Raises:
        CaptureError: the header is not what a recorder writes.
    """
    found = header.get("streams")
    result = []
    for index, entry in enumerate(found if isinstance(found, list) else []):
        match entry:
            case {"ip_version": [int(major), int(minor), *_], "layout": str(name)} if name in _LAYOUTS:
                kept = entry.get("subsample", 1)
                if type(kept) is not int or not 1 <= kept <= MAX_SUBSAMPLE:
                    raise CaptureError(f"the capture's header says nonsense of how stream {index} was subsampled")
                result.append(Stream(index, _LAYOUTS[name], (major, minor), kept))
            case _:
                raise CaptureError(f"the capture's header describes stream {index} in a way that makes no sense")
    return result


class Attribution:
    """Joins the stalls of one capture, row group by row group."""

    def __init__(self, placed: Placed, start_ns: int, interval_ns: int = 0) -> None:
        """Prepares the search for kernels by address.

        Args:
            placed: kernels and launches. A site for what is in no kernel is added to it.
            start_ns: when interval 0 starts, CLOCK_MONOTONIC ns.
            interval_ns: length of an interval; 0 for all stalls in one.
        """
        self._placed = placed
        self._start_ns, self._interval_ns = start_ns, interval_ns
        self._unknown = placed.add_site(Site(None, 0, "", 0, ""))
        self._owners: dict[int, _Owners] = {}
        self._parts: list[Joined] = []
        self._rows = 0
        self._compact_at = _COMPACT_ROWS

    def add(self, table: pa.Table, known: list[Stream]) -> int:
        """Joins one row group of `stall` rows (columns time_ns, stream, w0, w1, w2).

        Returns:
            How many records it had.

        Raises:
            CaptureError: its columns do not fit together.
        """
        records = 0
        stream_of = table["stream"].to_numpy()
        present = np.unique(stream_of)
        for stream in present.tolist():
            if stream >= len(known):
                raise CaptureError("the capture has stalls of a stream that its header does not name")
            rows = table.filter(pa.array(stream_of == stream)) if len(present) > 1 else table
            words, lengths = _flat(rows, known[stream].layout.words)
            records += int(lengths.sum())
            self._join(known[stream], rows["time_ns"].to_numpy(), lengths, words)
        if self._rows > self._compact_at:
            self._compact()
            self._compact_at = max(_COMPACT_ROWS, 2 * self._rows)
        return records

    def result(self) -> Joined:
        """All that was added."""
        self._compact()
        return self._parts[0]

    def _join(
        self, stream: Stream, times: NDArray[np.uint64], lengths: NDArray[np.int64], words: list[NDArray[np.uint64]]
    ) -> None:
        if not len(words[0]):
            return
        ips, ip_of = _encoded(stream.layout.ips(words) & np.uint64(ADDRESS_MASK))
        if stream.layout.ip_bits not in self._owners:
            self._owners[stream.layout.ip_bits] = _Owners(self._placed, stream.layout.address_mask, self._unknown)
        owners = self._owners[stream.layout.ip_bits]
        pieces, piece_of_ip = np.unique(owners.layers.pieces(ips), return_inverse=True)
        read_of = np.repeat(np.arange(len(times)), lengths)
        # Each read and piece that come together are looked up once.
        pairs, pair_of = _encoded(read_of * len(pieces) + piece_of_ip.reshape(-1)[ip_of])
        read, piece = np.divmod(pairs, len(pieces))
        sites, site_of = np.unique(owners.at(pieces[piece], times[read]), return_inverse=True)
        intervals, interval_of = np.unique(self._intervals(times), return_inverse=True)
        groups, group_of = _encoded(interval_of.reshape(-1)[read] * len(sites) + site_of.reshape(-1))
        keys, row_of = _encoded(group_of[pair_of] * len(ips) + ip_of)
        counts = np.stack(
            [np.bincount(row_of, stream.layout.counts(words, reason), len(keys)) for reason in REASONS], axis=1
        ).astype(np.uint64) * np.uint64(stream.subsample)
        group, ip = np.divmod(keys, len(ips))
        interval, site = np.divmod(groups[group], len(sites))
        self._parts.append(Joined(intervals[interval], np.full(len(keys), stream.index), sites[site], ips[ip], counts))
        self._rows += len(keys)

    def _intervals(self, times: NDArray[np.uint64]) -> NDArray[np.int64]:
        if not self._interval_ns:
            return np.zeros(len(times), np.int64)
        start = np.uint64(self._start_ns)
        intervals = np.where(times > start, times - start, np.uint64(0)) // np.uint64(self._interval_ns)
        if len(intervals) and intervals.max() >= MAX_INTERVALS:
            raise CaptureError(
                f"the capture's stalls span {intervals.max():,} intervals: choose longer ones with --interval"
            )
        return intervals.astype(np.int64)

    def _compact(self) -> None:
        parts = self._parts
        if not parts:
            empty = np.empty(0, np.int64)
            parts = [Joined(empty, empty, empty, np.empty(0, np.uint64), np.empty((0, len(REASONS)), np.uint64))]
        columns = [np.concatenate([getattr(part, name) for part in parts]) for name in ("interval", "stream", "site")]
        ip = np.concatenate([part.ip for part in parts])
        counts = np.concatenate([part.counts for part in parts])
        order = np.lexsort((ip, columns[2], columns[1], columns[0]))
        interval, stream, site, ip, counts = (a[order] for a in (*columns, ip, counts))
        new = np.ones(len(ip), bool)
        if len(ip):
            new[1:] = np.any([a[1:] != a[:-1] for a in (interval, stream, site, ip)], axis=0)
            counts = np.add.reduceat(counts, np.flatnonzero(new), axis=0)
        self._parts = [Joined(interval[new], stream[new], site[new], ip[new], counts)]
        self._rows = len(ip)


def _flat(rows: pa.Table, words: int) -> tuple[list[NDArray[np.uint64]], NDArray[np.int64]]:
    columns, lengths = [], np.empty(0, np.int64)
    for word in range(words):
        lists = rows[f"w{word}"].combine_chunks()
        if lists.null_count:
            raise CaptureError(f"the capture has stalls without their word {word}")
        here = np.diff(lists.offsets.to_numpy())
        if word and not np.array_equal(here, lengths):
            raise CaptureError("the capture has stalls whose words do not belong together")
        lengths = here.astype(np.int64)
        columns.append(lists.flatten().to_numpy())
    return columns, lengths


def _encoded(keys: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Distinct keys, and which of them each key is."""
    encoded = pa.array(keys).dictionary_encode()
    return encoded.dictionary.to_numpy(), encoded.indices.to_numpy().astype(np.int64)


class _Owners:
    """To which site stalls at an address belong."""

    def __init__(self, placed: Placed, mask: int, unknown: int) -> None:
        self._placed = placed
        self._unknown = unknown
        placements = placed.placements
        starts = np.array([placement.address & mask for placement in placements], np.uint64)
        ends = starts + np.array([max(placement.size, 1) for placement in placements], np.uint64)
        launched = [(index, placed.by_placement[index]) for index in sorted(placed.by_placement)]
        times = np.concatenate([np.empty(0, np.uint64), *(launches.time for _, launches in launched)])
        self._sites = np.concatenate([np.empty(0, np.int64), *(launches.site for _, launches in launched)])
        which = np.repeat(
            np.array([index for index, _ in launched], np.int64), [len(launches.time) for _, launches in launched]
        )
        self.layers = Layers(starts, ends, times, which)
        since = np.array([placed.since[index] for index in range(len(placements))], np.uint64)
        self._compiled = Layers(starts, ends, since, np.arange(len(placements)))

    def at(self, pieces: NDArray[np.int64], times: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The sites of reads that ended at `times` in `pieces` of `layers`: int64[n]."""
        launches = self.layers.last(pieces, times)
        found = self._sites[launches] if len(self._sites) else np.empty(len(pieces), np.int64)
        rest = np.flatnonzero(launches < 0)
        placements, which = np.unique(
            self._compiled.last(pieces[rest], np.full(len(rest), np.iinfo(np.uint64).max)), return_inverse=True
        )
        sites = [self._without_launch(placement) for placement in placements.tolist()]
        found[rest] = np.array(sites, np.int64)[which.reshape(-1)]
        return found

    def _without_launch(self, placement: int) -> int:
        """Where stalls go that no launch came before: to the kernel, with a label instead of a stack."""
        if placement < 0:
            return self._unknown
        placed = self._placed
        if placement not in placed.unlaunched:
            launched_from = placed.sites[placed.by_placement[placement].site[0]]
            site = Site(placement, launched_from.pid, launched_from.comm, 0, "[launched before recording]")
            placed.unlaunched[placement] = placed.add_site(site)
        return placed.unlaunched[placement]


def join(capture: CaptureReader, placed: Placed, start_ns: int, interval_ns: int) -> tuple[Joined, int]:
    """Joins all stalls of a capture.

    Returns:
        The joined stalls, and how many records there were.
    """
    known = streams(capture.header)
    attribution = Attribution(placed, start_ns, interval_ns)
    records = 0
    for table in capture.tables("stall", ("time_ns", "stream", "w0", "w1", "w2")):
        records += attribution.add(table, known)
    return attribution.result(), records
