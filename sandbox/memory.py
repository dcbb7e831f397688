"""Limits the memory of this process, because a small untrusted file may expand to terabytes.

As a malicious file can defeat any estimate of its memory, the kernel enforces the limit: an allocation beyond it fails,
and the verb ends with a message. Memory to which this process writes counts. Pages of program files, about 100 MB, do
not count, because they belong to the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Callable
from pathlib import Path

from iaprof.basics.heap import Parameter, set_parameter
from iaprof.basics.libraries import look_for_pandas

DEFAULT_BYTES = 2 << 30
MIN_BYTES = 256 << 20  # Python, NumPy and Arrow take a third of it
_MIN_DEFAULT_BYTES = 512 << 20
_FRACTION = 2  # available memory is divided by it
_CODE_BYTES = 128 << 20  # pages of libraries' files, which are resident but do not count
_MOST_THREADS = 8  # of Arrow; each thread's stack counts as 8 MB
MALLOC_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Environment variables that make Arrow allocate with malloc.

Its other allocators reserve more than a gigabyte at once, which would count as used.
"""
_limit: int | None = None


def limit() -> int | None:
    """Returns the current limit in bytes; None if there is none."""
    return _limit


def default_limit() -> int:
    """Returns the default limit in bytes: 2 GiB, or `half_of_available()` if that is less."""
    return min(DEFAULT_BYTES, half_of_available())


def half_of_available() -> int:
    """Returns half of the available memory in bytes, as two processes may work at once, but at least 512 MiB."""
    return max(available() // _FRACTION, _MIN_DEFAULT_BYTES)


def available(root: Path = Path("/")) -> int:
    """Returns the memory in bytes that the machine and this process's cgroups have available.

    Args:
        root: folder with /proc and /sys.
    """
    found = [_machine(root), *_cgroups(root)]
    return min((each for each in found if each is not None), default=1 << 62)


def use_malloc() -> None:
    """Imports Arrow so that it allocates with malloc, in a process that has not imported it yet."""
    before = {name: os.environ.get(name) for name in MALLOC_ENVIRONMENT}
    os.environ.update(MALLOC_ENVIRONMENT)
    try:
        look_for_pandas()  # imports Arrow, which chooses the allocator
    finally:
        for name, value in before.items():  # child processes, such as the user's programs, inherit the environment
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def limit_memory(bytes_: int) -> None:
    """Limits the memory of this process; child processes inherit about the same limit.

    Args:
        bytes_: maximum of resident memory. Memory that is reserved now but unused does not count.
    """
    global _limit
    set_parameter(Parameter.ARENA_MAX, 1)  # what one thread freed serves the others, and no thread reserves a heap
    use_malloc()
    import numpy  # noqa: F401 (so that its threads' stacks are reserved before the limit is computed)
    import pyarrow as pa

    pa.set_cpu_count(min(pa.cpu_count(), _MOST_THREADS))
    size, resident = used()
    wanted = bytes_ - _CODE_BYTES + max(size - resident, 0)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    _limit = bytes_


def lift_limit() -> None:
    """Removes the limit for this process and later child processes; call it when all untrusted files have been read."""
    global _limit
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    _limit = None


def used() -> tuple[int, int]:
    """Returns the bytes of this process that the kernel counts as data, and its resident anonymous bytes."""
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
    """Returns the bytes that this cgroup and its ancestors have left (cgroup v2, or the memory controller of v1)."""
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
            # In a container the path may be the host's, while the top folder is this process's own cgroup.
            for folder in (own, *own.parents):
                if folder == top.parent:
                    break
                with contextlib.suppress(OSError, ValueError):  # ValueError: "max", which means no limit
                    unused = int((folder / most).read_text()) - int((folder / used).read_text())
                    found.append(max(unused + _reclaimable(folder), 0))
    return found


def _reclaimable(folder: Path) -> int:
    """Returns the bytes of a cgroup's page cache, which the kernel reclaims when necessary."""
    with contextlib.suppress(OSError, ValueError):
        stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return sum(int(stats.get(name, 0)) for name in ("inactive_file", "active_file"))
    return 0


_LIBRARY = "libstdc++.so.6"  # used by all of Arrow's libraries
_BAD_ALLOC = b"St9bad_alloc"  # the name in std::bad_alloc's type information
_Handler = ctypes.CFUNCTYPE(None)
_kept_handlers: list[object] = []  # functions that libstdc++ calls, which must not be garbage-collected


def on_uncaught_bad_alloc(act: Callable[[], None]) -> None:
    """Registers `act`, which is called when an allocation fails and no C++ code catches the exception.

    Arrow turns most failed allocations into errors, but not all. If `act` returns, the process aborts, as after any
    other uncaught C++ exception.

    Args:
        act: should first remove limits on memory, as Python may have none left, and then end the process.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return
    library.__cxa_current_exception_type.restype = ctypes.POINTER(ctypes.c_char_p)
    library._ZSt13set_terminatePFvvE.restype = _Handler
    type_of_exception = library.__cxa_current_exception_type

    def terminate() -> None:
        kind = type_of_exception()  # std::type_info: pointers to a virtual table and to the name
        if kind and kind[1] == _BAD_ALLOC:
            act()
        before()

    handler = _Handler(terminate)
    before = library._ZSt13set_terminatePFvvE(handler)
    _kept_handlers.append(handler)
