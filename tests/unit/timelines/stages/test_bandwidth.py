from __future__ import annotations

from iaprof.timelines.options import Options
from iaprof.timelines.stages.counter_tracks import compute_bandwidth
from unit.timelines.examples import all_reduce, points
from unit.timelines.traces import slice_, trace


def test_bytes_in_the_time_of_a_copy() -> None:
    made = all_reduce()
    compute_bandwidth(made, Options())
    # All transfers of a rank are there, the last one too.
    assert points(made, "BW DmaO") == [(0, 998, 55.556), (0, 1070, 0), (1, 1092, 83.333), (1, 1140, 0)]
    assert points(made, "BW DmaI") == [(0, 998, 28.169), (0, 1140, 0), (1, 998, 55.556), (1, 1070, 0)]


def test_copies_at_the_same_time_add_up() -> None:
    # Given copies of 1000 bytes: at 0 and 50 for 100 us, and one right after the first
    made = trace(
        [slice_("k DmaI", ts, 100, (1000 * ts, 1000 * ts + 100000, 0, 0, 0), Bytes=1000) for ts in (0, 50, 100)]
    )
    compute_bandwidth(made, Options())
    assert points(made, "BW DmaI") == [(0, 0, 10), (0, 50, 20), (0, 100, 20), (0, 150, 10), (0, 200, 0)]


def test_a_copy_without_time_is_counted() -> None:
    made = trace([slice_("k DmaI", 0, 0, (5, 5, 5, 5, 5), Bytes=7), slice_("k DmaO", 0, 5, (5, 5), Bytes=7)])
    compute_bandwidth(made, Options())
    assert len(made.points) == 0
    assert [each.text for each in made.messages.said] == [
        "2 copies have no time by their counters, so no bandwidth is shown for them"
    ]
