"""The budget: sampling is thinned before it is passed, restored gently, and each change is written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from iaprof.formats.header.budgets import thinned
from iaprof.record import budget
from iaprof.record.budget import (
    CALM_S,
    SLOWEST_METRICS_NS,
    SPREAD_S,
    WINDOW_S,
    Budget,
    BudgetKeeper,
    Level,
    Step,
    levels,
)
from iaprof.record.sources.source import Source

FULL = Level(49, 10_000_000)


class Recorder:
    """A recorder whose use depends on the level; a second at a time."""

    def __init__(self, budget: Budget, use: Callable[[Level], float]) -> None:
        self.budget, self.use = budget, use
        self.now = self.used = self.ended = 0.0
        self.steps: list[Step] = []
        self.shares: list[float] = []

    def run(self, seconds: int) -> list[Step]:
        before = len(self.steps)
        for _ in range(seconds):
            self.now += 1
            self.shares.append(self.use(self.budget.level))
            self.used += self.shares[-1]
            if (step := self.budget.add(self.now, self.used, self.ended)) is not None:
                self.steps.append(step)
        return self.steps[before:]


def test_levels_halve_cpu_samples_and_then_make_metrics_rarer() -> None:
    found = levels(FULL)
    assert [each.cpu_hz for each in found[:8]] == [49, 24, 12, 6, 3, 1, 0, 0]
    assert {each.metric_interval_ns for each in found[:7]} == {10_000_000}
    assert [each.metric_interval_ns for each in found[6:9]] == [10_000_000, 20_000_000, 40_000_000]
    assert found[-1] == Level(0, SLOWEST_METRICS_NS)
    assert levels(Level(0, 0)) == (Level(0, 0),)
    assert levels(Level(1, 0)) == (Level(1, 0), Level(0, 0))


def test_nothing_changes_within_the_budget() -> None:
    recorder = Recorder(Budget(0.01, FULL), lambda level: 0.008)
    assert recorder.run(1000) == []


def test_sampling_is_thinned_before_the_budget_is_passed() -> None:
    # given a use that grows slowly, mostly by samples
    growing = [0.005]

    def use(level: Level) -> float:
        growing[0] *= 1.002
        return 0.001 + growing[0] * level.cpu_hz / 49

    recorder = Recorder(Budget(0.01, FULL), use)
    steps = recorder.run(600)
    assert [step.level.cpu_hz for step in steps] == [24, 12]
    assert all(step.thinner and step.share < 0.01 for step in steps)
    assert max(recorder.shares) < 0.01


def test_a_use_far_above_skips_levels() -> None:
    recorder = Recorder(Budget(0.01, FULL), lambda level: 0.1 * level.cpu_hz / 49)
    (first, *_) = recorder.run(30)
    assert first.level.cpu_hz <= 3
    assert recorder.now < 60
    assert sum(recorder.shares[-10:]) / 10 < 0.01


def test_what_cannot_be_thinned_is_said_once_until_it_is_over() -> None:
    share = [0.05]
    recorder = Recorder(Budget(0.01, FULL), lambda level: share[0])
    steps = recorder.run(300)
    assert [step.passed for step in steps].count(True) == 1
    assert steps[-1].passed
    assert steps[-1].level == levels(FULL)[-1]
    share[0] = 0.006
    assert recorder.run(90) == []
    share[0] = 0.05
    assert [step.passed for step in recorder.run(30)] == [True]


def test_it_is_restored_gently() -> None:
    # given a recorder that was thinned because of a burst
    burst = [0.02]
    recorder = Recorder(Budget(0.01, FULL), lambda level: 0.001 + burst[0] * level.cpu_hz / 49)
    recorder.run(60)
    thin = recorder.budget.level
    assert thin.cpu_hz < 49
    # when it is over
    burst[0] = 0.0
    steps = recorder.run(int(CALM_S * 12))
    # then one level comes back at a time, with a pause between
    assert steps[0].level.cpu_hz in (thin.cpu_hz * 2, thin.cpu_hz * 2 + 1)
    assert not any(step.thinner for step in steps)
    assert recorder.budget.level == FULL
    assert len(steps) == levels(FULL).index(thin)


def test_what_is_restored_too_early_comes_back_ever_later() -> None:
    """A use that is low only while sampling is thin does not swing for ever."""
    recorder = Recorder(Budget(0.01, FULL), lambda level: 0.0095 if level == FULL else 0.003)
    recorder.run(24 * 3600)
    assert len(recorder.steps) < 2 * 24 * 3600 / 900
    assert len(recorder.steps) > 10


def test_the_cost_of_a_child_that_ended_is_spread() -> None:
    # given children that write captures: 0.6 s each, which is 0.1 % of ten minutes
    recorder = Recorder(Budget(0.01, FULL), lambda level: 0.005)
    for _ in range(6):
        recorder.ended += 0.6
        assert recorder.run(int(SPREAD_S)) == []
    # and one that takes more than there is
    recorder.ended += 6.0
    assert recorder.run(20)[0].thinner


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=200), st.floats(0.0001, 1))
def test_whatever_is_used(uses: list[float], share: float) -> None:
    budget = Budget(share, FULL)
    used = 0.0
    for second, use in enumerate(uses):
        used += use
        step = budget.add(float(second), used)
        assert step is None or step.level == budget.level
        assert budget.level in levels(FULL)
        assert len(budget._samples) <= WINDOW_S + 3


class Thinned(Source):
    """A source that notes what it is told, and uses what the test says."""

    used = 0.0

    def __init__(self) -> None:
        self.told: list[Level] = []

    def thin(self, level: Level) -> None:
        self.told.append(level)

    @property
    def probe_seconds(self) -> float:
        return self.used


class Written:
    """A journal."""

    def __init__(self) -> None:
        self.items: list[tuple[str, Any]] = []
        self.losses: list[tuple[Any, ...]] = []
        self.said: list[str] = []
        self.warn = self.said.append

    def append(self, name: str, item: object) -> None:
        self.items.append((name, json.loads(json.dumps(item))))

    def loss(self, *row: object) -> None:
        self.losses.append(row)


def test_each_change_is_told_to_sources_users_and_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr(budget, "cpu_seconds", lambda: 0.0)
    monkeypatch.setattr(budget, "children_cpu_seconds", lambda: 0.0)
    monkeypatch.setattr("iaprof.record.budget.time.monotonic_ns", lambda: clock[0])
    source, journal = Thinned(), Written()
    keeper = BudgetKeeper(0.01, FULL, [source], journal)  # type: ignore[arg-type]
    assert keeper.header() == {"max_cpu_percent": 1.0, "thinned": []}
    for _ in range(7):
        clock[0] += 1_000_000_000
        source.used += 0.009
        keeper.measure()
    assert source.told[0] == Level(24, 10_000_000)
    name, item = journal.items[0]
    assert name == "thinned"
    assert item == {"time_ns": 6_000_000_000, "cpu_hz": 24, "metric_interval_ns": 10_000_000, "percent": 0.9}
    assert journal.said[0] == (
        "24 CPU samples/s, metrics each 10 ms from now on, to stay within --max-cpu "
        "(0.90% of a CPU used, 1.00% allowed)"
    )
    # the next file begins with what is in force
    assert keeper.header()["thinned"] == [journal.items[-1][1]]
    # and a budget that cannot be kept to is a loss
    for _ in range(60):
        clock[0] += 1_000_000_000
        source.used += 0.5
        keeper.measure()
    assert [row[:3] for row in journal.losses] == [("budget", "passed", None)]
    assert len(journal.said) == len(journal.items) + 1


@pytest.mark.parametrize(
    "value", [None, 3, "x", {}, [], [3], [{"cpu_hz": "1"}], [{"cpu_hz": -1, "metric_interval_ns": 0}]]
)
def test_untrusted_headers(value: object) -> None:
    assert thinned({"thinned": value, "max_cpu_percent": value}) == ""


def test_a_sentence_without_a_budget() -> None:
    header = {"thinned": [{"cpu_hz": 12, "metric_interval_ns": 0}], "max_cpu_percent": "1"}
    assert thinned(header) == "sampling was changed once: at its lowest, 12 CPU samples/s, no metrics"
