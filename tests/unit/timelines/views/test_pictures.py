"""What the page draws: busy time, and slices as boxes."""

from __future__ import annotations

import numpy as np
import pytest

from iaprof.timelines.trace import Trace
from iaprof.timelines.views.busy import CLASSES, busy
from iaprof.timelines.views.picture import SEVERAL, picture
from unit.timelines.traces import slice_, trace

COUNTERS = (0, 0, 0, 1, 1)


def two_ranks() -> Trace:
    """400 us: a bin of the heat map is 1 us."""
    return trace(
        [
            slice_("Flex RoundTrip", 1000, 400),
            slice_("mm Cmpt Prep", 1090, 10, COUNTERS, tid=2),
            slice_("mm Cmpt Exec", 1100, 50, COUNTERS, tid=2),
            slice_("mm Cmpt Exec", 1120, 40.5, COUNTERS, tid=3),
            slice_("mm DmaO", 1150, 100, COUNTERS, tid=4),
            slice_("SenRdmaSend DmaO", 1300, 10, COUNTERS, tid=4, CollGroup="g"),
            slice_("mm Cmpt Exec", 1390, 10, COUNTERS, pid=1),
        ]
    )


def test_busy_time_is_that_of_the_union_of_slices() -> None:
    found = busy(two_ranks())
    assert (found.ranks, found.more, found.length) == ([0, 1], 0, 400_000)
    by_class = {name: found.percent[number] for number, name in enumerate(CLASSES)}
    # kernels from 100 to 160.5 us; the preparation before them is not a work of the device
    assert by_class["computation"][0].tolist() == [0] * 100 + [100] * 60 + [50] + [0] * 239
    assert by_class["communication"][0].tolist() == [0] * 300 + [100] * 10 + [0] * 90
    assert by_class["copies"][0].tolist() == [0] * 150 + [100] * 100 + [0] * 150
    assert by_class["device"][0].tolist() == [0] * 100 + [100] * 150 + [0] * 50 + [100] * 10 + [0] * 90
    assert by_class["device"][1].tolist() == [0] * 390 + [100] * 10
    assert found.mean[:, 0].tolist() == [40.0, pytest.approx(60.5 / 4), 2.5, 25.0]


def test_a_trace_without_a_device_is_never_busy() -> None:
    assert busy(trace([slice_("Callback", 0, 5)])).ranks == []
    assert busy(trace([])).percent.shape == (len(CLASSES), 0, 400)


def test_every_slice_is_in_a_box_of_its_row() -> None:
    found = picture(two_ranks())
    assert [(row.rank, row.is_device, row.tid, row.depth) for row in found.rows] == [
        (0, True, 2, 0), (0, True, 3, 0), (0, True, 4, 0), (0, False, 1, 0), (1, True, 1, 0),
    ]  # fmt: skip
    assert found.row.tolist() == [0, 0, 1, 2, 2, 3, 4]
    assert found.start.tolist() == [90_000, 100_000, 120_000, 150_000, 300_000, 0, 390_000]
    assert found.slices.tolist() == [1] * 7
    assert (found.more, found.hidden, found.bin_ns) == (0, 0, 100)


def test_slices_too_short_to_be_seen_are_one_box() -> None:
    # 100,000 slices of 1 us with 1 us between them, of two names, and a long one
    events = [slice_(f"{'ab'[n % 2]} Cmpt Exec", 2 * n, 1, COUNTERS) for n in range(50_000)]
    made = trace([*events, slice_("long Cmpt Exec", 100_000, 100_000, COUNTERS)])
    found = picture(made, most=200)
    assert len(found.row) <= 200
    assert int(found.slices.sum()) == 50_001
    assert int(found.busy.sum()) == 150_000_000
    assert (np.diff(found.start) > 0).all()
    assert made.texts[int(found.name[-1])] == "long Cmpt Exec"
    assert (found.name[:-1] == SEVERAL).all()
    assert found.length[-1] == 100_000_000


def test_rows_beyond_the_limit_are_counted() -> None:
    made = trace([slice_("k Cmpt Exec", 0, 5, COUNTERS, tid=tid) for tid in range(1000)])
    found = picture(made)
    assert (len(found.rows), found.more, found.hidden, len(found.row)) == (200, 800, 800, 200)


def test_absurd_times_do_no_harm() -> None:
    made = trace([slice_("k Cmpt Exec", -9e15, 9e15, COUNTERS), slice_("k Cmpt Exec", 9e15, 9e15, COUNTERS)])
    assert (picture(made).length >= 0).all()
    assert (busy(made).percent >= 0).all()
