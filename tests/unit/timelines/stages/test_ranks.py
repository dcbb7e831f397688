from __future__ import annotations

import pytest

from iaprof.timelines.device_clock import counter_times
from iaprof.timelines.options import Options
from iaprof.timelines.stages.device_counters import tighten_hts_by_instr_type
from iaprof.timelines.stages.ranks import mp_sync_tight_v1, mp_ts_calibration_v2
from iaprof.timelines.trace import Trace
from unit.timelines.clock_examples import E12, collective, e6, e12
from unit.timelines.traces import Event, slice_, trace

_ON_HOST = "MP_SYNC All devices are on the host clock of pid 0; 0 host slices stayed as on their hosts"
_LEAVE = "the clocks of devices stay as they are"


def _said(of: Trace) -> list[str]:
    return [f"{message.stage} {message.text}" for message in of.messages.said]


def _times(of: Trace) -> list[tuple[float, float]]:
    return list(zip((of.slices.start / 1e3).tolist(), (of.slices.duration / 1e3).tolist(), strict=True))


def _synced(*files: list[Event]) -> Trace:
    made = trace(*files)
    tighten_hts_by_instr_type(made, Options())
    mp_sync_tight_v1(made, Options())
    return made


@pytest.mark.parametrize("host", [0, 300], ids=["equal host clocks", "host clocks 300 us apart"])
def test_e6_the_chain_ends_on_both_ranks_at_once(host: int) -> None:
    e6_ = _synced(*e6(500, host))
    assert _times(e6_) == [
        (1000, 40), (998, 72), (998, 142), (1160, 40),
        (1000, 40), (998, 72), (1072, 10), (1085, 5), (1086, 5), (1092, 48), (1160, 40),
    ]  # fmt: skip
    assert _said(e6_) == [
        "MP_SYNC The device of pid 1 is moved by -500.000 us, by 1 multicast: the largest residual is 0.000 us",
        _ON_HOST,
    ]


def test_the_median_of_many_collectives_counts_and_the_residual_is_said() -> None:
    files: list[list[Event]] = [[], []]
    for number, late in enumerate((0, 0, 9)):
        group = f"AllReduce_all_reduce_{number}"
        at = 1000 * number
        files[0].append(collective("Receive DmaI", 0, 998 + at, 1140 + at, CollGroup=group, Type="WDone Barrier"))
        files[1].append(
            collective("Send Data DmaO", 1, 1092 + at, 1140 + at - late, 500, CollGroup=group, Type="MultiCast")
        )
    synced = _synced(*files)
    assert _said(synced)[0] == (
        "MP_SYNC The device of pid 1 is moved by -500.000 us, by 3 multicasts: the largest residual is 9.000 us"
    )


def test_without_multicasts_sends_to_one_rank_count() -> None:
    files = [[event for event in file if "MultiCast" not in event["args"].get("Type", "")] for file in e6()]
    assert _said(_synced(*files)) == [
        "MP_SYNC The device of pid 1 is moved by -500.000 us, by 1 send: the largest residual is 0.000 us",
        _ON_HOST,
    ]


def test_ranks_have_any_numbers_and_a_rank_without_the_group_stays() -> None:
    first, second = e6()
    third = [collective("Send DmaO", 9, 1010, 1020, CollGroup="AllReduce_other", Type="SingleCast", Peer=3)]
    fourth = [slice_("k Cmpt Exec", 0, 1, [1, 2, 3, 4, 5], pid=20)]
    synced = _synced([{**event, "pid": 3} for event in first], [{**event, "pid": 5} for event in second], third, fourth)
    assert _times(synced)[4] == (1000, 40)
    assert _said(synced) == [
        "MP_SYNC The device of pid 5 is moved by -500.000 us, by 1 multicast: the largest residual is 0.000 us",
        "MP_SYNC All devices are on the host clock of pid 3; 0 host slices stayed as on their hosts",
        "MP_SYNC No collective tells of the clocks of pids 9: these devices stay as they are",
        "MP_SYNC Left the clocks of 1 device without collectives as they were",
        "MP_SYNC Of 2 collectives, 2 did not run on all 3 devices",
    ]


def test_collectives_that_share_nothing_move_nothing() -> None:
    alone = [
        [collective("Send Data DmaO", pid, 1010, 1020, CollGroup=f"AllReduce_{pid}", Type="MultiCast")]
        for pid in (0, 1)
    ]
    synced = _synced(*alone)
    assert _times(synced) == [(1010, 10), (1010, 10)]
    assert _said(synced) == [
        "MP_SYNC No collective tells how the clocks of devices differ: 2 devices stay as they are",
        "MP_SYNC Of 2 collectives, 2 did not run on all 2 devices",
    ]
    assert _said(_synced(e6()[0], [slice_("k", 0, 1, pid=1)])) == [
        "MP_SYNC Only pid 0 has collectives: clocks of other devices stay as they are"
    ]


def test_the_same_group_in_the_next_job_is_another_run() -> None:
    later: list[list[Event]] = [[{**event, "ts": event["ts"] + 10**6,
               "args": {**event["args"], **{f"TS{n}": event["args"][f"TS{n}"] + 10**9 for n in range(1, 6)}}}
              for event in file] for file in e6()]  # fmt: skip
    assert "by 2 multicasts: the largest residual is 0.000 us" in _said(_synced(*e6(), *later))[0]


def test_one_rank_or_no_collectives_say_nothing() -> None:
    assert _said(_synced(e6()[0])) == []
    assert _said(_synced([slice_("k Cmpt Exec", 0, 1, [1, 2, 3, 4, 5])], [slice_("k", 0, 1, pid=1)])) == []


def _calibrated(*files: list[Event]) -> Trace:
    made = trace(*files)
    mp_ts_calibration_v2(made, Options(dilate_ranks=True))
    return made


def test_e12_clocks_are_put_together_and_made_equally_fast() -> None:
    e12_ = _calibrated(*E12)
    ends = e12_.slices.start + e12_.slices.duration
    assert ends.tolist() == pytest.approx([1140e3, 2140e3, 1140e3, 2140e3, 1500e3], abs=0.5)
    assert e12_.slices.duration[-1] == pytest.approx(10000 / 1.001)
    assert _said(e12_) == [
        "MP_SYNC The device of pid 1 is moved by -500.000 us, its clock is 1.001000 times as fast,"
        " by 2 collectives: the largest residual is 0.000 us",
        _ON_HOST,
    ]


def test_each_slice_stays_in_its_window_and_power_goes_with_it() -> None:
    operation = [2000000, 2010000, 2020000, 2050000, 2060000]
    parts = [slice_(f"k {part}", 2000, 10, operation, pid=1) for part in ("DmaI", "Cmpt Prep", "Cmpt Exec", "DmaO")]
    made = _calibrated(e12(0, 1140, 2140), [*e12(1, 1640, 2640), *parts])
    assert _times(made)[-4:] == [(1500, 10), (1510, 10), (1520, 30), (1550, 10)]
    assert counter_times(made.texts, made.slices, 1000)[-4:, 3].tolist() == [1550000] * 4


def test_one_collective_tells_no_speed_and_none_moves_nothing() -> None:
    assert _said(_calibrated(e12(0, 1140), e12(1, 1640)))[:2] == [
        "MP_SYNC The device of pid 1 is moved by -500.000 us, its clock is 1.000000 times as fast,"
        " by 1 collective: the largest residual is 0.000 us",
        "MP_SYNC pid 1 has only one collective in common: it does not tell how fast the clock is",
    ]
    none = _calibrated([slice_("k Cmpt Exec", 5, 1, [1, 2, 3, 4, 5])], [slice_("k", 0, 1, pid=1)])
    assert _said(none) == [f"MP_SYNC Fewer than two devices have AllReduce collectives: {_LEAVE}"]
    assert _times(none) == [(5, 1), (0, 1)]


def test_a_group_that_a_rank_lacks_is_left_out() -> None:
    made = _calibrated(
        e12(0, 1140, 2140, 3140), [event for event in e12(1, 1640, 9999, 3640) if "_2" not in event["name"]]
    )
    assert made.slices.start.tolist()[-2:] == [1130000, 3130000]
    assert _said(made)[-1] == "MP_SYNC Of 3 collectives, 1 did not run on all 2 devices"
