"""A limit on the memory of this process: a small file from a stranger may expand to terabytes.

Whoever makes a file can make any estimate of its memory wrong, so the kernel enforces the limit: an allocation beyond
it fails, and the verb ends with one sentence. Memory that this process writes to counts. Pages of program files, about
100 MB, do not: they belong to the page cache.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

USUAL_BYTES = 2 << 30
LEAST_BYTES = 256 << 20  # Python, NumPy and Arrow take a third of it
_LEAST_USUAL_BYTES = 512 << 20
_SHARE = 2  # of what is available, one half
_CODE_BYTES = 128 << 20  # pages of libraries' files, which are in memory but not counted
_MOST_THREADS = 8  # of Arrow; the stack of each counts with 8 MB
MALLOC = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
"""The environment of a process whose Arrow takes its memory from malloc.

Its other allocators reserve a gigabyte and more at once, which would count as if it were used.
"""
_limit: int | None = None


def limit() -> int | None:
    """The current limit, bytes; None if none was set."""
    return _limit


def usual_limit() -> int:
    """The default limit: 2 GiB, or `share()` if that is less: bytes."""
    return min(USUAL_BYTES, share())


def share() -> int:
    """Half of the available memory, because two processes may work at once, but at least 512 MiB: bytes."""
    return max(available() // _SHARE, _LEAST_USUAL_BYTES)


def available(root: Path = Path("/")) -> int:
    """How much memory is available to this process, from the machine and from its cgroups: bytes.

    Args:
        root: where /proc and /sys are.
    """
    found = [_machine(root), *_cgroups(root)]
    return min((each for each in found if each is not None), default=1 << 62)


def use_malloc() -> None:
    """Has Arrow take its memory from malloc, in a process that has not imported it."""
    before = {name: os.environ.get(name) for name in MALLOC}
    os.environ.update(MALLOC)
    try:
        import pyarrow  # noqa: F401 (with that it is decided)
    finally:
        for name, value in before.items():  # the environment is also that of the programs that are started
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def limit_memory(bytes_: int) -> None:
    """Limits the memory of this process; processes that it starts inherit about the same limit.

    Args:
        bytes_: of resident memory, at most. Memory that was reserved before and is not used does not count.
    """
    global _limit
    use_malloc()
    import numpy  # noqa: F401 (its threads' stacks are there now)
    import pyarrow as pa

    pa.set_cpu_count(min(pa.cpu_count(), _MOST_THREADS))
    size, resident = _used()
    wanted = bytes_ - _CODE_BYTES + max(size - resident, 0)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    _limit = bytes_


def lift_limit() -> None:
    """Removes the limit, for this process and those that it starts; call it when all untrusted files are read."""
    global _limit
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    _limit = None


def _used() -> tuple[int, int]:
    """Bytes of this process that the kernel counts as data, and how many anonymous bytes are in memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    size, resident = (int(fields.get(name, "0 kB").split()[0]) << 10 for name in ("VmData", "RssAnon"))
    return size, resident


def _machine(root: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _cgroups(root: Path) -> list[int]:
    """How much memory our cgroup and those above it have left; cgroup v2, and the memory controller of v1."""
    found = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                top, most, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                top, most, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            own = top / path.strip("/")
            # In a container the path may be the host's, and the folder at the top our own.
            for folder in (own, *own.parents):
                if folder == top.parent:
                    break
                with contextlib.suppress(OSError, ValueError):  # "max" is no number
                    room = int((folder / most).read_text()) - int((folder / used).read_text())
                    found.append(max(room + _reclaimable(folder), 0))
    return found


def _reclaimable(folder: Path) -> int:
    """Page cache of a cgroup, which the kernel takes back when it needs it."""
    with contextlib.suppress(OSError, ValueError):
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return sum(int(stats.get(name, 0)) for name in ("inactive_file", "active_file"))
    return 0
