"""What runs in the sandbox: a module with `operations`, which prepares them while files may still be opened.

    def operations(stage_seconds: float) -> dict[str, Operation]: ...

An operation gets parameters (JSON), data and open files from its caller, and gives JSON or raises Refusal. The files
are closed when it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Operation: TypeAlias = Callable[[dict[str, Any], bytearray, list[int]], object]


class Refusal(Exception):
    """A request that cannot be fulfilled, for a reason that the user should read."""

    def __init__(self, kind: str, message: str, details: object = None) -> None:
        """`kind` is for the parent to tell refusals apart; `details` is JSON."""
        super().__init__(message)
        self.kind = kind
        self.details = details
