"""What this process has used so far: a profiler has to say what it costs."""

from __future__ import annotations

import resource
from pathlib import Path


def cpu_seconds() -> float:
    """User and system time of this process, without its children's."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def children_cpu_seconds() -> float:
    """User and system time of this process's children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def peak_bytes() -> int:
    """The most memory that it had; getrusage would tell that of who started it, if that was more."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
