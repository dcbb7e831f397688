"""Arrows from the sends of collectives to their receives, and a slice for what a collective takes of each rank."""

from __future__ import annotations

import numpy as np

from iaprof.timelines.grouped import Groups
from iaprof.timelines.intervals import ends
from iaprof.timelines.made_events import Ends, add_arrows, largest_id
from iaprof.timelines.options import Options
from iaprof.timelines.stages.collectives.events import RECEIVED, TO_ONE, events_of, peers_of
from iaprof.timelines.trace import NO_TEXT, Trace

STAGE = "FLOW"
LEAST_ID = 1_000_000
BEFORE_END_NS = 1


def add_collective_flows(trace: Trace, options: Options) -> None:
    """Adds an arrow from each send to the end of its receive, in instances of collectives that are complete."""
    events = events_of(trace)
    complete = events.is_complete[events.instance] if len(events.row) else np.zeros(0, bool)
    if left_out := int((events.is_known & ~events.is_complete).sum()):
        sentence = f"{left_out} of {int(events.is_known.sum())} collectives lack transfers, so they get no arrows"
        trace.messages.warn(STAGE, sentence)
    texts, slices = trace.texts, events.slices
    with_sync = complete & (events.sync != NO_TEXT)
    sends = np.flatnonzero(with_sync & texts.matches(slices.type, TO_ONE))
    own, peers = peers_of(trace, slices.peers[sends])
    sends = sends[own]
    receives = np.flatnonzero(with_sync & texts.matches(slices.type, RECEIVED))

    both = np.append(receives, sends)
    ranks = np.append(slices.pid[receives], peers)
    partners = Groups(events.instance[both], events.sync[both], ranks)
    receive = np.full(len(partners), -1, np.int64)
    receive[partners.numbers[: len(receives)][::-1]] = receives[::-1]  # the first of several
    target = receive[partners.numbers[len(receives) :]]
    sends, target = sends[target >= 0], target[target >= 0]
    order = np.lexsort((slices.start[sends], events.instance[sends]))
    sends, target = sends[order], target[order]

    sources, targets = slices.take(sends), slices.take(target)
    until = ends(targets) - BEFORE_END_NS
    add_arrows(
        trace,
        "sends to receives",
        Ends(sources.file, sources.pid, sources.tid, sources.start),
        Ends(targets.file, targets.pid, targets.tid, until),
        events.sync[sends],
        sources.group,
        max(LEAST_ID, largest_id(trace)),
    )
    backward = sources.start - until
    late = Groups(sources.pid[backward > 0], targets.pid[backward > 0])
    rows = zip(
        late.key(sources.pid[backward > 0]).tolist(), late.key(targets.pid[backward > 0]).tolist(),
        late.counts.tolist(), (late.max(backward[backward > 0]) / 1000).tolist(), strict=True,
    )  # fmt: skip
    for source, receiver, count, most in rows:
        trace.messages.warn(
            STAGE,
            f"{count} receives of rank {receiver} end before rank {source} sends, by up to {most:.3f} us:"
            " are the ranks' clocks aligned?",
        )
