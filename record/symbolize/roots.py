"""Keeps the root folders of processes with a root or mount namespace of their own, after the processes have ended.

Stacks are named when the recording ends, and the processes of `-- COMMAND` have ended by then. A root folder in the
recorder's mount namespace (chroot) is kept as a path. Another mount namespace (a container) vanishes with its last
process unless a descriptor keeps it. As that keeps its file systems mounted, too, few are kept, and while the recording
goes on they are released soon after their processes have ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from iaprof.bpf.accounts import ACCOUNTS, Places, describe
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.scope import Scope
from iaprof.record.spool import FrameKind

MOST_KEPT = 64  # roots in other mount namespaces
MOST_OF_ONE_USER = 16
LINGER_NS = 10_000_000_000  # how long a root is kept after the end of its last known process
RELEASE_NS = 1_000_000_000  # between two calls of `release_unused`
MOST_PROCESSES = 4096  # that are remembered
_MOST_OF_ONE_ROOT = 256
_MOST_GENERATIONS = 8

_Place = tuple[str, str]  # mount namespace as "mnt:[inode]", and the root folder as the recorder sees it


@dataclass(frozen=True, slots=True)
class _Described:
    """What was written to the spool about a process."""

    place: _Place
    about: dict[str, int | str | None]


@dataclass(eq=False, slots=True)
class _Kept:
    """A kept root in another mount namespace."""

    place: _Place
    account: str  # of the first process with this root
    root: int  # descriptor of the folder
    namespace: int  # descriptor, which keeps the namespace's file systems mounted
    pids: dict[int, None] = field(default_factory=dict)  # its processes, the latest last
    empty_since: int = 0  # 0 while one of its processes runs


class Roots:
    """The roots of processes that use the GPU, if they differ from ours."""

    def __init__(self, scope: Scope | None = None) -> None:
        """Begins with none; `scope` has the processes in scope, None for all."""
        self._scope = scope
        self._own = _place(os.getpid())
        self._kept: dict[_Place, _Kept] = {}
        self._places = Places(MOST_KEPT, MOST_OF_ONE_USER)
        self._described: dict[int, _Described] = {}  # processes with another root than ours
        self._ended: set[int] = set()  # those of them that have ended
        self._refused = 0
        self._released_ns = time.monotonic_ns()

    def start(self, journal: Journal, loop: Loop) -> None:
        """Starts writing to the journal, and releasing unused roots."""
        self._journal = journal
        loop.every(RELEASE_NS, self.release_unused)

    def keep(self, pid: int) -> None:
        """Makes the paths of a process in scope resolvable after its end; may be called again."""
        if self._scope is not None and pid in self._scope.others:
            return
        place = _place(pid)
        if place is None:
            return
        if place == self._own:
            if self._described.pop(pid, None) is not None:  # it has left its root, or another process has its pid
                self._forget_roots(pid)
                self._journal.json(FrameKind.PROCESS, describe(pid) | {"root": place[1]})
            return
        # A process inherits mappings from its ancestors, which may not use the GPU themselves.
        for relative in _with_ancestors(pid, place):
            self._keep(relative, place)

    def _keep(self, pid: int, place: _Place) -> None:
        if pid in self._described and self._described[pid].place == place and pid not in self._ended:
            return
        about = describe(pid)
        self._forget_roots(pid)
        self._ended.discard(pid)
        if self._own is not None and place[0] == self._own[0]:
            about["root"] = place[1]
        else:
            about["root"] = ""  # none of our paths leads there: only the descriptor does
            self._keep_namespace(pid, place, about["uid"])
        self._described.pop(pid, None)
        self._described[pid] = _Described(place, about)
        if len(self._described) > MOST_PROCESSES:
            del self._described[next(iter(self._described))]
        self._journal.json(FrameKind.PROCESS, about)

    def ended(self, pid: int) -> None:
        """Notes that a process has ended: another one may get its pid. What is known of it stays."""
        if pid in self._described:
            self._ended.add(pid)

    def _forget_roots(self, pid: int) -> None:
        """Forgets the roots of a process that had this pid before."""
        for kept in self._kept.values():
            kept.pids.pop(pid, None)

    def _keep_namespace(self, pid: int, place: _Place, uid: int | str | None) -> None:
        if place not in self._kept:
            if not isinstance(uid, int):
                return  # the process has ended: its user, whose limit the root would count for, is unknown
            account = ACCOUNTS.of_process(pid, uid)
            if self._places.refusal(account):
                self._refused += 1
                return
            if (opened := _open(pid, place[0])) is None:
                return  # the process has ended
            self._places.take(account)
            self._kept[place] = _Kept(place, account, *opened)
        pids = self._kept[place].pids
        pids[pid] = None
        if len(pids) > _MOST_OF_ONE_ROOT:
            del pids[next(iter(pids))]

    def release_unused(self) -> None:
        """Releases namespaces without processes; writes how many processes' namespaces could not be kept."""
        now = time.monotonic_ns()
        for kept in list(self._kept.values()):
            if any(_place(pid) == kept.place for pid in reversed(kept.pids)):
                kept.empty_since = 0
            elif not kept.empty_since:
                kept.empty_since = now
            elif now - kept.empty_since > LINGER_NS:
                self._release(kept)
        if self._refused:
            detail = (
                f"processes in more than {MOST_KEPT} mount namespaces, or {MOST_OF_ONE_USER} of one user: "
                "files that only they have are not named if they end before the recording"
            )
            self._journal.loss("names", "mount namespaces", self._refused, detail, self._released_ns, now)
            self._refused = 0
        self._released_ns = now

    def _release(self, kept: _Kept) -> None:
        del self._kept[kept.place]
        self._places.give_back(kept.account)
        os.close(kept.root)
        os.close(kept.namespace)

    def write_again(self) -> None:
        """Writes what is known of processes into a new spool; of an ended process, for the last time."""
        for pid, described in list(self._described.items()):
            self._journal.json(FrameKind.PROCESS, described.about)
            if described.place not in self._kept and _place(pid) != described.place:
                del self._described[pid]
        self._ended &= self._described.keys()

    def by_process(self) -> dict[int, int]:
        """Returns the descriptor of each process's kept root; it stays this object's."""
        return {pid: kept.root for kept in self._kept.values() for pid in kept.pids}

    def close(self) -> None:
        """Releases all namespaces."""
        for kept in list(self._kept.values()):
            self._release(kept)


def _place(pid: int) -> _Place | None:
    """Returns the root of a process; None if it has ended. Accesses no file system but /proc."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt"), os.readlink(f"/proc/{pid}/root")
    except OSError:
        return None


def _with_ancestors(pid: int, place: _Place) -> Iterator[int]:
    """Yields a process and its ancestors, up to the first that has another root."""
    for _ in range(_MOST_GENERATIONS):
        yield pid
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            pid = int(stat[stat.rindex(b")") + 1 :].split()[1])
        except (OSError, ValueError):
            return  # the process has ended
        if _place(pid) != place:
            return


def _open(pid: int, namespace: str) -> tuple[int, int] | None:
    """Opens a process's root and mount namespace; returns None if it no longer has that namespace."""
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
