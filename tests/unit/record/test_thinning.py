"""What sources do when they are told to sample less: the clocks of CPUs and the metrics."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from iaprof.record.budget import Level
from iaprof.record.sources import cpu_samples, metrics
from iaprof.record.sources.cpu_samples import CpuSamples
from iaprof.record.sources.metrics import Metering


class Clock:
    """The clocks of CPUs, which note what they are told."""

    def __init__(self, _program: int, _hz: int) -> None:
        self.told: list[Any] = []

    def enable(self, on: bool) -> None:
        self.told.append(on)

    def change(self, hz: int) -> None:
        self.told.append(hz)

    def close(self) -> None:
        pass


def test_clocks_get_slower_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_samples, "CpuClock", Clock)
    source = CpuSamples({}, 49)
    told = source._clock.told  # type: ignore[attr-defined]
    source.resume()
    source.thin(Level(49, 7))  # no change
    source.thin(Level(24, 7))
    source.thin(Level(0, 7))
    assert told == [True, 24, True, False]
    # while it pauses, nothing starts; after the pause, what is in force
    source.pause()
    source.thin(Level(1, 7))
    source.resume()
    assert told[4:] == [False, 1, False, True]
    source.thin(Level(0, 7))
    source.pause()
    source.resume()
    assert told[8:] == [False, False, False]


def test_metrics_get_rarer_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a loop whose actions are called here, each before it is due
    samples, asked = list[None](), list[tuple[int, Any]]()
    made = SimpleNamespace(problems=[], add=None, due=0, sample=lambda: samples.append(None), close=lambda: None)
    monkeypatch.setattr(metrics, "Metrics", lambda _: made)
    stalls: Any = SimpleNamespace(metered=list, open_metrics=lambda: None)
    loop: Any = SimpleNamespace(at=lambda due, action: asked.append((due, action)))
    source = Metering(stalls, 5_000_000)
    source.start(SimpleNamespace(inform=None), loop)  # type: ignore[arg-type]
    source.resume()

    def spans(level: Level, number: int) -> list[int]:
        source.thin(level)
        dues = [asked[-1][0]]
        for _ in range(number):
            asked[-1][1]()
            dues.append(asked[-1][0])
        return [later - earlier for earlier, later in itertools.pairwise(dues)]

    # when, then
    assert spans(Level(0, 50_000_000), 3) == [50_000_000] * 3
    assert spans(Level(0, 5_000_000), 10) == [5_000_000] * 10
    assert len(samples) == 13
