from __future__ import annotations

import numpy as np
import pytest

from iaprof.timelines.device_clock import counter_offsets, counter_times, whole
from iaprof.timelines.dialects import windows
from iaprof.timelines.options import Options
from iaprof.timelines.stages.device_counters import (
    cycle_count_to_wallclock,
    event_sanity_checks,
    tighten_hts_by_instr_type,
    tripple_phased_events,
    unwrap,
)
from iaprof.timelines.trace import ABSENT, Texts, Trace
from unit.timelines.clock_examples import E1
from unit.timelines.examples import FIRST
from unit.timelines.traces import slice_, trace

_C = list(FIRST)


def _times(of: Trace) -> list[tuple[str, float, float]]:
    """Names, starts and durations, us."""
    slices = of.slices
    names = [of.texts[code] for code in slices.name]
    return list(zip(names, slices.start / 1e3, slices.duration / 1e3, strict=True))


def _said(of: Trace) -> list[str]:
    return [f"{message.stage} {message.text}" for message in of.messages.said]


def test_counters_that_fall_within_a_slice_have_wrapped() -> None:
    wrapped = trace([slice_("k Cmpt Exec", 0, 1, [4294900000, 4294900000, 4294967296, 160000, 170000]),
                     slice_("l Cmpt Exec", 0, 1, [1, 2, 3, 4, 5])])  # fmt: skip
    unwrap(wrapped)
    assert wrapped.slices.counters.tolist() == [
        [4294900000, 4294900000, 4294967296, 4295127296, 4295137296],
        [1, 2, 3, 4, 5],
    ]
    assert wrapped.texts.taken(wrapped.slices.extra["TSxOF"]).to_pylist() == ["TS4", None]


def test_counters_of_more_than_32_bits_do_not_wrap() -> None:
    falling = trace([slice_("k Cmpt Exec", 0, 1, [2**40, 2**40 + 1, 2**40, 2**40 + 3, 2**40 + 4])])
    unwrap(falling)
    assert falling.slices.counters[0].tolist() == [2**40, 2**40 + 1, 2**40, 2**40 + 3, 2**40 + 4]
    assert "TSxOF" not in falling.slices.extra


def test_absent_counters_stay_absent() -> None:
    partly = trace([{"ph": "X", "name": "k", "ts": 0, "dur": 1, "args": {"TS1": 9, "TS5": 3}}])
    unwrap(partly)
    assert partly.slices.counters[0].tolist() == [9, ABSENT, ABSENT, ABSENT, 3 + 2**32]


def test_counters_that_cannot_be_right_are_left_out() -> None:
    odd = trace([slice_("good Cmpt Exec", 0, 1, _C), slice_("falls", 0, 1, [5, 4, 3, 2, 1]),
                 slice_("lacks", 0, 1, [1, 2]), slice_("host", 0, 1)])  # fmt: skip
    event_sanity_checks(odd, Options())
    assert odd.slices.counters.tolist() == [_C, [ABSENT] * 5, [ABSENT] * 5, [ABSENT] * 5]
    assert _said(odd) == [
        "OVC Left out the counters of 1 slice that lacked some of TS1 to TS5; their times are the host's",
        "OVC Left out the counters of 1 slice in which TS1 to TS5 fell; their times are the host's",
    ]


def test_slices_are_as_long_as_their_window_and_end_when_the_host_saw_it() -> None:
    e1 = trace(E1)
    tighten_hts_by_instr_type(e1, Options())
    assert _times(e1) == [
        ("Flex RoundTrip", 900, 400),
        ("AIU Roundtrip", 905, 300),
        ("k_1 DmaI", 975, 10),
        ("k_1 Cmpt Prep", 980, 20),
        ("k_1 Cmpt Exec", 1000, 50),
        ("k_1 DmaO", 1050, 5),
        ("m_2 Cmpt Prep", 1010, 50),
        ("m_2 Cmpt Exec", 1070, 40),
    ]


def test_the_stage_before_measures_from_ts1_on() -> None:
    e1 = trace(E1)
    cycle_count_to_wallclock(e1, Options())
    assert _times(e1)[2:6] == [
        ("k_1 DmaI", 975, 10),
        ("k_1 Cmpt Prep", 970, 30),
        ("k_1 Cmpt Exec", 970, 80),
        ("k_1 DmaO", 970, 85),
    ]


def test_an_unknown_name_has_all_counters_and_frequencies_need_no_whole_ns() -> None:
    named = trace([slice_("barrier", 1000, 50, _C), slice_("k Cmpt Exec", 1000, 50, _C)])
    tighten_hts_by_instr_type(named, Options(soc_mhz=560))
    assert named.slices.start.tolist() == [1050000 - 151786, 1050000 - 89286]
    assert named.slices.duration.tolist() == pytest.approx([85000 / 0.56, 50000 / 0.56])


def test_the_ends_of_names_tell_the_windows_also_those_that_cutting_made() -> None:
    texts = Texts()
    names = ["k DmaI", "k_DmaI", "k Cmpt Prep", "k Cmpt Exec", "k_Cmpt", "k DmaO", "k_DmaO", "k", "DmaI of k"]
    first, last = windows(texts, texts.codes(names))
    assert first.tolist() == [0, 0, 1, 2, 2, 3, 3, 0, 0]
    assert last.tolist() == [1, 1, 2, 3, 3, 4, 4, 4, 4]


def test_each_counter_has_a_time_to_the_ns_at_todays_time() -> None:
    now_us = 1_700_000_000_000_000
    today = trace([slice_("k Cmpt Exec", now_us, 50, _C), slice_("k DmaO", now_us + 50, 5, _C), slice_("host", 0, 1)])
    expected = [now_us * 1000 + ns for ns in (-30000, -20000, 0, 50000, 55000)]
    before = counter_times(today.texts, today.slices, 1000)
    tighten_hts_by_instr_type(today, Options())
    after = counter_times(today.texts, today.slices, 1000)
    assert before.tolist() == after.tolist() == [expected, [each - 50000 + 50000 for each in expected], [ABSENT] * 5]
    offsets = counter_offsets(today.texts, today.slices, 1000)
    np.testing.assert_array_equal(offsets, [[-30000, -20000, 0, 50000, 55000], [-80000, -70000, -50000, 0, 5000],
                                            [np.nan] * 5])  # fmt: skip


def test_operations_are_cut_into_parts_that_do_not_touch() -> None:
    cut = trace([
        slice_("k_1 Cmpt Prep", 0, 10, _C), slice_("k_1 Cmpt Exec", 1000, 50, _C), slice_("k_1 DmaI", 975, 10, _C),
        slice_("copy", 970, 85, _C), slice_("short DmaO", 1000, 1, [0, 0, 0, 0, 1]), slice_("host", 5, 6),
    ])  # fmt: skip
    tripple_phased_events(cut, Options(split=True))
    assert sorted(_times(cut)) == [
        ("copy_Cmpt", 1000, 49.999),
        ("copy_DmaI", 970, 9.999),
        ("copy_DmaO", 1050, 4.999),
        ("host", 5, 6),
        ("k_1 Cmpt Exec", 1000, 49.999),
        ("k_1 DmaI", 975, 9.999),
    ]
    assert dict(cut.dropped) == {"preparations, by -s": 1, "parts too short for -s": 1}
    assert dict(cut.made) == {"parts of operations, by -s": 2}


def test_a_part_of_12_5_us_becomes_12_499() -> None:
    cut = trace([slice_("k Cmpt Exec", 0, 12.5, [0, 0, 0, 12500, 12500])])
    tripple_phased_events(cut, Options(split=True))
    assert _times(cut) == [("k Cmpt Exec", 0, 12.499)]


def test_hostile_times_are_cut() -> None:
    assert whole(np.array([np.nan, np.inf, -np.inf, 0.5, -0.5, 1e300])).tolist() == [0, 2**62, -(2**62), 1, 0, 2**62]


def test_counters_below_0_are_left_out() -> None:
    negative = trace([slice_("k Cmpt Exec", 0, 1, [-5, 1, 2, 3, 4])])
    unwrap(negative)
    event_sanity_checks(negative, Options())
    assert negative.slices.counters.tolist() == [[ABSENT] * 5]
    assert _said(negative) == [
        "OVC Left out counters below 0 of 1 slice",
        "OVC Left out the counters of 1 slice that lacked some of TS1 to TS5; their times are the host's",
    ]
