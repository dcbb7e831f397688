"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How good it is."""

    OK = "ok"
    WARNING = "warning"  # recording works, and something will be missing or cannot be told
    PROBLEM = "problem"  # recording cannot work


@dataclass(frozen=True)
class Check:
    """One line of `iaprof check`."""

    group: str
    name: str
    level: Level
    text: str
    mend: str = ""  # the command that makes it better, where one does
    file: str = ""  # that it is about
