"""The events of collective operations: what their names, types and peers say, and to which operation each belongs.

Runtimes write [sync=ID] into the names of a transfer's events: those of the sender and of the receiver have the same.
The operations of a group (args.CollGroup) follow each other: an instance ends where the next event begins later than it
and an event of it is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.timelines.grouped import Groups, before
from iaprof.timelines.intervals import ends
from iaprof.timelines.placeholders import placed
from iaprof.timelines.trace import NO_TEXT, Slices, Trace

SYNC = "sync"  # in Slices.extra: the sync of slices that merge_sends has made
SYNC_IN_NAME, ITS_TEXT = r"\[sync=.*\]", r"^.*\[sync=(.*)\].*$"

# Types of events.
TO_ONE = "^SingleCast$|^MultiCast XSEG$"
MULTICAST, SET_RECEIVERS, RECEIVED = "^MultiCast$", "^Set BCList$", "^WDone *Barrier$"
MOST_PEERS = 1 << 16  # ranks in the argument of an event
STALE, LEAST_STALE_NS = 4, 5_000_000_000
"""An instance waits for further events for so many times its length, or for the least time."""


@dataclass(frozen=True)
class Events:
    """The events of collectives in n rows, by group and time."""

    row: NDArray[np.int64]  # in Trace.slices
    slices: Slices  # these rows
    sync: NDArray[np.int32]  # NO_TEXT if its name has none
    instance: NDArray[np.int64]  # from 0 on, those of a group adjacent
    is_complete: NDArray[np.bool_]  # of each instance: it has two transfers or more, and all their events
    is_known: NDArray[np.bool_]  # of each instance: it has a transfer


def sync_of(trace: Trace, slices: Slices) -> NDArray[np.int32]:
    """Returns the codes of the syncs in names, or of those in the names of merged slices; NO_TEXT without one."""
    with_sync = trace.texts.matches(slices.name, SYNC_IN_NAME)
    names = np.where(with_sync, slices.name, NO_TEXT).astype(np.int32)
    found = trace.texts.replaced(names, ITS_TEXT, r"\1")
    return np.where(found == NO_TEXT, slices.extra.get(SYNC, found), found).astype(np.int32)


def peers_of(trace: Trace, codes: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the ranks in texts such as "1" or "0,1,2", and for each the row of its text."""
    distinct, places = np.unique(codes, return_inverse=True)
    lists = [_ranks(trace.texts[code]) if code >= 0 else [] for code in distinct.tolist()]
    counts = np.array([len(each) for each in lists], np.int64)
    flat = np.array([rank for each in lists for rank in each], np.int64)
    firsts = np.cumsum(counts) - counts
    of_row = counts[places] if len(codes) else np.zeros(0, np.int64)
    own = np.repeat(np.arange(len(codes)), of_row)
    inner = np.arange(len(own)) - np.repeat(np.cumsum(of_row) - of_row, of_row)
    return own, flat[np.repeat(firsts[places], of_row) + inner] if len(own) else flat[:0]


def _ranks(text: str) -> list[int]:
    """Returns the ranks in a text; words that are not numbers are ignored."""
    texts = text.strip("[]{} ").split(",", MOST_PEERS)[:MOST_PEERS]
    words = [each.strip(" '\"") for each in texts]
    return [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 10]


def events_of(trace: Trace) -> Events:
    """Returns the events of all groups, and the instance to which each belongs."""
    slices = trace.slices
    rows = np.flatnonzero((slices.group != NO_TEXT) & placed(trace))
    rows = rows[np.lexsort((slices.start[rows], slices.group[rows]))]
    events = slices.take(rows)
    sync = sync_of(trace, events)
    if not len(rows):
        return Events(rows, events, sync, rows, np.zeros(0, bool), np.zeros(0, bool))
    new_group = np.append(True, events.group[1:] != events.group[:-1])
    cluster = np.cumsum(new_group | (events.start > before(ends(events), events.group))) - 1
    instance = _instances(trace, events, sync, cluster)
    state = _states(trace, events, sync, instance)
    return Events(rows, events, sync, instance, state.complete, state.known)


def _instances(trace: Trace, events: Slices, sync: NDArray[np.int32], cluster: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the instance of each event: clusters of events that overlap, some joined with the next ones.

    They are joined until an event is repeated, too much time has passed, or two complete ones follow each other.
    """
    clusters = Groups(cluster)
    group, start, end = clusters.key(events.group), clusters.min(events.start), clusters.max(ends(events))
    complete = _states(trace, events, sync, cluster).complete
    last_with = _last_with_same(events, sync, cluster, len(clusters))
    has_sync = np.zeros(int(group.max()) + 1, bool)
    has_sync[events.group[sync != NO_TEXT]] = True
    places = np.arange(len(clusters))
    new = np.append(True, (group[1:] != group[:-1]) | (complete[1:] & complete[:-1]) | ~has_sync[group[1:]])
    new |= last_with == places - 1
    if not new.all():
        begin, first, until = 0, int(start[0]), int(end[0])
        # Other clusters begin an instance whatever is before them.
        places = np.flatnonzero(~new | np.append(~new[1:], False))
        columns = (places.tolist(), *(each[places].tolist() for each in (new, last_with, start, end)))
        for place, is_new, same, its_start, its_end in zip(*columns, strict=True):
            if is_new or same >= begin or its_start - until > STALE * max(until - first, LEAST_STALE_NS):
                new[place] = True
                begin, first, until = place, its_start, its_end
            until = max(until, its_end)
    return np.asarray((np.cumsum(new) - 1)[cluster], np.int64)


def _last_with_same(
    events: Slices, sync: NDArray[np.int32], cluster: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Returns for each cluster the last one before it in its group that has an equal event; -1 without one."""
    rows = np.flatnonzero(sync != NO_TEXT)
    alike = Groups(*(each[rows] for each in (events.group, sync, events.pid, events.type, events.peers)))
    distinct = Groups(alike.numbers, cluster[rows])
    event, its_cluster = distinct.key(alike.numbers), distinct.key(cluster[rows])
    again = np.flatnonzero(event[1:] == event[:-1])
    last = np.full(count, -1, np.int64)
    np.maximum.at(last, its_cluster[again + 1], its_cluster[again])
    return last


@dataclass(frozen=True)
class _States:
    """States of instances, in n rows."""

    complete: NDArray[np.bool_]  # it has two transfers or more, and all their events
    known: NDArray[np.bool_]  # it has a transfer


def _states(trace: Trace, events: Slices, sync: NDArray[np.int32], instance: NDArray[np.int64]) -> _States:
    texts, count = trace.texts, int(instance[-1]) + 1
    with_sync = np.flatnonzero(sync != NO_TEXT)
    transfers = Groups(instance[with_sync], sync[with_sync])
    if not len(transfers):
        return _States(np.zeros(count, bool), np.zeros(count, bool))
    some = events.take(with_sync)
    own, peers = peers_of(trace, some.peers)
    transfer = np.append(transfers.numbers, transfers.numbers[own])
    partners = np.bincount(Groups(transfer, np.append(some.pid, peers)).key(transfer), minlength=len(transfers))
    peer_counts = np.bincount(own, minlength=len(some))
    sets, multicasts = texts.matches(some.type, SET_RECEIVERS), texts.matches(some.type, MULTICAST)
    opens = transfers.sum(np.where(sets, peer_counts, 0) + multicasts + texts.matches(some.type, TO_ONE))
    received = transfers.sum(texts.matches(some.type, RECEIVED).astype(np.int64))
    is_multicast = transfers.max((sets | multicasts).astype(np.int64)) > 0
    closed = (partners > 1) & (received == partners - 1)
    closed &= np.where(is_multicast, opens == 2 * partners - 1, opens > 0)
    of_instance = transfers.key(instance[with_sync])
    transfers_of = np.bincount(of_instance, minlength=count)
    all_closed = np.bincount(of_instance, weights=closed, minlength=count) == transfers_of
    return _States(all_closed & (transfers_of > 1), transfers_of > 0)
