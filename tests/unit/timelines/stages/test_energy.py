from __future__ import annotations

from typing import Any

import pytest

from iaprof.timelines.options import Options
from iaprof.timelines.stages.energy import summed
from iaprof.timelines.stages.summaries import calculate_stats
from iaprof.timelines.trace import Dialect, Trace
from iaprof.timelines.views.totals import totals
from unit.timelines.examples import charges
from unit.timelines.traces import trace


def table(made: Trace) -> list[dict[str, Any]]:
    calculate_stats(made, Options())
    return list(made.tables["energy"].to_pylist())


def test_charges_become_energy_of_kernels_and_of_the_idle_device() -> None:
    """46.875 W from 1060 to 1160, 23.4375 W from 1160 to 1260 and 1360 to 1460; a kernel in the last 60 us of each."""
    kernel, idle = table(charges())
    assert (kernel["Energy"], idle["Energy"]) == (2812.5 + 1406.25 + 1406.25, 1875 + 937.5 + 937.5)
    assert (kernel["Calls"], idle["Calls"], idle["Name"]) == (5, 0, "[idle]")
    assert (kernel["Measured"], kernel["Mean Energy"]) == (3, 5625 / 3)
    assert kernel["Energy Percent"] == 60


def test_each_slice_has_its_energy_and_tables_add_it_up() -> None:
    made = charges()
    table(made)
    nan = float("nan")  # the first kernel runs before power is known, and the fourth while it cannot be true
    energy = made.slices.extra["energy_uj"].tolist()
    assert energy == pytest.approx([nan, 2812.5, 1406.25, nan, 1406.25], nan_ok=True)
    (row,) = totals(made).to_pylist()
    assert (row["name"], row["calls"], row["energy_uj"]) == ("k Cmpt Exec", 5, pytest.approx(5625.0))
    without = trace([gpu("mm_1", 0, 60)], dialect=Dialect.TORCH)
    calculate_stats(without, Options())
    assert "energy_uj" not in totals(without).column_names


def test_energy_that_is_not_known_is_not_0() -> None:
    """100 W from 100 to 200 us, in which `late` and an instant `mark` run; `early` runs before."""
    events = [gpu("early", 0, 60), gpu("late", 100, 100), gpu("mark", 150, 0), watts(100, 100), watts(200, 0)]
    rows = {row["Name"]: row for row in table(trace(events, dialect=Dialect.TORCH))}
    assert {name: row["Energy"] for name, row in rows.items()} == {
        "late": 10_000, "mark": 0, "early": None, "[idle]": None,
    }  # fmt: skip
    early = rows["early"]
    assert (early["Calls"], early["Measured"], early["Mean Energy"], early["Energy Percent"]) == (1, 0, None, None)


def test_energy_of_several_traces_is_known_where_one_of_them_knows_it() -> None:
    known = trace([gpu("a", 0, 100), gpu("b", 0, 0), watts(0, 100), watts(100, 0)], dialect=Dialect.TORCH)
    unknown = trace([gpu("a", 0, 50), gpu("c", 60, 5), watts(70, 100), watts(80, 0)], dialect=Dialect.TORCH)
    tables = []
    for made in (known, unknown):
        calculate_stats(made, Options())
        tables.append(made.tables["energy"])
    found = {row["Name"]: (row["Energy"], row["Calls"], row["Measured"]) for row in summed(tables).to_pylist()}
    assert found == {"a": (10_000, 2, 1), "b": (0, 1, 1), "c": (None, 1, 0), "[idle]": (1000, 0, 0)}


def gpu(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur}


def watts(ts: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "name": "Power", "pid": 0, "ts": ts, "args": {"Watts": value}}


@pytest.mark.parametrize(("unit", "value"), [("Watts", 100), ("W", 100), ("mW", 100_000)])
def test_power_in_other_units_is_the_same_energy(unit: str, value: float) -> None:
    points = [{**watts(ts, value), "args": {unit: value}} for ts in (0, 100)]
    kernel, idle = table(trace([gpu("mm_1", 0, 40), *points], dialect=Dialect.TORCH))
    assert (kernel["Energy"], idle["Energy"]) == (4000.0, 6000.0)


def test_counters_of_watts_hold_until_the_next_and_kernels_at_once_share() -> None:
    """100 W from 0 to 100 us, 10 W to 200: one alone 0 to 40, both 40 to 60, the copy alone 60 to 150."""
    events = [
        gpu("mm_1", 0, 60),
        gpu("Memcpy HtoD", 40, 110, "gpu_memcpy"),
        watts(0, 100),
        watts(100, 10),
        watts(200, 0),
    ]
    rows = {row["Name"]: row["Energy"] for row in table(trace(events, dialect=Dialect.TORCH))}
    assert rows == {"mm_[N]": 4000 + 1000, "Memcpy HtoD": 1000 + 4000 + 500, "[idle]": 500}


def test_parts_add_up_to_the_nanojoule() -> None:
    events = [gpu(f"k{chr(97 + number)}", 3 * number, 3.7) for number in range(20)]
    rows = table(trace([*events, watts(0, 33.3), watts(61.7, 0)], dialect=Dialect.TORCH))
    assert sum(round(row["Energy"] * 1000) for row in rows) == round(33.3 * 61_700)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -5.0, 1e300])
def test_absurd_power_is_no_energy(value: float) -> None:
    events = [gpu("mm", 0, 60), watts(0, value), watts(100, 0)]
    made = trace(events, dialect=Dialect.TORCH)
    calculate_stats(made, Options())
    assert "energy" not in made.tables


def test_without_power_there_is_no_table() -> None:
    made = trace([gpu("mm", 0, 60)], dialect=Dialect.TORCH)
    calculate_stats(made, Options())
    assert "energy" not in made.tables
