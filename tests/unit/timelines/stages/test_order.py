from __future__ import annotations

from iaprof.timelines.options import Options
from iaprof.timelines.stages.order import (
    assert_global_ts_sequence,
    assert_ts_sequence,
    sort_by_row,
    sort_by_time,
)
from iaprof.timelines.trace import Trace
from unit.timelines.traces import slice_, trace


def _names(of: Trace) -> str:
    return "".join(of.texts[code] for code in of.slices.name)


def _made() -> Trace:
    return trace([
        slice_("c", 5, 1, pid=1), slice_("d", 4, 1, tid=2), slice_("b", 9, 1), slice_("a", 5, 1), slice_("A", 5, 2),
        {"ph": "i", "name": "late", "ts": 9}, {"ph": "i", "name": "early", "ts": 1},
        {"ph": "C", "name": "Power", "ts": 9, "args": {"Watts": 9}},
        {"ph": "C", "name": "Power", "ts": 1, "args": {"Watts": 1}},
    ])  # fmt: skip


def test_rows_are_sorted_by_time_the_longest_first() -> None:
    made = _made()
    sort_by_row(made, Options())
    assert _names(made) == "Aabdc"


def test_all_events_are_sorted_by_time() -> None:
    made = _made()
    sort_by_time(made, Options())
    assert _names(made) == "dAcab"
    assert made.points.value.tolist() == [1, 9]
    assert made.instants.time.tolist() == [1000, 9000]


def _said(of: Trace) -> list[str]:
    return [f"{message.stage} {message.text}" for message in of.messages.said]


def test_unsorted_rows_are_said_once() -> None:
    made = _made()
    for _ in range(2):
        assert_ts_sequence(made, Options())
        assert_global_ts_sequence(made, Options())
    assert _said(made) == [
        "TS_SEQUENCE Found 2 slices after a later one of the row",
        "TS_SEQUENCE Found 3 slices of all rows after a later one",
    ]
    sort_by_row(made, Options())
    made.messages.said.clear()
    assert_ts_sequence(made, Options())
    assert _said(made) == []


def test_kernels_that_overlap_by_their_counters_are_said() -> None:
    kernels = trace([
        slice_("a Cmpt Exec", 0, 1, [0, 0, 100, 200, 200]), slice_("b Cmpt Exec", 1, 1, [0, 0, 150, 300, 300]),
        slice_("c Cmpt Exec", 2, 1, [0, 0, 290, 400, 400], tid=5),
        slice_("d Cmpt Exec", 3, 1, [0, 0, 10, 20, 20], pid=1),
        slice_("e Cmpt Exec", 4, 1),
    ])  # fmt: skip
    assert_ts_sequence(kernels, Options())
    assert _said(kernels) == [
        "TS_SEQUENCE Of 4 kernels, 2 started (TS3) before the one before ended (TS4), by up to 50 cycles"
    ]
