"""Root folders of processes that have a root or a mount namespace of their own, also after the processes have ended.

Stacks are named when the recording ends, and with `-- COMMAND` the processes have ended by then. The path of a root
folder in the recorder's mount namespace (chroot) is written down. Another mount namespace (a container) vanishes with
its last process, unless a descriptor keeps it. That also keeps its file systems mounted, so few are kept, and while
the recording goes on they are released soon after their processes have ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from iaprof.record.capture.journal import Journal
from iaprof.record.capture.spool import FrameKind
from iaprof.record.loop import Loop
from iaprof.record.symbolize.containers import describe

MOST_KEPT = 64  # mount namespaces, or roots in them
MOST_OF_ONE_USER = 16
LINGER_NS = 10_000_000_000  # how long one is kept after its last known process has ended
LOOK_NS = 1_000_000_000
MOST_PROCESSES = 4096  # that are remembered
_MOST_OF_ONE_ROOT = 256
_MOST_GENERATIONS = 8

_Place = tuple[str, str]  # mount namespace as "mnt:[inode]", and the root folder as we see it


@dataclass(frozen=True, slots=True)
class _Told:
    """What was written about a process."""

    place: _Place
    about: dict[str, int | str | None]


@dataclass(eq=False, slots=True)
class _Kept:
    """A root in another mount namespace."""

    place: _Place
    uid: int  # whose process it was that had it first
    root: int  # descriptor of the folder
    namespace: int  # descriptor, which keeps everything in there mounted
    pids: dict[int, None] = field(default_factory=dict)  # processes in it, the latest last
    empty_since: int = 0  # 0 while one of them lives


class Roots:
    """The roots of processes that use the GPU, where they are not ours."""

    def __init__(self) -> None:
        self._own = _place(os.getpid())
        self._kept: dict[_Place, _Kept] = {}
        self._told: dict[int, _Told] = {}  # processes with other roots than ours
        self._refused = 0
        self._looked_ns = time.monotonic_ns()

    def start(self, journal: Journal, loop: Loop) -> None:
        """Begins to write to the journal, and to be called by the loop."""
        self._journal = journal
        loop.every(LOOK_NS, self.look)

    def keep(self, pid: int) -> None:
        """Lets the paths of a process be looked up after it has ended; may be called again."""
        place = _place(pid)
        if place is None:
            return
        if place == self._own:
            self._told.pop(pid, None)
            return
        # A process inherits mappings from the processes that forked it, and these may not use the GPU.
        for each in _with_ancestors(pid, place):
            self._keep(each, place)

    def _keep(self, pid: int, place: _Place) -> None:
        if pid in self._told and self._told[pid].place == place:
            return
        about = describe(pid)
        if self._own is not None and place[0] == self._own[0]:
            about["root"] = place[1]
        else:
            about["root"] = ""  # no path of ours leads there: only the descriptor does
            self._keep_namespace(pid, place, about["uid"])
        self._told.pop(pid, None)
        self._told[pid] = _Told(place, about)
        if len(self._told) > MOST_PROCESSES:
            del self._told[next(iter(self._told))]
        self._journal.json(FrameKind.PROCESS, about)

    def _keep_namespace(self, pid: int, place: _Place, uid: int | str | None) -> None:
        if place not in self._kept:
            if not isinstance(uid, int):
                return  # it ended meanwhile: nobody knows whose share it would count for
            if len(self._kept) >= MOST_KEPT or (uid and self._count_of(uid) >= MOST_OF_ONE_USER):
                self._refused += 1
                return
            if (opened := _open(pid, place[0])) is None:
                return  # it ended meanwhile
            self._kept[place] = _Kept(place, uid, *opened)
        pids = self._kept[place].pids
        pids[pid] = None
        if len(pids) > _MOST_OF_ONE_ROOT:
            del pids[next(iter(pids))]

    def _count_of(self, uid: int) -> int:
        return sum(kept.uid == uid for kept in self._kept.values())

    def look(self) -> None:
        """Releases namespaces without processes, and writes down how many processes' namespaces could not be kept."""
        now = time.monotonic_ns()
        for kept in list(self._kept.values()):
            if any(_place(pid) == kept.place for pid in reversed(kept.pids)):
                kept.empty_since = 0
            elif not kept.empty_since:
                kept.empty_since = now
            elif now - kept.empty_since > LINGER_NS:
                self._give_back(kept)
        if self._refused:
            detail = (
                f"processes in more than {MOST_KEPT} mount namespaces, or {MOST_OF_ONE_USER} of one user: "
                "files that only they have are not named if they end before the recording"
            )
            self._journal.loss("names", "mount namespaces", self._refused, detail, self._looked_ns, now)
            self._refused = 0
        self._looked_ns = now

    def _give_back(self, kept: _Kept) -> None:
        del self._kept[kept.place]
        os.close(kept.root)
        os.close(kept.namespace)

    def tell_again(self) -> None:
        """Writes what is known of processes into a new spool, for the last time if a process has ended."""
        for pid, told in list(self._told.items()):
            self._journal.json(FrameKind.PROCESS, told.about)
            if told.place not in self._kept and _place(pid) != told.place:
                del self._told[pid]

    def by_process(self) -> dict[int, int]:
        """A descriptor of the root of each process whose namespace is kept; Roots closes it."""
        return {pid: kept.root for kept in self._kept.values() for pid in kept.pids}

    def close(self) -> None:
        """Releases all namespaces."""
        for kept in list(self._kept.values()):
            self._give_back(kept)


def _place(pid: int) -> _Place | None:
    """The root of a process; None if it has ended. Asks no file system."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt"), os.readlink(f"/proc/{pid}/root")
    except OSError:
        return None


def _with_ancestors(pid: int, place: _Place) -> Iterator[int]:
    """A process and its ancestors, up to the first that has another root."""
    for _ in range(_MOST_GENERATIONS):
        yield pid
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            pid = int(stat[stat.rindex(b")") + 1 :].split()[1])
        except (OSError, ValueError):
            return  # it ended meanwhile
        if _place(pid) != place:
            return


def _open(pid: int, namespace: str) -> tuple[int, int] | None:
    """Descriptors of a process's root and mount namespace; None if it no longer has that namespace."""
    opened: list[int] = []
    try:
        opened.append(os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        opened.append(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
        if os.readlink(f"/proc/self/fd/{opened[1]}") == namespace:
            return opened[0], opened[1]
    except OSError:
        pass
    for fd in opened:
        os.close(fd)
    return None
