"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How serious it is."""

    OK = "ok"
    WARNING = "warning"  # recording works, but something will be missing, or may be
    PROBLEM = "problem"  # recording cannot work


@dataclass(frozen=True)
class Check:
    """One line of `iaprof check`."""

    group: str
    name: str
    level: Level
    text: str
    mend: str = ""  # a command that fixes it, if one does
    file: str = ""  # the file that it is about
