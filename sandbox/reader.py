"""The interface of reader modules, which run in the sandbox: each defines `operations`.

    def operations(stage_seconds: float) -> dict[str, Operation]: ...

This function runs while files can still be opened. An operation gets parameters (JSON), data and open files, and
returns JSON or bytes, or raises Refusal. The files are closed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Operation: TypeAlias = Callable[[dict[str, Any], bytearray, list[int]], object]


class Refusal(Exception):
    """A request cannot be fulfilled; the text is for the user."""

    def __init__(self, kind: str, message: str, details: object = None) -> None:
        """Args: a name that distinguishes refusals for the parent; the text; JSON."""
        super().__init__(message)
        self.kind = kind
        self.details = details
