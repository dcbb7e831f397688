from __future__ import annotations

import numpy as np

from iaprof.timelines.options import Options
from iaprof.timelines.stages.alignment import (
    frequency_align_apply,
    frequency_align_collect,
    time_align_apply,
    time_align_collect,
)
from iaprof.timelines.trace import Dialect, Trace, TraceFile
from unit.timelines.clock_examples import E8, E9_FLEX, E9_TORCH
from unit.timelines.traces import Event, slice_, trace

_ALIGN = Options(align_jobs=True)


def _said(of: Trace) -> list[str]:
    return [f"{message.stage} {message.text}" for message in of.messages.said]


def _starts(of: Trace) -> list[float]:
    return list(of.slices.start / 1e3)


def test_e8_device_events_that_are_late_move_into_the_round_trip() -> None:
    e8 = trace(E8)
    frequency_align_collect(e8, _ALIGN)
    frequency_align_apply(e8, _ALIGN)
    assert _starts(e8) == [1000, 1000, 1100]
    np.testing.assert_array_equal(e8.slices.extra["ts_adj"], [np.nan, -600, -600])
    assert _said(e8) == ["FREQ Moved device events into the host's round trip in 1 job, first job-0.json (pid 0)"]


def test_device_events_that_are_early_move_too() -> None:
    early = trace([slice_("AIU Roundtrip", 1000, 300), slice_("k Cmpt Exec", 600, 50, [0, 0, 1, 2, 3])])
    frequency_align_apply(early, _ALIGN)
    assert _starts(early) == [1000, 1000]


def test_a_longer_device_range_stays_as_do_jobs_without_a_round_trip() -> None:
    wide = trace(
        [*E8, slice_("m Cmpt Exec", 2000, 50, [0, 0, 1, 2, 3])], [slice_("k Cmpt Exec", 5, 1, [1, 2, 3, 4, 5])]
    )
    frequency_align_collect(wide, _ALIGN)
    frequency_align_apply(wide, _ALIGN)
    assert _starts(wide) == [1000, 1600, 1700, 2000, 5]
    assert "ts_adj" not in wide.slices.extra
    assert _said(wide) == [
        "FREQ Left device events that last longer than the host's round trip in 1 job, first job-0.json (pid 0)"
    ]


def test_each_pid_of_a_file_is_a_job_of_its_own() -> None:
    ranks = trace([*E8, *({**event, "pid": 1, "ts": event["ts"] + (7 if "k" in event["name"] else 0)} for event in E8)])
    frequency_align_apply(ranks, _ALIGN)
    assert _starts(ranks) == [1000, 1000, 1100, 1000, 1000, 1093]


def test_jobs_at_the_same_time_are_warned_of() -> None:
    jobs = trace([slice_("AIU Roundtrip", 0, 10)], [slice_("AIU Roundtrip", 5, 10)], [slice_("AIU Roundtrip", 15, 10)])
    frequency_align_collect(jobs, _ALIGN)
    assert _said(jobs) == [
        "FREQ Found 1 job that began before the one before had ended, first job-1.json (pid 0):"
        " the frequency may be wrong"
    ]


def _e9(*torch: Event) -> Trace:
    return trace(torch or E9_TORCH, *E9_FLEX)


def test_e9_the_runtime_moves_onto_pytorchs_clock() -> None:
    e9 = _e9()
    time_align_collect(e9, Options())
    time_align_apply(e9, Options())
    assert _starts(e9) == [2000, 3000, 4000, 2040, 2220, 3040, 3220, 4040, 4220]
    assert _said(e9) == ["TALN Events of the AIU's runtime move by -87980.000 us onto PyTorch's clock"]


def test_calls_of_predict_are_better_references() -> None:
    predict = [
        slice_("<built-in method Predict of PyCapsule object at 0x7f>", ts, 599, pid=4000) for ts in (2000, 3000, 4000)
    ]
    e9 = _e9(*E9_TORCH, *predict)
    time_align_apply(e9, Options())
    assert _starts(e9)[6:8] == [2039, 2219]


def test_references_of_one_pid_that_are_not_as_many_are_cut_and_warned_of() -> None:
    e9 = trace([{**event, "pid": 0} for event in E9_TORCH[:1]], *E9_FLEX)
    time_align_collect(e9, Options())
    time_align_apply(e9, Options())
    assert _starts(e9) == [2000, 2040, 2220, 3040, 3220, 4040, 4220]
    assert _said(e9) == [
        "TALN Events of the AIU's runtime of pid 0 move by -87980.000 us onto PyTorch's clock",
        "TALN Found 1 pid with more round trips in one of PyTorch's and the runtime's traces than in the other: the"
        " clocks may be aligned wrongly. Check that all files are of one run",
    ]


def test_files_of_pytorch_stay_and_ranks_have_clocks_of_their_own() -> None:
    flow = {"ph": "s", "id": 1, "name": "ac2g", "pid": 4000, "tid": 1, "ts": 2100}
    point = {"ph": "C", "name": "Power", "pid": 1, "ts": 50300, "args": {"Watts": 1}}
    both = trace(
        [slice_("Torch-Compiled Region", 2000, 600, pid=4000), slice_("kernel", 2100, 5, pid=0, cat="kernel"), flow],
        [slice_("Torch-Compiled Region", 2500, 600, pid=4001)],
        [slice_("Flex RoundTrip", 90020, 560, pid=0)],
        [slice_("Flex RoundTrip", 50020, 560, pid=1), point],
    )
    for number, rank in ((0, 0), (1, 1)):
        both.files[number] = TraceFile("torch.json", Dialect.TORCH, rank)
    time_align_apply(both, Options())
    assert _starts(both) == [2000, 2100, 2500, 2040, 2540]
    assert both.flows.time.tolist() == [2100000]
    assert both.points.time.tolist() == [2820000]


def test_events_with_an_id_of_pytorchs_stay_in_a_file_of_both() -> None:
    mixed = trace([slice_("Torch-Compiled Region", 2000, 600), slice_("aten::mm", 2001, 5), *E9_FLEX[0]])
    mixed.slices.extra["External id"] = np.array([np.iinfo(np.int64).min, 5, *[np.iinfo(np.int64).min] * 2])
    time_align_apply(mixed, Options())
    assert _starts(mixed) == [2000, 2001, 2040, 2220]


def test_without_references_nothing_moves() -> None:
    flex = trace(*E9_FLEX)
    time_align_collect(flex, Options())
    time_align_apply(flex, Options())
    assert _starts(flex) == [90020, 90200, 91020, 91200, 92020, 92200]
    assert _said(flex) == []
