"""CPU time and memory that this process has used so far: a profiler must say what it costs."""

from __future__ import annotations

import resource
from pathlib import Path


def cpu_seconds() -> float:
    """Returns user and system time of this process, without its children's."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def children_cpu_seconds() -> float:
    """Returns user and system time of this process's children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def peak_bytes() -> int:
    """Returns the peak resident memory. Not from getrusage: its value can be that of the parent before exec."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
