"""Waits for a state; a test that sleeps for a time instead fails on a busy machine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONGEST_WAIT_S = 300.0  # for any state: it does not come if it has not come by then


def until(
    is_so: Callable[[], object], process: subprocess.Popen[Any] | None = None, longest_s: float = LONGEST_WAIT_S
) -> None:
    """Waits until a condition holds.

    Args:
        is_so: the condition.
        process: must not end before.
        longest_s: for how long to wait.

    Raises:
        AssertionError: the process ended, with what it wrote to stderr; or the time is over.
    """
    deadline, pause_s = time.monotonic() + longest_s, 0.005
    while not is_so():
        if process is not None and process.poll() is not None:
            raise AssertionError(_said(process))
        assert time.monotonic() < deadline
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.1)  # each check takes time from what it waits for


def _said(process: subprocess.Popen[Any]) -> str:
    """Returns what a process that ended wrote to stderr, which its children may still have open."""
    if process.stderr is None:
        return ""
    os.set_blocking(process.stderr.fileno(), False)
    try:
        return os.read(process.stderr.fileno(), 1 << 16).decode(errors="replace")
    except BlockingIOError:
        return ""


def is_running(pid: int) -> bool:
    """Returns whether there is a process of that number, other than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False
