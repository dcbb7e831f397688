"""Energy over time adds up to the table of energy, and is that of the slices in each span."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from iaprof.timelines.options import Options
from iaprof.timelines.stages.summaries import calculate_stats
from iaprof.timelines.trace import Dialect, Trace
from iaprof.timelines.views.energy import over_time
from unit.timelines.traces import Event, trace


def gpu(name: str, ts: float, dur: float, pid: int = 0) -> Event:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": pid, "tid": 7, "ts": ts, "dur": dur}


def watts(ts: float, value: float, pid: int = 0) -> Event:
    return {"ph": "C", "name": "Power", "pid": pid, "ts": ts, "args": {"Watts": value}}


def with_energy(*events: Event) -> Trace:
    made = trace(events, dialect=Dialect.TORCH)
    calculate_stats(made, Options())
    return made


def test_spans_have_the_energy_of_what_ran_in_them() -> None:
    """100 W for 400 us: `mm` runs for 200 us, beside `add` in the second half of it; then the device is idle to 390."""
    made = with_energy(gpu("mm", 0, 200), gpu("add", 100, 100), gpu("end", 390, 10), watts(0, 100), watts(400, 100))
    found = over_time(made, [(0, "mm"), (0, "add"), (0, "[idle]")])
    # a span is 1 us, in which 100 W are 100 uJ
    assert found.nanojoules[0].tolist() == [100_000] * 100 + [50_000] * 100 + [0] * 200
    assert found.nanojoules[1].tolist() == [0] * 100 + [50_000] * 100 + [0] * 200
    assert found.nanojoules[2].tolist() == [0] * 200 + [100_000] * 190 + [0] * 10
    assert np.flatnonzero(found.calls[1]).tolist() == [100]
    assert (found.ranks, found.totals.tolist()) == ([0], [[100_000] * 400])


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 900), st.integers(0, 400), st.integers(0, 1)),
        min_size=1,
        max_size=20,
    ),
    st.lists(st.integers(0, 200), min_size=2, max_size=6),
)
def test_all_spans_add_up_to_the_table(slices: list[tuple[str, int, int, int]], power: list[int]) -> None:
    # given: power from the first slice's start to the last one's end only, as spans are of this time
    events = [gpu(name, ts, dur, pid) for name, ts, dur, pid in slices]
    low, high = min(ts for _, ts, *_ in slices), max(ts + dur for _, ts, dur, _ in slices)
    at = np.linspace(low, high, len(power)).astype(int).tolist()
    made = with_energy(*events, *(watts(ts, value, pid) for pid in (0, 1) for ts, value in zip(at, power, strict=True)))
    rows = made.tables["energy"].to_pylist() if "energy" in made.tables else []
    # when
    found = over_time(made, [(row["pid"], row["Name"]) for row in rows])
    # then
    for row, nanojoules, calls in zip(rows, found.nanojoules, found.calls, strict=True):
        assert nanojoules.sum() / 1000 == pytest.approx(row["Energy"], abs=1)
        assert calls.sum() == row["Calls"]
    for pid, totals in zip(found.ranks, found.totals, strict=True):
        assert totals.sum() / 1000 == pytest.approx(sum(row["Energy"] for row in rows if row["pid"] == pid), abs=1)
