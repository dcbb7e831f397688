"""Limits the share of time that is spent on something."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Budget:
    """A share of the time; unused time adds up to at most `most_s` seconds."""

    def __init__(self, share: float, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins with `most_s` seconds."""
        self._share, self._most_s, self._clock = share, most_s, clock
        self._left_s, self._at = most_s, clock()

    @property
    def wait_s(self) -> float:
        """Seconds until time is available; 0 if it is now."""
        now = self._clock()
        self._left_s = min(self._left_s + self._share * (now - self._at), self._most_s)
        self._at = now
        return max(0.0, -self._left_s / self._share)

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """Counts the time of the `with` block as spent."""
        began = self._clock()
        try:
            yield
        finally:
            self._left_s -= self._clock() - began
