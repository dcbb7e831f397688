from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from iaprof.timelines.options import Options, Overlap
from iaprof.timelines.stages.overlap import detect_partial_overlap_events
from iaprof.timelines.trace import Slices, Trace
from thorough import thorough
from unit.timelines.clock_examples import E2
from unit.timelines.traces import Event, slice_, trace


def _resolved(events: list[Event], overlap: Overlap, most: int = 5) -> Trace:
    made = trace(events)
    detect_partial_overlap_events(made, Options(overlap=overlap, most_extra_tids=most))
    return made


def _said(of: Trace) -> list[str]:
    return [f"{message.stage} {message.text}" for message in of.messages.said]


_WHICH = "that partly overlapped another one of the row"


def test_e2_slices_go_to_the_next_unused_row_until_they_fit() -> None:
    e2 = _resolved(E2, Overlap.TID)
    assert e2.slices.tid.tolist() == [1000, 1000, 1001, 1002, 1000, 1000, 1000, 1001]
    assert _said(e2) == [f"POD Moved 3 slices {_WHICH} to other rows"]


def test_e2_slices_are_dropped() -> None:
    e2 = _resolved(E2, Overlap.DROP)
    assert [e2.texts[code] for code in e2.slices.name] == ["s0", "s1", "s4", "s5", "s6"]
    assert dict(e2.dropped) == {"overlap": 3}
    assert _said(e2) == [f"POD Dropped 3 slices {_WHICH}"]


def test_e2_a_slice_that_overlaps_by_less_than_5_ns_starts_later() -> None:
    e2 = _resolved(E2, Overlap.SHIFT)
    assert e2.slices.start.tolist() == [1000000, 1010000, 1050000, 1060000, 1200000, 1200000, 1300000, 1350001]
    assert e2.slices.duration.tolist() == [100000, 20000, 80000, 120000, 10000, 30000, 50000, 19996]
    nothing = [np.nan] * 7
    np.testing.assert_array_equal(e2.slices.extra["orig_ts"], [*nothing, 1349.997])
    np.testing.assert_array_equal(e2.slices.extra["orig_dur"], [*nothing, 20])
    assert _said(e2) == [
        f"POD Started 1 slice {_WHICH} later, by less than 7 ns",
        f"POD Found 2 slices {_WHICH}, by 5 ns or more",
    ]


def test_e2_slices_only_warn() -> None:
    e2 = _resolved(E2, Overlap.WARN)
    assert e2.slices.tid.tolist() == [1000] * 8
    assert _said(e2) == [f"POD Found 3 slices {_WHICH}"]


def test_e2_slices_become_asynchronous_events_with_ids_of_their_own() -> None:
    before = {"ph": "b", "id": 41, "name": "before", "ts": 1}
    events = [{**event, "args": {"TS1": number, "CollGroup": "G"}} for number, event in enumerate(E2)]
    e2 = _resolved([before, *events], Overlap.ASYNC)
    assert len(e2.slices) == 5
    marks = e2.instants
    shown = [
        (e2.texts[marks.phase[row]], e2.texts[marks.name[row]], int(marks.id[row]), marks.time[row] / 1e3)
        for row in range(len(marks))
    ]
    assert shown == [
        ("b", "before", 41, 1),
        ("b", "s2", 42, 1050), ("b", "s3", 43, 1060), ("b", "s7", 44, 1349.997),
        ("e", "s2", 42, 1130), ("e", "s3", 43, 1180), ("e", "s7", 44, 1369.997),
    ]  # fmt: skip
    assert marks.extra["TS1"].tolist()[1:4] == [2, 3, 7]
    assert "TS2" not in marks.extra
    assert e2.texts.taken(marks.extra["CollGroup"]).to_pylist() == [None, *["G"] * 6]
    assert dict(e2.merged) == {"asynchronous events of overlapping slices": 3}
    assert dict(e2.made) == {"starts and ends of asynchronous events": 6}


def _staircase(count: int, tid: int = 0) -> list[Event]:
    return [slice_("s", number, 1000, tid=tid) for number in range(count)]


def test_seven_slices_that_overlap_pairwise_and_more() -> None:
    limited = _resolved(_staircase(9), Overlap.TID)
    assert limited.slices.tid.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0]
    assert _said(limited) == [
        f"POD Moved 5 slices {_WHICH} to other rows",
        f"POD Left 3 slices {_WHICH} in place: --max-tid-streams allows 5 extra rows",
    ]
    assert _resolved(_staircase(9), Overlap.TID, -1).slices.tid.tolist() == list(range(9))


def test_used_numbers_are_passed_over() -> None:
    mark = {"ph": "i", "name": "mark", "tid": 3, "ts": 1}
    rows = _resolved([*_staircase(3), *_staircase(3, tid=1), mark], Overlap.TID)
    assert rows.slices.tid.tolist() == [0, 2, 4, 1, 5, 6]


def test_flows_at_the_start_of_a_slice_go_with_it() -> None:
    flows = [{"ph": "f", "id": ts, "name": "ac2g", "tid": 0, "ts": ts} for ts in (0, 1, 2, 500)]
    nested_at_same_time = slice_("s", 2, 5, tid=0)
    rows = _resolved([*_staircase(3), nested_at_same_time, *flows], Overlap.TID)
    assert rows.slices.tid.tolist() == [0, 1, 2, 0]
    assert rows.flows.tid.tolist() == [0, 1, 0, 0]


def test_the_largest_number_of_a_row_is_followed_by_the_first_unused_one() -> None:
    rows = _resolved([*_staircase(2, tid=2**63 - 1), slice_("s", 0, 1, tid=1)], Overlap.TID)
    assert rows.slices.tid.tolist() == [2**63 - 1, 2, 1]


def test_less_than_a_ns_is_no_overlap_and_a_ns_is_one() -> None:
    close = trace([slice_("a", 0, 0.1009), slice_("b", 0.1, 1), slice_("c", 5, 0.101), slice_("d", 5.1, 1)])
    close.slices.duration[0] = 100.9
    detect_partial_overlap_events(close, Options(overlap=Overlap.DROP))
    assert [close.texts[code] for code in close.slices.name] == ["a", "b", "c"]


def _one_by_one(starts: list[int], ends: list[int], most: int) -> list[int]:
    """Levels as the specification tells them, one slice after another; -1 for those that fit nowhere."""
    rows: list[list[int]] = []
    levels = []
    for start, end in zip(starts, ends, strict=True):
        for level in range(len(starts) if most < 0 else most + 1):
            if level == len(rows):
                rows.append([])
            if not any(start < other < end for other in rows[level]):
                rows[level].append(end)
                levels.append(level)
                break
        else:
            levels.append(-1)
    return levels


_SLICES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=30)


@settings(max_examples=300, deadline=None)
@given(_SLICES, st.integers(-1, 3), st.integers(1, 2))
@example([(0, 10), (5, 10), (9, 2)], 0, 1)
@thorough
def test_levels_are_those_of_looking_at_slices_one_by_one(times: list[tuple[int, int]], most: int, pids: int) -> None:
    times = sorted(times, key=lambda each: (each[0], -each[1]))
    made = _resolved([slice_("s", *each, pid=pid) for pid in range(pids) for each in times], Overlap.TID, most)
    starts, ends = [start for start, _ in times], [start + length for start, length in times]
    expected = [max(level, 0) + 1 for level in _one_by_one(starts, ends, most)] * pids
    assert made.slices.tid.tolist() == expected


@settings(max_examples=300, deadline=None)
@given(_SLICES)
def test_shifted_slices_conflict_no_more(times: list[tuple[int, int]]) -> None:
    made = _resolved([slice_("s", start / 1000, length / 1000) for start, length in times], Overlap.SHIFT)
    assert (made.slices.duration >= 0).all()
    assert (made.slices.start + made.slices.duration <= [start + length + 2 for start, length in times]).all()


@pytest.mark.parametrize("most", [5, -1])
def test_slices_that_all_overlap_take_no_quadratic_time(most: int) -> None:
    """The time for four times as many is about four times as long, and would be 16 times."""
    least = []
    for count in (5_000, 20_000):
        times = []
        for _ in range(3):
            made = trace()
            made.slices = Slices.of(count, start=np.arange(count), duration=np.full(count, 1e9))
            begin = time.process_time()
            detect_partial_overlap_events(made, Options(most_extra_tids=most))
            times.append(time.process_time() - begin)
        least.append(min(times))
    assert len(np.unique(made.slices.tid)) == (6 if most == 5 else 20_000)
    assert least[1] < 10 * least[0]
