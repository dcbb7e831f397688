from __future__ import annotations

from collections.abc import Sequence

import pytest

from iaprof.timelines.options import Options
from iaprof.timelines.stages.alignment import frequency_align_apply
from iaprof.timelines.stages.device_counters import unwrap
from iaprof.timelines.stages.epochs import normalize_phase2
from iaprof.timelines.trace import ABSENT, Trace
from unit.timelines.clock_examples import E1, E4, E4B, E7, E8, E9_FLEX, e4, e7
from unit.timelines.traces import Event, slice_, trace


def _normalized(*files: Sequence[Event], soc_mhz: float = 1000) -> Trace:
    made = trace(*files)
    unwrap(made)
    normalize_phase2(made, Options(soc_mhz=soc_mhz))
    return made


def _said(of: Trace, level: int = 0) -> list[str]:
    return [f"{message.stage} {message.text}" for message in of.messages.said if message.level >= level]


def test_e4_counts_wraps_since_the_first_slice() -> None:
    e4_ = _normalized(E4)
    assert e4_.slices.extra["OVC"].tolist() == [0, 1, 3]
    assert e4_.slices.counters[:, 0].tolist() == [4284967296, 2**32 + 5000000, 3 * 2**32 + 1000]
    # A wrap does not make an interval of -285331 MHz.
    assert _said(e4_) == [
        f"FREQ The {kind} kernels give 1000.00/1000.00/1000.00 MHz (min/mean/max);"
        " rel_range=0.0, input_soc_freq/detected=1.0"
        for kind in ("durations of", "intervals between")
    ]


def test_a_counter_that_starts_again_makes_no_negative_frequency() -> None:
    # Given two jobs of kernels 100 us apart, 10 ms after each other, of which each starts to count at 1,000,000
    jobs = []
    for job in range(2):
        counts = [1_000_000 + 100_000 * number for number in range(5)]
        jobs.append(
            [
                slice_("k Cmpt Exec", 10_000 * job + 100 * number, 50, (c, c, c, c + 50_000, c + 50_000))
                for number, c in enumerate(counts)
            ]
        )
    (said,) = [text for text in _said(_normalized(*jobs)) if "intervals between" in text]
    assert "give 1000.00/1000.00/1000.00 MHz" in said


def test_e4b_a_wrap_within_a_slice_is_counted_once() -> None:
    e4b = _normalized(E4B)
    assert e4b.texts.taken(e4b.slices.extra["TSxOF"]).to_pylist() == [None, "TS3", None]
    assert e4b.slices.extra["OVC"].tolist() == [0, 0, 1]
    assert e4b.slices.counters[:, 0].tolist() == [4284967296, 4294917296, 2**32 + 5000000]


def test_e7_the_right_frequency_is_recommended() -> None:
    e7_ = _normalized(*E7, soc_mhz=550)
    frequencies = "560.00/560.00/560.00 MHz (min/mean/max); rel_range=0.0, input_soc_freq/detected=0.982"
    assert _said(e7_) == [
        "FREQ Between jobs the device's clock drifts by up to 36363.636 us from the host's: use --freq=560.000",
        f"FREQ The durations of kernels give {frequencies}",
        f"FREQ The intervals between kernels give {frequencies}",
    ]


@pytest.mark.parametrize(("apart", "mhz"), [(1_333_000, 1333), (1_001_000, 1001), (999_000, 999), (750_000, 750)])
def test_no_frequency_is_recommended_that_the_durations_of_kernels_contradict(apart: int, mhz: int) -> None:
    # Given kernels of exactly 1000 MHz in three jobs, 1 ms apart, for which the counter goes on by so many cycles
    def job(number: int) -> list[Event]:
        c = 1000 + number * apart
        return [slice_("a Cmpt Exec", 10**6 + number * 1000, 40, [c, c, c, c + 40000, c + 40000])]

    said = _said(_normalized(job(0), job(1), job(2)), level=1)
    assert not any("use --freq" in text for text in said)
    assert said[0].endswith(
        f"as if it had {mhz}.000 MHz, but by their durations kernels ran at 1000.000 MHz, to which --freq=1000 is"
        " closer: keep it, and do not rely on the time between jobs"
    )


def test_durations_that_scatter_do_not_contradict_what_is_exact_between_jobs() -> None:
    # Given jobs counted at 1000.5 MHz, whose kernels' durations have errors of up to 1 %, at 1000.25 MHz in the middle
    def job(number: int) -> list[Event]:
        errors = (-0.01, -0.005, -0.00025, 0.005, 0.01)
        begins = [10**6 + number * 10**5 + place * 100 for place in range(5)]
        cycles = [round((begin - 10**6) * 1000.5) + 10**6 for begin in begins]
        return [
            slice_("a Cmpt Exec", begin, 40, [c, c, c, c + round(40 * 1000.5 * (1 + error)), c + 50000])
            for begin, c, error in zip(begins, cycles, errors, strict=True)
        ]

    assert "use --freq=1000.500" in _said(_normalized(job(0), job(1), job(2)), level=1)[0]


def test_a_frequency_that_is_very_wrong_is_warned_of() -> None:
    assert _said(_normalized(E7[0], soc_mhz=700), level=1) == [
        f"FREQ The {kind} kernels give 560.00/560.00/560.00 MHz (min/mean/max);"
        " rel_range=0.0, input_soc_freq/detected=1.25"
        for kind in ("durations of", "intervals between")
    ]


@pytest.mark.parametrize("files", [[E1], E9_FLEX], ids=["E1", "E9"])
def test_exact_data_get_no_recommendation(files: list[list[Event]]) -> None:
    assert _said(_normalized(*files), level=1) == []


def test_e8_jobs_are_aligned_before_wraps_are_counted() -> None:
    e8 = trace(E8)
    frequency_align_apply(e8, Options(align_jobs=True))
    normalize_phase2(e8, Options())
    assert e8.slices.extra["OVC"].tolist() == [ABSENT, 0, 0]
    assert _said(e8, level=1) == []


def test_a_frequency_that_is_a_little_wrong_does_not_add_up() -> None:
    """After 100,000 wraps 0.1 % would be 100 wraps."""
    jobs = [e7(10**6 + 4.0e6 * number, 0) for number in range(300)]
    for number, job in enumerate(jobs):
        for event in job:
            for name, value in event["args"].items():
                event["args"][name] = (value + number * 4 * 10**6 * 560) % 2**32
    wrong = _normalized(*jobs, soc_mhz=560.5)
    assert wrong.slices.extra["OVC"].tolist() == [
        number * 4 * 10**6 * 560 // 2**32 for number in range(300) for _ in "ab"
    ]
    assert "use --freq=560.000" in _said(wrong, level=1)[0]


def test_pids_have_wraps_of_their_own_and_any_order() -> None:
    events = [{**event, "pid": pid} for pid in (7, 3) for event in reversed(e4(2**32 - 1000000, 2**32 + 5000000))]
    assert _normalized(events).slices.extra["OVC"].tolist() == [1, 0, 1, 0]


def test_counters_that_fall_or_were_never_read_are_left_alone() -> None:
    odd = _normalized([*E4, slice_("odd", 10**7, 5, [5, 4, 3, 2, 1]), slice_("z Cmpt Exec", 10**7, 5, [0] * 5)])
    assert odd.slices.extra["OVC"].tolist() == [0, 1, 3, ABSENT, ABSENT]
    assert odd.slices.counters[4].tolist() == [0] * 5


def test_host_and_device_that_differ_by_half_a_wrap_are_said() -> None:
    odd = _normalized([slice_("k Cmpt Exec", 0, 1, [1000] * 3 + [2000] * 2),
                       slice_("k Cmpt Exec", 10, 1, [2**31] * 3 + [2**31 + 1000] * 2)])  # fmt: skip
    assert "OVC Guessed the wraps before 1 slice: host and device differed by a lot" in _said(odd)


def test_kernels_at_one_time_and_without_cycles_are_said() -> None:
    same = _normalized([slice_("k Cmpt Exec", 1, 1, [0, 0, 1000, 2000, 2000]),
                        slice_("l Cmpt Exec", 1, 1, [0, 0, 1000, 2000, 2000]),
                        slice_("m Cmpt Exec", 1, 0, [0, 0, 1000, 2000, 2000])])  # fmt: skip
    assert _said(same)[:2] == [
        "FREQ Left out 1 kernel without a duration or without cycles",
        "FREQ Found 1 kernel that started at the time of the one before, so without an interval",
    ]
