"""The budget of a recorder's CPU time (`--max-cpu`): when sampling is thinned to keep to it, and when restored.

Nothing here reads a clock or a counter: a session passes in what was used, and applies the levels that come out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, log2

NEAR = 0.85  # of the budget: sampling is thinned here, before the budget is passed
FAR = 0.4  # of the budget: a level may be restored, which at most doubles the use
SHORTEST_S = 5.0  # over which use is measured: the recorder works in bursts, for example when it begins another file
WINDOW_S = 60.0
CALM_S = 60.0  # of use below FAR until a level is restored
MOST_CALM_S = 960.0
SPREAD_S = 600.0  # over which the cost of a child that has ended counts, such as one that has written a capture
SLOWEST_METRICS_NS = 10_000_000_000


@dataclass(frozen=True)
class Level:
    """How densely to sample; 0: not at all."""

    cpu_hz: int  # CPU samples per second and CPU
    metric_interval_ns: int


def levels(full: Level) -> tuple[Level, ...]:
    """Returns the levels from `full` on: CPU samples are halved to 1 Hz, then none; then metrics get rarer."""
    found = [full]
    while found[-1].cpu_hz:
        found.append(Level(found[-1].cpu_hz // 2, full.metric_interval_ns))
    while 0 < found[-1].metric_interval_ns < SLOWEST_METRICS_NS:
        found.append(Level(0, min(found[-1].metric_interval_ns * 2, SLOWEST_METRICS_NS)))
    return tuple(found)


@dataclass(frozen=True)
class Step:
    """What a budget asks for."""

    level: Level
    share: float  # of one CPU: the use that led to it
    thinner: bool
    passed: bool = False  # nothing can be thinned any more, and the budget is passed


class Budget:
    """Decides about levels by what was used in a sliding window."""

    def __init__(self, share: float, full: Level) -> None:
        """Begins with the full level.

        Args:
            share: of one CPU that may be used, above 0.
            full: what is sampled as long as there is room.
        """
        self._share, self._levels, self._at = share, levels(full), 0
        self._samples: deque[tuple[float, float]] = deque()  # seconds, and CPU seconds used until then
        self._ended: deque[tuple[float, float]] = deque()  # when children ended, and what they had used
        self._ended_s: float | None = None
        self._calm_since: float | None = None
        self._calm_s = CALM_S
        self._restored_at: float | None = None
        self._was_passed = False

    @property
    def level(self) -> Level:
        """What is to be sampled now."""
        return self._levels[self._at]

    def add(self, now_s: float, used_s: float, ended_s: float = 0.0) -> Step | None:
        """Takes a measurement; call it about once a second.

        Args:
            now_s: the time, from any start.
            used_s: CPU seconds that were used until now, by all that runs.
            ended_s: those of children that have ended, until now; their cost counts over SPREAD_S.

        Returns:
            The step to take; None if nothing changes.
        """
        self._add_ended(now_s, ended_s)
        self._samples.append((now_s, used_s))
        while len(self._samples) > 2 and now_s - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()
        first_s, first_used_s = self._samples[0]
        if now_s - first_s < SHORTEST_S:
            return None
        share = max(used_s - first_used_s, 0.0) / (now_s - first_s) + sum(each for _, each in self._ended) / SPREAD_S
        if share > NEAR * self._share:
            return self._thinned(now_s, share)
        self._was_passed = False
        return self._restored(now_s, share)

    def _add_ended(self, now_s: float, ended_s: float) -> None:
        if self._ended_s is not None and ended_s > self._ended_s:
            self._ended.append((now_s, ended_s - self._ended_s))
        self._ended_s = ended_s
        while self._ended and now_s - self._ended[0][0] >= SPREAD_S:
            self._ended.popleft()

    def _thinned(self, now_s: float, share: float) -> Step | None:
        self._calm_since = None
        if self._at == len(self._levels) - 1:
            if share <= self._share or self._was_passed:
                return None
            self._was_passed = True
            return Step(self.level, share, thinner=True, passed=True)
        if self._restored_at is not None and now_s - self._restored_at < self._calm_s:
            self._calm_s = min(self._calm_s * 2, MOST_CALM_S)  # it was restored too early
        # A level halves at most: as many are skipped as a use far above the budget needs.
        skipped = max(1, ceil(log2(share / (NEAR * self._share))))
        return self._to(min(self._at + skipped, len(self._levels) - 1), share)

    def _restored(self, now_s: float, share: float) -> Step | None:
        if share > FAR * self._share or not self._at:
            self._calm_since = None
            return None
        if self._calm_since is None:
            self._calm_since = now_s
        if now_s - self._calm_since < self._calm_s:
            return None
        self._calm_since, self._restored_at = None, now_s
        return self._to(self._at - 1, share)

    def _to(self, at: int, share: float) -> Step:
        thinner, self._at = at > self._at, at
        last = self._samples[-1]
        self._samples.clear()  # what was used before says nothing of this level
        self._samples.append(last)
        return Step(self.level, share, thinner)
