"""Limits: sysctls, resource limits of this process, and disk space for the capture."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

from iaprof.bpf.perf_event import possible_cpus
from iaprof.record.checks.result import Check, Level

GROUP = "Limits"
EVENTS_PER_CPU = 2  # side-band, and CPU samples
OTHER_FILES = 256  # streams, probes of libraries, metrics, maps, and what Python opens
LITTLE_ROOM, NO_ROOM = 2 << 30, 64 << 20  # bytes; a GPU writes a gigabyte per second at worst
_SYSCTL = Path("/proc/sys")


def checks(folder: Path, paranoid: Iterable[str]) -> Iterator[Check]:
    """Checks limits, and the folder of the capture.

    Args:
        folder: the folder.
        paranoid: the sysctls of the drivers under which EU stalls may be recorded, such as dev.xe.observation_paranoid.
    """
    yield _perf_event_paranoid(_read("kernel/perf_event_paranoid"))
    for name in paranoid:
        yield _stalls_paranoid(name, _read(name.replace(".", "/")))
    yield _open_files()
    yield _locked_memory()
    yield _room(folder)


def _read(name: str) -> int | None:
    try:
        return int((_SYSCTL / name).read_text())
    except (OSError, ValueError):
        return None


def _perf_event_paranoid(value: int | None) -> Check:
    if value is None:
        text = "the kernel has no perf events (CONFIG_PERF_EVENTS)"
        return Check(GROUP, "perf events", Level.PROBLEM, text)
    bound = "root is exempt" if value > -1 else "everyone may use all of them"
    return Check(GROUP, "perf events", Level.OK, f"perf_event_paranoid is {value}: {bound}")


def _stalls_paranoid(name: str, value: int | None) -> Check:
    if value is None:
        text = f"no {name}: {name.split('.')[1]} is not loaded, or too old"
        return Check(GROUP, "EU stalls", Level.WARNING, text)
    bound = "root is exempt" if value else "everyone may sample"
    return Check(GROUP, "EU stalls", Level.OK, f"{name} is {value}: {bound}")


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = EVENTS_PER_CPU * len(possible_cpus()) + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        text = f"{soft:,}; this machine's CPUs need about {needed:,}"
        mend = f"ulimit -n {needed}" if hard == resource.RLIM_INFINITY or hard >= needed else f"ulimit -Hn {needed}"
        return Check(GROUP, "open files", Level.PROBLEM, text, mend)
    return Check(GROUP, "open files", Level.OK, f"{_limit(soft)}; about {needed:,} are needed")


def _locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10:,} KiB, which does not apply to root"
    return Check(GROUP, "locked memory", Level.OK, text)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _room(folder: Path) -> Check:
    try:
        status = os.statvfs(folder)
    except OSError as error:
        return Check(GROUP, "disk", Level.PROBLEM, f"{folder}: {error.strerror}; name another folder with -o")
    if not os.access(folder, os.W_OK | os.X_OK):
        return Check(GROUP, "disk", Level.PROBLEM, f"{folder} cannot be written to; name another folder with -o")
    free = status.f_bavail * status.f_frsize
    text = f"{free / 1e9:,.1f} GB free in {folder}"
    if free < NO_ROOM:
        return Check(GROUP, "disk", Level.PROBLEM, text)
    if free < LITTLE_ROOM:
        return Check(GROUP, "disk", Level.WARNING, f"{text}: a busy GPU fills them in seconds or minutes")
    return Check(GROUP, "disk", Level.OK, text)
