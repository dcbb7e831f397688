"""Arrows as both formats of traces have them: each start has one end, in the same file."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from iaprof.timelines import registry
from iaprof.timelines.options import Options
from iaprof.timelines.outputs.chrome import write_chrome
from iaprof.timelines.outputs.perfetto import write_perfetto
from iaprof.timelines.trace import Dialect, Trace
from unit.timelines.traces import Event, slice_, trace

Arrow = tuple[list[float], list[float]]  # the times, in us, of the starts and of the ends of an identifier


def in_chrome(of: Trace) -> list[Arrow]:
    output = io.BytesIO()
    write_chrome(of, {}, {}, output)
    found: dict[Any, Arrow] = defaultdict(lambda: ([], []))
    for event in json.loads(output.getvalue())["traceEvents"]:
        if event["ph"] in "sf":
            found[event["id"]]["sf".index(event["ph"])].append(event["ts"])
    return sorted(found.values())


def in_perfetto(of: Trace) -> list[Arrow]:
    output = io.BytesIO()
    write_perfetto(of, {}, output)
    found: dict[int, Arrow] = defaultdict(lambda: ([], []))
    for packet in pb.Trace.FromString(output.getvalue()).packet:
        for place, ids in enumerate((packet.track_event.flow_ids, packet.track_event.terminating_flow_ids)):
            for each in ids:
                found[each][place].append(packet.timestamp / 1000)
    return sorted(found.values())


def launches(pid: int, at: int, id_: int = 9, ends: int = 1, kernels: int = 1) -> list[Event]:
    """A launch of kernels 100 us apart, and its flow, which ends at the first ones of them."""
    common: dict[str, Any] = {"id": id_, "cat": "ac2g", "name": "ac2g"}
    events = [
        slice_("cudaGraphLaunch", at, 20, pid=pid, tid=5, cat="cuda_runtime", correlation=id_),
        {"ph": "s", **common, "pid": pid, "tid": 5, "ts": at},
    ]
    for number in range(kernels):
        time = at + 100 * (number + 1)
        events.append(slice_("mm", time, 50, pid=0, tid=7, cat="kernel", correlation=id_))
        if number < ends:
            events.append({"ph": "f", **common, "pid": 0, "tid": 7, "ts": time, "bp": "e"})
    return events


def finished(*files: list[Event]) -> Trace:
    made = trace(*files, dialect=Dialect.TORCH, ranks=range(len(files)))
    registry.run(made, Options(), [True] * len(registry.STAGES), lambda number, stage: None)
    return made


def test_flows_of_two_ranks_with_one_identifier_do_not_cross() -> None:
    # Given two files that each have flow 9
    made = finished(launches(4000, 1000), launches(5000, 3000))
    # Then each launch has one arrow, to the kernel of its own file
    expected = [([1000], [1100]), ([3000], [3100])]
    assert (in_chrome(made), in_perfetto(made)) == (expected, expected)
    assert not +made.made


def test_asynchronous_events_of_two_files_with_one_identifier_are_two() -> None:
    files = [
        [{"ph": phase, "name": "op", "cat": "x", "id": 7, "pid": pid, "ts": pid} for phase in "be"] for pid in (1, 2)
    ]
    output = io.BytesIO()
    write_chrome(trace(*files), {}, {}, output)
    ids = defaultdict(set)
    for event in json.loads(output.getvalue())["traceEvents"]:
        ids[event["pid"]].add(event["id"])
    assert ids == {1: {7}, 2: {8}}


def test_each_kernel_of_a_graph_has_an_arrow_of_its_own() -> None:
    # Given a launch of three kernels, at two of which its flow ends, as PyTorch writes CUDA graphs
    made = finished(launches(4000, 1000, ends=2, kernels=3))
    # Then there are three arrows
    expected = [([1000], [1100]), ([1000], [1200]), ([1000], [1300])]
    assert (in_chrome(made), in_perfetto(made)) == (expected, expected)


def test_an_identifier_that_comes_again_is_another_arrow() -> None:
    made = finished([*launches(4000, 1000), *launches(4000, 3000)])
    expected = [([1000], [1100]), ([3000], [3100])]
    assert (in_chrome(made), in_perfetto(made)) == (expected, expected)


def test_starts_and_ends_without_their_other_half_are_dropped_and_counted() -> None:
    lone: list[Event] = [
        {"ph": "s", "id": 1, "cat": "ac2g", "name": "ac2g", "pid": 4000, "tid": 5, "ts": 10},
        {"ph": "f", "id": 2, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 20},
        {"ph": "s", "id": 3, "cat": "fwdbwd", "name": "fwdbwd", "pid": 4000, "tid": 5, "ts": 30},
        {"ph": "f", "id": 3, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 40},
    ]
    made = finished([*lone, *launches(4000, 1000)])
    assert (in_chrome(made), in_perfetto(made)) == ([([1000], [1100])],) * 2
    assert made.dropped == {"starts of arrows without an end": 2, "ends of arrows without a start": 2}


def test_flows_between_operators_are_no_launches() -> None:
    # Given a flow between operators that has the number of a launch that has no flow
    between = [
        {"ph": phase, "id": 9, "cat": "fwdbwd", "name": "fwdbwd", "pid": 4000, "tid": 5, "ts": ts}
        for phase, ts in (("s", 10), ("f", 20))
    ]
    launch = [event for event in launches(4000, 1000) if event["ph"] == "X"]
    # Then no arrow leads from it to the kernel
    assert in_chrome(finished([*between, *launch])) == [([10], [20])]
