from __future__ import annotations

import io

import pytest
from hypothesis import given, settings, strategies as st

from iaprof.timelines.options import CounterTrack, Options
from iaprof.timelines.outputs.tables import write_csv
from iaprof.timelines.stages import power
from iaprof.timelines.stages.device_counters import tripple_phased_events
from iaprof.timelines.stages.power import analyze_power_statistics, compute_power
from iaprof.timelines.stages.summaries import calculate_stats
from iaprof.timelines.trace import Trace
from unit.timelines.examples import FIRST, SECOND, charges, points, two_operations
from unit.timelines.traces import slice_, trace

BY_TS3 = Options(tracks=frozenset({CounterTrack.POWER_TS3}))


def test_power_between_two_kernels() -> None:
    made = two_operations()
    compute_power(made, Options())
    # The interval ends with a point, as nothing is known of what comes after it.
    assert points(made, "Power") == [(0, 1050, 16.796875), (0, 1110, 16.796875)]
    assert made.made == {"points of the counter Power": 2}


def test_parts_of_operations_have_the_times_of_the_operations() -> None:
    # Given operations as a whole, which end at TS5; their charge is read at TS4, at 1050 and 1140 us
    made = trace([slice_("k", 970, 85, FIRST, Power=1000), slice_("m", 1040, 101, SECOND, Power=44000)])
    # When they are cut into k_DmaI, k_Cmpt, k_DmaO and the like, each 1 ns shorter
    tripple_phased_events(made, Options(split=True))
    compute_power(made, Options())
    # Then all parts of an operation give one sample: 12/512 x 43000 in 90 us
    assert [(pid, time, round(watts, 6)) for pid, time, watts in points(made, "Power")] == [
        (0, 1049.999, 11.197917),
        (0, 1139.999, 11.197917),
    ]


def test_an_impossible_value_makes_no_point_and_is_counted() -> None:
    made = charges()
    compute_power(made, Options())
    assert points(made, "Power") == [(0, 1060, 46.875), (0, 1160, 23.4375), (0, 1360, 23.4375), (0, 1460, 23.4375)]
    expected = ["1 of 4 values of power are above 100 W and left out; is --power-scale right?"]
    assert [each.text for each in made.messages.said] == expected


def test_the_scale_is_an_option() -> None:
    made = charges()
    compute_power(made, Options(power_scale=12 / 512 * 5.37 / 1000))
    values = [round(value, 6) for *_, value in points(made, "Power")]
    assert values == [0.251719, 0.125859, 0.125859, 0.125859]


def of_charges(*steps: int) -> Trace:
    """Kernels a us apart, between which the charge grows by these units."""
    charges_ = [1000 + sum(steps[:number]) for number in range(len(steps) + 1)]
    return trace(
        [
            slice_("k Cmpt Exec", ts, 0.5, [1000 * ts + each for each in (0, 0, 0, 500, 500)], Power=charge)
            for ts, charge in enumerate(charges_, 1000)
        ]
    )


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        # 12/512 W gives 7031 and 7500 W; the other scale that is known, 37.8 and 40.3
        ((300_000, 320_000), "All of 2 values of power are above 100 W, which the device cannot draw, and left out:"
         " --power-scale=0.000125859 gives 37.8 to 40.3 W"),
        # Neither gives what can be: with 1e-6, the largest is 100 W
        ((90_000_000, 100_000_000, 100_000_000), "All of 3 values of power are above 100 W, which the device cannot"
         " draw, and left out: --power-scale=1e-06 gives 90.0 to 100.0 W"),
        ((3000, 300_000, 320_000), "2 of 3 values of power are above 100 W, which the device cannot draw, and left out:"
         " --power-scale=0.000125859 gives 0.4 to 40.3 W"),
        ((300_000, 3000, 3000), "1 of 3 values of power are above 100 W and left out; is --power-scale right?"),
    ],
)  # fmt: skip
def test_a_scale_that_fits_the_device_is_suggested(steps: tuple[int, ...], said: str) -> None:
    made = of_charges(*steps)
    calculate_stats(made, Options())
    assert [each.text for each in made.messages.said] == [said]


def test_power_by_cycles() -> None:
    made = charges()
    compute_power(made, BY_TS3)
    assert points(made, "Power Cmpt Exec") == [
        (0, 1000, 2.0), (0, 1099.999, 0), (0, 1100, 1.0), (0, 1199.999, 0),
        (0, 1200, 42946.66), (0, 1299.999, 0), (0, 1300, 1.0), (0, 1399.999, 0),
    ]  # fmt: skip


def test_only_first_leaves_out_what_follows_a_kernel() -> None:
    # Given samples of these kinds, one each 100 us
    suffixes = ["DmaI", "DmaI", "Cmpt Exec", "Cmpt Exec", "DmaI", "DmaO", "DmaI", "Cmpt Exec", "Wait", "DmaI"]
    window = {"DmaI": 1, "Cmpt Exec": 3, "DmaO": 4, "Wait": 4}

    def sample(number: int, suffix: str) -> object:
        ts = 1000 + 100 * number
        counters = [1000 * (ts + 10 * (place - window[suffix])) + 10000 for place in range(5)]
        return slice_(f"k {suffix}", ts, 10, counters, Power=1000 * (number + 1))

    made = trace([sample(number, suffix) for number, suffix in enumerate(suffixes)])  # type: ignore[misc]

    # When those after a kernel, and copies in after one out, are left out
    compute_power(made, Options(power_of_first=True))

    # Then six of the ten stay: I I E O E W I, but neither the second E nor the I after E and O
    assert len(points(made, "Power")) == 7


def test_power_is_computed_once_for_its_track_its_statistics_and_the_table_of_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given power whose track was made
    made = charges()
    compute_power(made, Options())
    # When it cannot be computed again
    monkeypatch.setattr(power, "_intervals", None)
    # Then the statistics and the table are still made
    analyze_power_statistics(made, Options())
    calculate_stats(made, Options())
    assert {"power_stats", "kernels"} <= set(made.tables)


def test_no_samples() -> None:
    made = trace([slice_("host", 0, 10)])
    compute_power(made, Options(tracks=frozenset(CounterTrack)))
    analyze_power_statistics(made, Options())
    assert (len(made.points), "power_stats" in made.tables) == (0, False)


def test_statistics_without_values_are_not_0() -> None:
    # Given power that is always above 100 W
    made = of_charges(300_000, 320_000)
    analyze_power_statistics(made, Options())
    names = ("min_non_zero", "max", "mean_non_zero", "median_non_zero", "avg_total")
    for row in made.tables["power_stats"].to_pylist():
        assert [row[name] for name in names] == [None] * 5
        assert (row["dur_total"], row["dur_non_zero"]) == (0, 0)
    output = io.BytesIO()
    write_csv(made.tables["power_stats"], output)
    assert output.getvalue().decode().splitlines()[1:] == [
        '0,"with kernels",,,,,,0.0000,0.0000',
        '0,"without kernels",,,,,,0.0000,0.0000',
    ]


def test_statistics_with_and_without_kernels() -> None:
    # Given intervals of 46.875 and 23.4375 W of 100 us, each with a kernel for its last 60 us, but one cannot be true
    made = charges()
    analyze_power_statistics(made, Options())
    mean = (46.875 + 2 * 23.4375) / 3
    common = {"min_non_zero": 23.4375, "max": 46.875, "mean_non_zero": mean, "median_non_zero": 23.4375}
    assert made.tables["power_stats"].to_pylist() == [
        {"pid": 0, "Scenario": "with kernels", **common, "avg_total": mean, "dur_total": 180, "dur_non_zero": 180},
        {"pid": 0, "Scenario": "without kernels", **common, "avg_total": mean, "dur_total": 120, "dur_non_zero": 120},
    ]


INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["k Cmpt Exec", "k DmaI", "k DmaO", "k", "k Cmpt Prep"]),
            st.integers(-(10**15), 10**15),
            st.floats(-1e12, 1e12),
            st.lists(INTEGERS | st.sampled_from([0, 1]), min_size=0, max_size=5),
            INTEGERS | st.just(0),
        ),
        max_size=8,
    )
)
def test_hostile_counters_never_raise(rows: list[tuple[str, int, float, list[int], int]]) -> None:
    made = trace([slice_(name, ts, dur, counters, Power=power) for name, ts, dur, counters, power in rows])
    count = len(made.slices)
    compute_power(made, Options(tracks=frozenset(CounterTrack), power_of_first=True))
    analyze_power_statistics(made, Options())
    assert len(made.slices) == count
    assert len(made.points) == made.made.total()
