"""How much of the time may be spent on something."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Budget:
    """A share of the time; what is not spent adds up, to so many seconds at most."""

    def __init__(self, share: float, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins with all of them."""
        self._share, self._most_s, self._clock = share, most_s, clock
        self._left_s, self._at = most_s, clock()

    @property
    def wait_s(self) -> float:
        """For how long there is nothing left; 0 if there is."""
        now = self._clock()
        self._left_s = min(self._left_s + self._share * (now - self._at), self._most_s)
        self._at = now
        return max(0.0, -self._left_s / self._share)

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """For what takes the time."""
        began = self._clock()
        try:
            yield
        finally:
            self._left_s -= self._clock() - began
