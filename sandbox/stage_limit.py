"""A time limit for one stage of an operation in the sandbox's child."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator
from types import FrameType


class OutOfTime(BaseException):
    """A stage took too long. It is not an Exception, so that no library catches it with its own errors."""


@contextlib.contextmanager
def stage_limit(seconds: float) -> Generator[None]:
    """Raises OutOfTime inside the `with` after this time, as soon as Python code runs (SIGALRM; main thread only)."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
