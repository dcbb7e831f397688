"""The result of a check, and what its text and command are made with."""

from __future__ import annotations

import shutil
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


_LONGEST_PATH = 120


def shortened(path: str) -> str:
    """Shortens a path so that it can be read."""
    if len(path) <= _LONGEST_PATH:
        return path
    half = (_LONGEST_PATH - 3) // 2
    return f"{path[:half]}...{path[-half:]}"


def install_command(debian: str, fedora: str) -> str:
    """Returns the command, given the package's names in Debian and Ubuntu, and in Fedora; empty on other systems."""
    if shutil.which("apt"):
        return f"sudo apt install {debian}"
    if shutil.which("dnf"):
        return f"sudo dnf install {fedora}"
    return ""
