"""The interface of reader modules, which run in the sandbox: each defines `operations`.

    def operations(stage_seconds: float) -> dict[str, Operation]: ...

This function runs while files can still be opened. An operation gets parameters (JSON), data and open files, and
returns JSON or bytes, or raises Refusal. The files are closed afterwards.
`stage_limit` ends a stage of an operation that takes too long.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, TypeAlias

Operation: TypeAlias = Callable[[dict[str, Any], bytearray, list[int]], object]


class Refusal(Exception):
    """A request cannot be fulfilled; the text is for the user."""

    def __init__(self, kind: str, message: str, details: object = None) -> None:
        """Args: a name that distinguishes refusals for the parent; the text; JSON."""
        super().__init__(message)
        self.kind = kind
        self.details = details


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
