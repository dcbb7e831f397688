"""Compares the join with a reference implementation in plain Python: loops, exact fractions, one record at a time.

The reference is simple and slow. The small random captures combine everything that makes joining hard: overlapping
kernels, recompilations, processes that end, reused pids, several record layouts, and the largest times.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.schema import KINDS
from iaprof.gpu.intel.generations import LAYOUTS as KNOWN_LAYOUTS
from iaprof.gpu.intel.reasons import REASONS
from iaprof.gpu.intel.records import XE3P
from iaprof.report.gpu.module import GpuKernel, GpuModule
from iaprof.report.join import attribution as attributions
from iaprof.report.join.attribution import Attribution, RowFilter
from iaprof.report.join.candidates import AMBIGUOUS, Method, Rule
from iaprof.report.join.placements import Compilation, Placed, place_kernels
from iaprof.report.join.shares import Joined, JoinedShares, merge_shares, to_whole_counts
from iaprof.report.join.streams import Stream
from thorough import usually
from unit.capturing import launch

LAST, MASK = (1 << 64) - 1, (1 << 48) - 1
FIRST_BITS = {"active": 29, "other": 37, "control": 45, "pipestall": 53, "send": 61, "dist_acc": 69, "sbid": 77,
              "sync": 85, "inst_fetch": 93}  # fmt: skip
XE2_BITS = {**FIRST_BITS, "tdr": 29, "active": 101}
LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "pvc": (FIRST_BITS, 29),
    "xe2": (XE2_BITS, 29),
    "xe3p": ({reason: bit + 32 for reason, bit in XE2_BITS.items()}, 61),
}


class Read(NamedTuple):
    """A read: its times, stream, and records as (address, counts by reason)."""

    begin: int
    end: int
    stream: int
    records: list[tuple[int, dict[str, int]]]


@dataclass
class World:
    """A capture, and the options of the join."""

    streams: list[Stream]
    reads: list[Read]
    launches: list[dict[str, Any]]
    compilations: list[tuple[int, int, list[GpuKernel]]]  # time, pid, kernels
    events: list[dict[str, Any]]
    starts: dict[str, list[int]]  # by kernel's name
    rule: Rule
    scope: list[int] | None
    by_thread: bool
    start_ns: int
    interval_ns: int
    row_filter: RowFilter


@dataclass
class Place:
    """A placement of a kernel, with its launches."""

    pid: int
    address: int
    size: int
    kernel: GpuKernel | None
    name: str
    since: int
    launches: list[tuple[int, tuple[Any, ...]]] = field(default_factory=list)  # (rank in time, site)
    ended: int = LAST

    @property
    def code(self) -> object:
        """Equal for the same code at the same address."""
        return (self.kernel.fingerprint if self.kernel else (self.name, self.size)), self.address

    @property
    def key(self) -> tuple[int, int, str]:
        """Identifies the placement."""
        return self.pid, self.address, self.name if self.kernel else ""


# The rules


def places_of(world: World) -> tuple[list[Place], list[int]]:
    """Returns all placements with their launches, and the time of each launch by rank."""
    versions: dict[tuple[int, int], list[Place]] = defaultdict(list)
    for time, pid, kernels in sorted(world.compilations, key=lambda one: one[0]):
        for kernel in kernels:
            address = kernel.address & MASK
            versions[pid, address].append(Place(pid, address, kernel.size, kernel, kernel.name, time))
    found: dict[tuple[int, int, int], Place] = {}
    launches = sorted(world.launches, key=lambda one: one["time_ns"])
    times = [one["time_ns"] for one in launches]
    for rank, one in enumerate(launches):
        pid, address = one["pid"], one["address"] & MASK
        before = [n for n, version in enumerate(versions[pid, address]) if version.since <= one["time_ns"]]
        number = before[-1] if before else -1
        if number < 0:
            here = found.setdefault((pid, address, -1), Place(pid, address, 0, None, one["name"], 0))
        else:
            here = found.setdefault((pid, address, number), versions[pid, address][number])
        here.size = max(here.size, one["size"])
        other = bool(one["flags"] & 8) or (world.scope is not None and pid not in world.scope)
        stack, comm = (0, "[other process]") if other else (one["stack"], one["comm"])
        note = "" if stack else "[not recorded]" if other else "[no stack]"
        here.launches.append((rank, (here.key, pid, comm, stack, note, one["tid"] if world.by_thread else 0)))
    launched = {(place.pid, place.address) for place in found.values()}
    places = list(found.values())
    places += [place for where, several in versions.items() if where not in launched for place in several]
    for here in places:
        ranks = [times[rank] for rank, _ in here.launches]
        first, last = (min(ranks), max(ranks)) if ranks else (here.since, 0)
        for other_ in places:
            over = here.address < other_.address + max(other_.size, 1) and other_.address < here.address + max(
                here.size, 1
            )
            if other_.pid == here.pid and over and other_.since > here.since and other_.since >= last:
                here.ended = min(here.ended, other_.since)
        here.ended = min(here.ended, process_end(world.events, here.pid, first, last))
    return places, times


def process_end(events: list[dict[str, Any]], pid: int, born: int, last: int) -> int:
    """Returns when the process ended that had this pid at that time."""
    mine = [one for one in events if one["pid"] == pid]
    deaths = [e["time_ns"] for e in mine if e["event"] == "exit" and e["tid"] == pid and e["time_ns"] > born]
    if not deaths:
        return LAST
    died = min(deaths)
    births = [e["time_ns"] for e in mine if e["event"] == "fork" and e["tid"] == pid and e["time_ns"] > died]
    following = min(births, default=LAST)
    end = max(e["time_ns"] for e in mine if e["event"] == "exit" and e["time_ns"] <= following)
    return LAST if last > end else end


def cell_of(world: World, places: list[Place], ip: int, mask: int) -> list[Place]:
    """Returns the placements that an address can belong to."""
    here = [p for p in places if p.address & mask <= ip < (p.address & mask) + max(p.size, 1)]
    if len({p.pid for p in here}) < 2 or len({p.code for p in here}) < 2:
        return here
    fitting = [
        p for p in here if not (p.kernel and p.name in world.starts) or (ip - p.address) & mask in world.starts[p.name]
    ]
    return fitting or here


def shares_of(
    world: World, here: list[Place], times: list[int], begin: int, end: int
) -> dict[tuple[Any, ...], Fraction]:
    """Returns each site's share of a sample."""
    if not here:
        return {("unknown",): Fraction(1)}
    before = {p.key: [(rank, site) for rank, site in p.launches if times[rank] <= end] for p in here}
    weights: list[tuple[Place, tuple[Any, ...], int]] = []
    if world.rule.method is Method.LATEST:
        weights = latest(here, before, ended_last=False)
    else:
        there = [p for p in here if p.since <= end and p.ended >= begin]
        for p in there:
            if before[p.key]:
                youngest = max(times[rank] for rank, _ in before[p.key])
                age = end - youngest
                together = min(begin, max(end - age - age // 2, 0))
                since = max(together, begin - world.rule.window_ns, 0)
                weights += [(p, site, 1) for rank, site in before[p.key] if times[rank] >= since]
        if not weights:
            for pid in {p.pid for p in there}:
                weights += latest([p for p in there if p.pid == pid], before, ended_last=False)
        weights = weights or latest(here, before, ended_last=True)
    if not weights:
        there = [p for p in here if p.since <= end and p.ended >= begin] or here
        for pid in {p.pid for p in there}:
            last = max((p for p in there if p.pid == pid), key=lambda p: (p.since, here.index(p)))
            if last.launches:
                first_comm = min(last.launches, key=lambda one: one[0])[1][2]
                site: tuple[Any, ...] = (last.key, pid, first_comm, 0, "[launched before recording]", 0)
            else:
                site = (last.key, pid, "", 0, "[launch not recorded]", 0)
            weights.append((last, site, 1))
    pids = {p.pid for p, _, _ in weights}
    if len(pids) > 1 and world.rule.method is not Method.LATEST and not world.rule.split_ambiguous:
        codes = {p.code for p, _, _ in weights}
        return {("ambiguous", codes.pop() if len(codes) == 1 else None, len(pids)): Fraction(1)}
    total = sum(weight for _, _, weight in weights)
    shares: dict[tuple[Any, ...], Fraction] = defaultdict(Fraction)
    for p, site, weight in weights:
        shares[("any", p.key) if world.rule.method is Method.NONE else site] += Fraction(weight, total)
    return shares


def latest(
    places: list[Place], before: dict[tuple[int, int, str], list[tuple[int, tuple[Any, ...]]]], *, ended_last: bool
) -> list[tuple[Place, tuple[Any, ...], int]]:
    """Returns the last launch of all, or of the placement that ended last."""
    last = [(p.ended if ended_last else 0, max(before[p.key])[0], n) for n, p in enumerate(places) if before[p.key]]
    if not last:
        return []
    place_ = places[max(last)[2]]
    return [(place_, max(before[place_.key])[1], 1)]


Key = tuple[int, int, int]  # interval, stream, ip


def expected(
    world: World,
) -> tuple[dict[Key, dict[tuple[Any, ...], list[Fraction]]], dict[Key, Counter[tuple[Any, ...]]]]:
    """Returns each site's shares by reason, and the samples with a single candidate site."""
    places, times = places_of(world)
    found: dict[Key, dict[tuple[Any, ...], list[Fraction]]] = defaultdict(dict)
    alone: dict[Key, Counter[tuple[Any, ...]]] = defaultdict(Counter)
    for read in world.reads:
        if not world.row_filter.begin_ns <= read.end <= world.row_filter.end_ns:
            continue
        if world.row_filter.streams is not None and read.stream not in world.row_filter.streams:
            continue
        stream = world.streams[read.stream]
        interval = max(read.end - world.start_ns, 0) // world.interval_ns if world.interval_ns else 0
        for address, counts in read.records:
            mask = MASK if stream.layout is XE3P else (1 << 32) - 1
            ip = address & mask & ~7
            here = cell_of(world, places, ip, mask)
            shares = shares_of(world, here, times, min(read.begin, read.end), read.end)
            if len(shares) == 1:
                alone[interval, read.stream, ip][next(iter(shares))] += sum(counts.values()) * stream.subsample
            for site, share in shares.items():
                columns = found[interval, read.stream, ip].setdefault(site, [Fraction(0)] * len(REASONS))
                for index, reason in enumerate(REASONS):
                    columns[index] += counts.get(reason, 0) * stream.subsample * share
    return found, alone


# The join


def row(world: World, read: Read) -> dict[str, Any]:
    """A `stall` row, as the recorder writes it."""
    layout = world.streams[read.stream].layout
    bits, ip_bits = LAYOUTS[layout.name]
    words: list[list[int]] = [[], [], []]
    for address, counts in read.records:
        value = (address >> 3) & (1 << ip_bits) - 1
        for reason, count in counts.items():
            value |= count << bits[reason]
        for index, word in enumerate(words):
            word.append(value >> 64 * index & LAST)
    w2 = words[2] if layout.words == 3 else None
    return {
        "time_ns": read.end,
        "begin_ns": read.begin,
        "stream": read.stream,
        "w0": words[0],
        "w1": words[1],
        "w2": w2,
    }


def joined(world: World, groups: int) -> tuple[Placed, JoinedShares]:
    """Joins the capture in several row groups; returns shares, before rounding."""
    table = {
        "launch": pa.Table.from_pylist(world.launches, pa.schema(list(KINDS["launch"]))),
        "process": pa.Table.from_pylist(world.events, pa.schema(list(KINDS["process"]))),
        "stall": pa.Table.from_pylist([row(world, read) for read in world.reads], pa.schema(list(KINDS["stall"]))),
    }
    compilations = [Compilation(time, pid, GpuModule(tuple(kernels), ())) for time, pid, kernels in world.compilations]
    placed = place_kernels(table["launch"], compilations, world.scope, table["process"], world.by_thread)
    starts = {
        index: np.array(world.starts[p.name], np.uint64)
        for index, p in enumerate(placed.placements)
        if p.kernel and p.name in world.starts
    }
    own = replace(placed, sites=[*placed.sites])  # a join adds sites
    attribution = Attribution(own, world.start_ns, 0, world.rule, starts, world.interval_ns)
    by_interval = Attribution(placed, world.start_ns, world.interval_ns, world.rule, starts)
    step = -(-len(world.reads) // groups)
    records = 0
    for first in range(0, len(world.reads), step):
        rows = table["stall"].slice(first, step).combine_chunks()
        records += by_interval.add(rows, world.streams, world.row_filter)
        attribution.add(rows, world.streams, world.row_filter)
    wanted = [
        read
        for read in world.reads
        if world.row_filter.begin_ns <= read.end <= world.row_filter.end_ns
        and (world.row_filter.streams is None or read.stream in world.row_filter.streams)
    ]
    assert records == sum(len(read.records) for read in wanted)
    result = merge_shares([by_interval.joined_shares()])
    by_time = attribution.shares_by_time()
    assert by_time is not None
    for one, intervals in ((by_time, 1), (attribution.joined_shares(), 0)):
        wanted_sums = without_addresses(placed, result, intervals)
        near = {key: pytest.approx(sums, rel=1e-9, abs=1e-6) for key, sums in wanted_sums.items()}
        assert without_addresses(own, one, intervals) == near
    return placed, result


def without_addresses(placed: Placed, shares: JoinedShares, intervals: int) -> dict[tuple[Any, ...], list[float]]:
    """Sums by interval, unless `intervals` is 0, stream and site."""
    found: dict[tuple[Any, ...], Any] = defaultdict(lambda: np.zeros(len(shares.shares)))
    columns = (shares.interval * intervals, shares.stream, shares.site)
    for index, (interval, stream, site) in enumerate(zip(*(each.tolist() for each in columns), strict=True)):
        found[interval, stream, told(placed, site)] += shares.shares[:, index]
    return {key: sums.tolist() for key, sums in found.items() if sums.any()}


def told(placed: Placed, index: int) -> tuple[Any, ...]:
    """Returns a site in the form of `shares_of`."""
    site = placed.sites[index]
    p = None if site.placement is None else placed.placements[site.placement]
    if site.note == AMBIGUOUS:
        count = int(site.comm.removeprefix("[ambiguous: ").removesuffix(" processes]"))
        return "ambiguous", ((p.fingerprint or (p.name, p.size)), p.address) if p else None, count
    if p is None:
        return ("unknown",)
    key = (p.pid, p.address, p.name if p.kernel else "")
    if site.note == "[any launch]":
        return "any", key
    return key, site.pid, site.comm, site.stack, site.note, site.tid


def check(world: World, groups: int) -> None:
    """Compares shares, counts and unique samples with the reference."""
    found, alone = expected(world)
    placed, result = joined(world, groups)
    # The shares.
    shares: dict[Key, dict[tuple[Any, ...], list[float]]] = defaultdict(dict)
    columns = zip(
        result.interval.tolist(), result.stream.tolist(), result.ip.tolist(), result.site.tolist(), strict=True
    )
    for index, (interval, stream, ip, site) in enumerate(columns):
        sums = shares[interval, stream, ip].setdefault(told(placed, site), [0.0] * len(REASONS))
        for column in range(len(REASONS)):
            sums[column] += result.shares[column, index]
    some = {key: {s: c for s, c in sites.items() if any(c)} for key, sites in found.items()}
    some = {key: sites for key, sites in some.items() if sites}
    assert {key: set(sites) for key, sites in shares.items()} == {key: set(sites) for key, sites in some.items()}
    for key, sites in some.items():
        for site, exact in sites.items():
            near = [pytest.approx(float(share), rel=1e-9, abs=1e-6) for share in exact]
            assert shares[key][site] == near, (key, site)
    # Whole counts: none is further than 1 from its share, and they add up.
    whole = to_whole_counts(result)
    totals = rounded(whole, result)
    for key, sites in some.items():
        assert totals[key] == [sum(column) for column in zip(*sites.values(), strict=True)]
    # Samples counted as alone have a single candidate site.
    for interval, stream, ip, site, count in zip(
        *(c.tolist() for c in (whole.interval, whole.stream, whole.ip, whole.site, whole.alone)), strict=True
    ):
        assert count <= alone[interval, stream, ip][told(placed, site)]


def rounded(whole: Joined, result: JoinedShares) -> dict[Key, list[int]]:
    """Checks each whole count against its share; returns the sums by (interval, stream, ip)."""
    rows = {
        key: index
        for index, key in enumerate(
            zip(*(c.tolist() for c in (result.interval, result.stream, result.site, result.ip)), strict=True)
        )
    }
    totals: dict[Key, list[int]] = defaultdict(lambda: [0] * len(REASONS))
    columns = (c.tolist() for c in (whole.interval, whole.stream, whole.site, whole.ip, whole.counts))
    seen = set()
    for interval, stream, site, ip, counts in zip(*columns, strict=True):
        seen.add(key := (interval, stream, site, ip))
        assert np.abs(np.array(counts) - result.shares[: len(REASONS), rows[key]]).max() < 1
        totals[interval, stream, ip] = [a + b for a, b in zip(totals[interval, stream, ip], counts, strict=True)]
    for key in rows.keys() - seen:
        assert result.shares[:, rows[key]].max() < 1
    return totals


# Captures


def world_of(rng: random.Random) -> World:
    """A random capture."""
    unit = rng.choice((1, 1000, 10**6, 10**9))
    base = rng.choice((0, 0, 10**9, (1 << 63) - 50 * unit, LAST - 100 * unit))

    odd = rng.choice((0, 0, 0, 0.1))  # the share of times that are the smallest or the largest possible

    def moment() -> int:
        return rng.choice((0, LAST)) if rng.random() < odd else base + rng.randrange(100) * unit

    pids = rng.sample((7, 8, 9, 4_000_000_000), rng.randrange(1, 5))
    windows = rng.choice(((0x8000_0000_0000,), (0xFFFF_8000_0000_0000, 0x8001_0000_0000), (0xFFFF_FF00,), (0,)))

    def address() -> int:
        return (rng.choice(windows) + rng.choice((0, 0, 32, 64, 96, 0x10000))) & LAST

    launches = []
    for _ in range(rng.choice((0, 1, 10, 60))):
        more = {"tid": rng.choice((7, 8)), "comm": rng.choice(("app", "app", "b")), "flags": rng.choice((0, 0, 0, 8))}
        size = rng.choice((0, 16, 64, 64, 64, 200))
        name = rng.choice(("j", "k"))
        launches.append(launch(moment(), rng.choice(pids), address(), rng.randrange(5), size, name=name, **more))
    compilations, starts = [], {}
    for number in range(rng.choice((0, 2, 8))):
        kernels = []
        for index in range(rng.randrange(1, 3)):
            size, print_ = rng.choice((8, 64, 64, 128)), rng.choice(("f", "f", "g"))
            kernels.append(GpuKernel(f"m{number}.{index}", "", address() & MASK, size, size, fingerprint=print_))
            if rng.random() < 0.5:
                starts[kernels[-1].name] = list(range(0, size, rng.choice((8, 16))))
        compilations.append((rng.choice((0, moment())), rng.choice(pids), kernels))
    events = [
        {"time_ns": moment(), "pid": pid, "tid": rng.choice((pid, pid, 3)), "event": rng.choice(("fork", "exit"))}
        for pid in pids
        for _ in range(rng.choice((0, 0, 1, 4)))
    ]
    streams = [
        Stream(index, KNOWN_LAYOUTS[name], (20, 1), rng.choice((1, 1, 3, 1000)))
        for index, name in enumerate(rng.choices(list(LAYOUTS), k=rng.randrange(1, 4)))
    ]
    reads = [a_read(rng, streams, moment, address) for _ in range(rng.choice((1, 8, 25)))]
    scope = rng.choice((None, None, pids[:1]))
    shortest = 10**6 if base or odd else 1
    horizon = max(rng.choice((1_000_000, 500_000_000, 600_000_000_000, 5 * unit, 30 * unit)), shortest)
    rule = Rule(rng.choice((Method.PROPORTIONAL, *Method)), horizon, rng.random() < 0.3)
    start, interval = rng.choice((0, base, base + 50 * unit)), rng.choice((0, 0, 10 * unit))
    interval = interval if not odd and base + 100 * unit - start < 10**6 * max(interval, 1) else 0
    chosen = rng.choice((None, None, frozenset({0})))
    row_filter = (
        RowFilter(streams=chosen) if rng.random() < 0.7 else RowFilter(base + 20 * unit, base + 70 * unit, chosen)
    )
    return World(
        streams,
        reads,
        launches,
        compilations,
        events,
        starts,
        rule,
        scope,
        rng.random() < 0.3,
        start,
        interval,
        row_filter,
    )


def a_read(rng: random.Random, streams: list[Stream], moment: Any, address: Any) -> Read:
    """A read of a random stream."""
    end = moment()
    begin = rng.choice((0, moment(), end, *(min(moment(), end) for _ in range(3))))
    stream = rng.randrange(len(streams))
    bits = LAYOUTS[streams[stream].layout.name][0]
    records = []
    for _ in range(rng.choice((0, 1, 3, 10))):
        reasons = rng.sample(sorted(bits), rng.randrange(1, 4))
        counts = {reason: rng.choice((0, 1, 1, 2, 5, 255)) for reason in reasons}
        where = (address() + 8 * rng.choice((0, 0, 1, 2, 7, 8, 20, -1))) & LAST
        if streams[stream].layout is XE3P:
            where &= (1 << 64) - 1
        records.append((where, counts))
    return Read(begin, end, stream, records)


@pytest.mark.parametrize("block", usually([0, 4], range(8)))
def test_random_captures_are_joined_by_the_rules(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        rng = random.Random(seed)
        world = world_of(rng)
        try:
            check(world, rng.randrange(1, 4))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {world.rule}, {world.row_filter}") from error


@pytest.mark.parametrize("block", usually([1], range(8)))
def test_small_limits_change_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # given spare slots that are always too many, and sums that have hardly room
    monkeypatch.setattr(attributions, "_MAX_SLOTS_PER_RECORD", 0)
    monkeypatch.setattr(attributions, "_MAX_RECORDS_AT_ONCE", 12)
    monkeypatch.setattr(attributions, "_LARGEST_NARROW", 12 * 255)
    monkeypatch.setattr(attributions, "_COMPACT_ROWS", 1)
    for seed in range(1000 + block * 30, 1000 + block * 30 + 30):
        rng = random.Random(seed)
        check(world_of(rng), rng.randrange(1, 4))


def test_a_read_with_more_records_than_sums_have_room_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributions, "_LARGEST_NARROW", 2 * 255)
    stream = Stream(0, KNOWN_LAYOUTS["xe2"], (20, 1))
    world = World(
        [stream], [Read(0, 1, 0, [(64, {"send": 1})] * 3)], [], [], [], {}, Rule(), None, False, 0, 0, RowFilter()
    )
    with pytest.raises(CaptureError, match="a read of 3 records, more than a GPU has room for"):
        joined(world, 1)
    world.reads[0] = Read(0, 1, 0, [(64, {"send": 255})] * 2)
    _, shares = joined(world, 1)
    assert shares.shares[REASONS.index("send")].tolist() == [510]
