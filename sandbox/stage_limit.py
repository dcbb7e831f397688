"""A limit of time for one stage of the work in the sandbox's child."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator
from types import FrameType


class OutOfTime(BaseException):
    """A stage took too long. No Exception, so that no library can take it for one of its own."""


@contextlib.contextmanager
def stage_limit(seconds: float) -> Generator[None]:
    """Inside this, OutOfTime is raised after that many seconds, as soon as Python code runs (SIGALRM, main thread)."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
