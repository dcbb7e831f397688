"""A capture that is not a local file: an object in a store, read in ranges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO


@dataclass(frozen=True)
class StoredFile:
    """What CaptureReader needs of it; `str` of it is its name for messages."""

    name: str
    size: int  # bytes
    open: Callable[[], BinaryIO]  # opens it; whoever gave this closes what it opens

    def __str__(self) -> str:
        return self.name
