"""Joining stalls to launches: for each read of stalls and each kernel, who launched it.

A record says no more than an address, and a read no more than when it was made. The rule here: of the kernels that
contain the address, the one that was launched last before the read ended, and the place that launched it. What no
kernel contains, or no launch explains, is kept and labelled. docs/attribution.md describes the rule and its limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from iaprof.formats.capture import CaptureError, CaptureReader
from iaprof.formats.stalls import REASONS, Layout
from iaprof.report.placements import Placed, Site

_OWNERS_AT_ONCE = 1 << 22  # (reads x kernels) looked up in one go
_COMPACT_ROWS = 1 << 21


@dataclass(frozen=True)
class Stream:
    """What a capture's header says of one stream."""

    index: int
    layout: Layout
    ip_version: tuple[int, int]


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
    try:
        for index, entry in enumerate(found if isinstance(found, list) else []):
            major, minor = (int(number) for number in entry["ip_version"][:2])
            result.append(Stream(index, Layout(entry["layout"]), (major, minor)))
    except (KeyError, TypeError, ValueError) as error:
        raise CaptureError(
            f"the capture's header describes its streams in a way that makes no sense: {error}"
        ) from None
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
        self._segments: dict[int, _Segments] = {}
        self._parts: list[Joined] = []
        self._rows = 0

    def add(self, table: pa.Table, known: list[Stream]) -> int:
        """Joins one row group of `stall` rows (columns time_ns, stream, w0, w1, w2).

        Returns:
            How many records it had.

        Raises:
            CaptureError: its columns do not fit together.
        """
        records = 0
        stream_of = table["stream"].to_numpy()
        for stream in np.unique(stream_of):
            if stream >= len(known):
                raise CaptureError("the capture has stalls of a stream that its header does not name")
            rows = table.filter(pa.array(stream_of == stream)) if len(np.unique(stream_of)) > 1 else table
            times = rows["time_ns"].to_numpy()
            words, lengths = _flat(rows, known[stream].layout.words)
            records += int(lengths.sum())
            self._join(known[stream], times, lengths, words)
        if self._rows > _COMPACT_ROWS:
            self._compact()
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
        encoded = pa.array(stream.layout.ips(words)).dictionary_encode()
        ips = encoded.dictionary.to_numpy()
        ip_of = encoded.indices.to_numpy().astype(np.int64)
        segments = self._segments_of(stream.layout.ip_bits)
        found, segment_of_ip = np.unique(segments.find(ips), return_inverse=True)
        read_of = np.repeat(np.arange(len(times)), lengths)
        owner = np.empty(len(read_of), np.int64)
        for reads in _blocks(len(times), len(found)):
            owners = np.stack([self._owners(segments, int(segment), times[reads]) for segment in found], axis=1)
            first, last = np.searchsorted(read_of, (reads.start, reads.stop))
            inside = slice(first, last)
            owner[inside] = owners[read_of[inside] - reads.start, segment_of_ip.reshape(-1)[ip_of[inside]]]
        interval = np.zeros(len(times), np.int64)
        if self._interval_ns:
            interval = np.maximum(times.astype(np.int64) - self._start_ns, 0) // self._interval_ns
        sites = len(self._placed.sites)
        key = (interval[read_of] * sites + owner) * len(ips) + ip_of
        distinct = pa.array(key).dictionary_encode()
        keys, group = distinct.dictionary.to_numpy(), distinct.indices.to_numpy()
        counts = np.stack(
            [np.bincount(group, stream.layout.counts(words, reason), len(keys)) for reason in REASONS], axis=1
        ).astype(np.uint64)
        rest, ip = np.divmod(keys, len(ips))
        when, site = np.divmod(rest, sites)
        self._parts.append(Joined(when, np.full(len(keys), stream.index), site, ips[ip], counts))
        self._rows += len(keys)

    def _segments_of(self, ip_bits: int) -> _Segments:
        if ip_bits not in self._segments:
            self._segments[ip_bits] = _Segments(self._placed, min((1 << (ip_bits + 3)) - 1, (1 << 48) - 1))
        return self._segments[ip_bits]

    def _owners(self, segments: _Segments, segment: int, times: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The site to which stalls in `segment` belong, for reads that ended at `times`: int64[reads]."""
        if segment < 0:
            return np.full(len(times), self._unknown)
        launched, sites, fallback = segments.launches(segment)
        index = np.searchsorted(launched, times, side="right") - 1
        return np.where(index >= 0, sites[index] if len(sites) else fallback, fallback)

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


def _blocks(reads: int, segments: int) -> Iterator[slice]:
    step = max(1, _OWNERS_AT_ONCE // max(1, segments))
    for start in range(0, reads, step):
        yield slice(start, min(start + step, reads))


class _Segments:
    """The address space cut where any kernel begins or ends; each piece knows the kernels that cover it."""

    def __init__(self, placed: Placed, mask: int) -> None:
        self._placed = placed
        spans = []
        for index, placement in enumerate(placed.placements):
            start = placement.address & mask
            spans.append((start, start + max(placement.size, 1), index))
        bounds = sorted({bound for start, end, _ in spans for bound in (start, end)})
        self._bounds = np.array(bounds, np.uint64)
        self._covering: list[list[int]] = [[] for _ in bounds]
        position = {bound: index for index, bound in enumerate(bounds)}
        for start, end, index in spans:
            for piece in range(position[start], position[end]):
                self._covering[piece].append(index)
        self._launches: dict[int, tuple[NDArray[np.uint64], NDArray[np.int64], int]] = {}

    def find(self, ips: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The piece that each address is in: int64[n]; -1 where no kernel is."""
        if not len(self._bounds):
            return np.full(len(ips), -1, np.int64)
        piece = np.searchsorted(self._bounds, ips, side="right") - 1
        covered = np.array([bool(covering) for covering in self._covering] + [False])
        return np.where((piece >= 0) & covered[piece], piece, -1).astype(np.int64)

    def launches(self, piece: int) -> tuple[NDArray[np.uint64], NDArray[np.int64], int]:
        """Times and sites of all launches of the kernels that cover a piece, and the site when none came before."""
        if piece not in self._launches:
            known = [self._placed.by_placement[i] for i in self._covering[piece] if i in self._placed.by_placement]
            times = np.concatenate([np.empty(0, np.uint64), *(launches.time for launches in known)])
            sites = np.concatenate([np.empty(0, np.int64), *(launches.site for launches in known)])
            order = np.argsort(times, kind="stable")
            self._launches[piece] = times[order], sites[order], self._fallback(self._covering[piece])
        return self._launches[piece]

    def _fallback(self, covering: list[int]) -> int:
        """Where stalls go that no launch came before: to the kernel, with a label instead of a stack."""
        last = max(covering, key=lambda index: self._placed.since[index])
        if last not in self._placed.unlaunched:
            pid = self._placed.placements[last].pid
            comm = next(site.comm for site in self._placed.sites if site.placement == last)
            site = Site(last, pid, comm, 0, "[launched before recording]")
            self._placed.unlaunched[last] = self._placed.add_site(site)
        return self._placed.unlaunched[last]


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
