from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from iaprof.timelines.options import CounterTrack, Options
from iaprof.timelines.registry import STAGES, run
from iaprof.timelines.stages.collectives.balance import calculate_stats_v2, compare_ranks
from iaprof.timelines.stages.collectives.bandwidth import compute_from_calls, compute_from_events
from iaprof.timelines.stages.collectives.calls import add_collective_calls
from iaprof.timelines.stages.collectives.events import events_of, peers_of
from iaprof.timelines.stages.collectives.flows import add_collective_flows
from iaprof.timelines.stages.collectives.sends import merge_sends
from iaprof.timelines.stages.refinement import place_on_devices
from iaprof.timelines.trace import Trace
from thorough import thorough
from unit.timelines.examples import all_reduce, flows, member, names, points
from unit.timelines.traces import Event, slice_, trace

ARROWS = [
    (1000001, "s", 0, 2, 998), (1000001, "f", 1, 3, 1069.999),
    (1000002, "s", 1, 2, 1086), (1000002, "f", 0, 3, 1139.999),
]  # fmt: skip


def repeated(times: int, gap: float) -> Trace:
    """The all-reduce several times, with gaps (us) from one to the next."""
    one = all_reduce()
    files: list[list[Event]] = [[], []]
    slices = one.slices
    for number in range(times):
        for row in range(len(slices)):
            texts = {
                "CollGroup": slices.group, "Type": slices.type, "Peers": slices.peers,
            }  # fmt: skip
            members: dict[str, Any] = {name: one.texts[codes[row]] for name, codes in texts.items() if codes[row] >= 0}
            if slices.bytes[row] > 0:
                members["Bytes"] = int(slices.bytes[row])
            files[slices.file[row]].append(
                slice_(
                    one.texts[slices.name[row]], slices.start[row] / 1000 + number * gap, slices.duration[row] / 1000,
                    [each + int(number * gap * 1000) for each in slices.counters[row].tolist()],
                    pid=int(slices.pid[row]), tid=int(slices.tid[row]), **members,
                )
            )  # fmt: skip
    return trace(*files)


def test_the_slices_of_a_send_become_one() -> None:
    made = all_reduce()
    merge_sends(made, Options())
    rows = [row for row, name in enumerate(names(made)) if name.startswith("SenRdmaSend_73")]
    assert [(names(made)[row], made.slices.start[row], made.slices.duration[row]) for row in rows] == [
        ("SenRdmaSend_73", 1085000, 55000)
    ]
    assert made.texts[made.slices.peers[rows[0]]] == "0"
    assert (int(made.slices.bytes[rows[0]]), len(made.slices)) == (4000, 9)
    assert made.merged == {"slices of a message": 2}


def test_sends_of_ranks_and_files_stay_apart() -> None:
    def send(pid: int, suffix: str) -> Event:
        return slice_(f"SenRdmaSend_5{suffix}", 0, 10, (0, 0, 0, 0, 10000), pid=pid)

    made = trace([send(0, " a"), send(1, " b")], [send(0, " c")], [send(0, " dé"), send(0, " dè")])
    merge_sends(made, Options())
    assert names(made) == ["SenRdmaSend_5 a", "SenRdmaSend_5 b", "SenRdmaSend_5 c", "SenRdmaSend_5 d"]


def test_names_that_have_nothing_in_common() -> None:
    made = trace([slice_("SenRdmaSend_5", 0, 1), slice_("x SenRdmaSend_5", 0, 1), slice_("SenRdma", 0, 1)])
    merge_sends(made, Options())
    assert sorted(names(made)) == ["SenRdma", "SenRdma"]


def test_arrows_from_sends_to_receives() -> None:
    made = all_reduce()
    add_collective_flows(made, Options())
    assert flows(made) == ARROWS
    assert made.messages.said == []
    chosen = made.flows.take(made.flows.id == 1000001)
    assert made.texts.taken(chosen.name).to_pylist() == ["AllReduce_all_reduce_3_s0_r1_0"] * 2
    assert made.texts.taken(chosen.category).to_pylist() == ["AllReduce_all_reduce_3"] * 2


def test_arrows_between_merged_slices() -> None:
    made = all_reduce()
    merge_sends(made, Options())
    add_collective_flows(made, Options())
    # The multicast starts with its first slice now.
    assert flows(made) == [*ARROWS[:2], (1000002, "s", 1, 2, 1085), (1000002, "f", 0, 3, 1139.999)]


def test_arrows_that_go_back_in_time_are_said() -> None:
    made = all_reduce()
    made.slices.start[made.slices.pid == 1] += 200_000
    add_collective_flows(made, Options())
    assert [each.text for each in made.messages.said] == [
        "1 receives of rank 0 end before rank 1 sends, by up to 146.001 us: are the ranks' clocks aligned?"
    ]


@pytest.mark.parametrize("gap", [300, 100_000_000])
def test_a_group_that_comes_again_has_instances(gap: float) -> None:
    made = repeated(3, gap)
    found = events_of(made)
    assert found.is_complete.tolist() == [True] * 3
    add_collective_flows(made, Options())
    assert len(flows(made)) == 12


def test_an_operation_that_lacks_a_receive_gets_no_arrows() -> None:
    # Given three all-reduces, the second without the receive of rank 0
    made = repeated(3, 300)
    lost = [row for row, name in enumerate(names(made)) if name.startswith("SenRdmaRecv_74")][1]
    made.keep(made.slices.row != made.slices.row[lost], "test")
    add_collective_flows(made, Options())
    assert len(flows(made)) == 8
    assert [each.text for each in made.messages.said] == ["1 of 3 collectives lack transfers, so they get no arrows"]


def test_an_operation_with_a_pause_between_its_transfers_is_one() -> None:
    made = all_reduce()
    late = [name.startswith(("SenRdmaRecv_74", "SenRdmaSend_73")) for name in names(made)]
    made.slices.start[late] += 1_000_000
    assert events_of(made).is_complete.tolist() == [True]
    add_collective_flows(made, Options())
    assert len(flows(made)) == 4


def test_operations_with_pauses_that_come_again_are_apart() -> None:
    made = repeated(3, 300)
    late = [name.startswith(("SenRdmaRecv_74", "SenRdmaSend_73")) for name in names(made)]
    made.slices.start[late] += 145_000
    assert events_of(made).is_complete.tolist() == [True] * 3


def test_arrows_get_identifiers_that_no_flow_has() -> None:
    made = all_reduce()
    made.flows = trace([{"ph": "s", "id": 2000000, "ts": 0}]).flows
    add_collective_flows(made, Options())
    assert [id_ for id_, phase, *_ in flows(made) if phase == "s"] == [2000001, 2000002]


def test_a_rank_without_a_kernel_in_a_collective_arrives_at_its_first_event() -> None:
    # Given that rank 0's kernel ends before the all-reduce, and its next one after it
    made = all_reduce()
    made.slices.start[[name == "mm_4 Cmpt Exec" for name in names(made)]] -= 500_000
    add_collective_calls(made, Options())
    calls = made.slices.take(made.slices.row < 0)
    assert list(zip(calls.start.tolist(), calls.duration.tolist(), strict=True)) == [(998000, 142000)] * 2


def test_a_slice_for_each_rank_of_a_collective() -> None:
    made = all_reduce()
    add_collective_calls(made, Options())
    calls = made.slices.take(made.slices.row < 0)
    rows = zip(calls.pid.tolist(), calls.tid.tolist(), calls.start.tolist(), calls.duration.tolist(), strict=True)
    assert list(rows) == [(0, 10000, 1040000, 100000), (1, 10001, 1040000, 100000)]
    assert names(made)[-2:] == ["gloo:all_reduce"] * 2
    assert made.texts.taken(calls.category).to_pylist() == ["user_annotation"] * 2
    assert made.texts.taken(calls.group).to_pylist() == ["AllReduce_all_reduce_3"] * 2
    assert (calls.bytes.tolist(), calls.extra["Coll_data_size"].tolist()) == ([4000] * 2, [8000] * 2)
    extra = {name: member(made, name)[-2:] for name in ("collective algorithm type", "peers")}
    assert extra == {"collective algorithm type": ["chain"] * 2, "peers": ["{0, 1}"] * 2}
    assert member(made, "rank group compute event")[-2:] == ["mm_4 Cmpt Exec"] * 2
    assert made.made == {"slices of collectives": 2}


def test_the_same_for_merged_slices() -> None:
    made = all_reduce()
    merge_sends(made, Options())
    add_collective_calls(made, Options())
    calls = made.slices.take(made.slices.row < 0)
    assert list(zip(calls.pid.tolist(), calls.start.tolist(), calls.duration.tolist(), strict=True)) == [
        (0, 1040000, 100000),
        (1, 1040000, 100000),
    ]


def test_a_tree_gets_no_slices() -> None:
    # Given that rank 0 multicasts
    made = all_reduce()
    made.slices.pid = 1 - made.slices.pid
    made.slices.peers = made.texts.codes([{"0": "1", "1": "0"}.get(str(each)) for each in
                                          made.texts.taken(made.slices.peers).to_pylist()])  # fmt: skip
    add_collective_calls(made, Options())
    assert len(made.slices) == 11
    assert [each.text for each in made.messages.said] == [
        "1 collectives are not chains of ranks, so they get no slices"
    ]


def test_bandwidth_from_events() -> None:
    made = all_reduce()
    compute_from_events(made, Options())
    assert points(made, "BW allreduce") == [(-1, 1040, 0.04), (-1, 1140, 0)]
    assert points(made, "BW all-pcie") == [(-1, 1040, 0.08), (-1, 1140, 0)]


def test_bandwidth_of_each_of_several() -> None:
    made = repeated(3, 300)
    compute_from_events(made, Options())
    times = [time for _, time, value in points(made, "BW allreduce") if value]
    assert times == [1040, 1340, 1640]


def test_bandwidth_from_calls() -> None:
    made = repeated(2, 300)
    add_collective_calls(made, Options())
    compute_from_calls(made, Options())
    expected = [(-1, 1040, 0.08), (-1, 1140, 0), (-1, 1340, 0.08), (-1, 1440, 0)]
    assert points(made, "Coll_Bandwidth") == expected


def test_the_calls_of_ranks_whose_clocks_differ_are_one_collective() -> None:
    made = all_reduce()
    made.slices.start[made.slices.pid == 1] += 200_000
    add_collective_calls(made, Options())
    compute_from_calls(made, Options())
    # From 1040 to 1340
    assert points(made, "Coll_Bandwidth") == [(-1, 1040, 0.027), (-1, 1340, 0)]


def test_the_shares_of_computation_and_communication() -> None:
    made = all_reduce()
    add_collective_calls(made, Options())
    place_on_devices(made, Options())
    calculate_stats_v2(made, Options())
    assert [tuple(row.values()) for row in made.tables["stats_summary"].to_pylist()] == [
        (0, 200.0, 80.0, 100.0, 0.4, 0.5),
        (1, 200.0, 90.0, 100.0, 0.45, 0.5),
    ]


def test_communication_beside_computation() -> None:
    made = all_reduce()
    compare_ranks(made, Options())
    # Rank 0 transfers from 998 to 1140 and computes from 1000 to 1040; rank 1 sends and receives with pauses.
    assert [tuple(row.values()) for row in made.tables["overlap"].to_pylist()] == [
        (0, 80.0, 142.0, 40.0, pytest.approx(40 / 1.42)),
        (1, 90.0, 126.0, 40.0, pytest.approx(40 / 1.26)),
    ]


def test_who_waits_for_whom() -> None:
    # Given two all-reduces to which rank 1 comes 25 us later, as its kernels before them take longer
    made = repeated(2, 300)
    for row, name in enumerate(names(made)):
        if name == "mm_4 Cmpt Exec" and made.slices.pid[row] == 1:
            made.slices.duration[row] += 25_000
    compare_ranks(made, Options())
    group = "AllReduce_all_reduce_3"
    assert [tuple(row.values()) for row in made.tables["imbalance"].to_pylist()] == [
        (group, 0, 2, 0, 1, 1040.0, 1065.0, 25.0),
        (group, 1, 2, 0, 1, 1340.0, 1365.0, 25.0),
    ]
    assert [tuple(row.values()) for row in made.tables["imbalance_ranks"].to_pylist()] == [
        (0, 2, 50.0, 25.0, 0, 0.0),
        (1, 2, 0.0, 0.0, 2, 50.0),
    ]


def test_peers_in_all_forms() -> None:
    made = trace([slice_("a", 0, 1)])
    codes = made.texts.codes(["1", "0,1,2", None, "['3', '4']", "{5}", "x,-1,²", "1", ""])
    own, ranks = peers_of(made, codes)
    assert list(zip(own.tolist(), ranks.tolist(), strict=True)) == [
        (0, 1), (1, 0), (1, 1), (1, 2), (3, 3), (3, 4), (4, 5), (6, 1),
    ]  # fmt: skip


NAMES = st.sampled_from(
    [
        "SenRdmaSend_1 [sync=a] DmaO", "SenRdmaRecv_1 [sync=a] DmaI", "SenRdmaSend_2 [sync=b] DmaO",
        "SenRdmaRecv_2 [sync=b] DmaI", "k Cmpt Exec", "k Cmpt Prep", "SenRdma", "", "[sync=]", "AIU Roundtrip",
    ]
)  # fmt: skip
TYPES = st.sampled_from(["SingleCast", "WDone Barrier", "MultiCast", "MultiCast XSEG", "Set BCList", "?", None])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            NAMES, TYPES, st.sampled_from(["0", "1", "0,1", "x", None]), st.integers(-1, 2),
            st.integers(0, 50) | st.integers(-(10**14), 10**14), st.floats(-50, 50) | st.floats(-1e15, 1e15),
            st.booleans(), st.sampled_from(["G", None]),
        ),
        max_size=12,
    ),
    st.booleans(),
    st.booleans(),
)  # fmt: skip
@thorough
def test_hostile_collectives_never_raise(rows: list[tuple[Any, ...]], merge: bool, collectives: bool) -> None:
    events = []
    for name, type_, peers, pid, ts, dur, counted, group in rows:
        given_ = {"Type": type_, "Peers": peers, "CollGroup": group, "Bytes": 5}
        members = {key: value for key, value in given_.items() if value is not None}
        events.append(slice_(name, ts, dur, (1, 2, 3, 4, 5) if counted else (), pid=pid, **members))
    made = trace(events)
    options = Options(
        tracks=frozenset(CounterTrack), flows=True, collectives=collectives, merge_sends=merge, power_statistics=True
    )
    run(made, options, [True] * len(STAGES), lambda *_: None)

    # What came in is there, or counted.
    calls = made.slices.row < 0
    assert len(events) == int((~calls).sum()) + made.dropped.total() + made.merged.total()
    assert int(calls.sum()) + len(made.points) + len(made.flows) + len(made.instants) == made.made.total()
