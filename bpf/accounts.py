"""Who a process is, by /proc: its user, its container, and the account that is answerable for it.

Limits per user count for an account, not for a user ID. One user may have many user IDs: those of a subordinate range
(/etc/subuid), and any of them in a container. So an account is the container that root started; or else the user who
made the user namespace that a process is in; or else the user, for subordinate IDs the one who has their range.

The names of cgroups are not trustworthy: whoever may make cgroups can name one like a container's. So a container's
name tells processes apart and proves nothing.
"""

from __future__ import annotations

import bisect
import fcntl
import os
import re
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from iaprof.basics.files import sudo_user
from iaprof.basics.mounts import ROOTS_MOUNTS, devices_of

SUBORDINATE = Path("/etc/subuid")
USERS = Path("/etc/passwd")
CGROUPS = Path("/sys/fs/cgroup")
_MOST_BYTES = 1 << 20  # of each of these files
_MOST_RANGES = 1 << 14
_LOOK_AGAIN_S = 1.0
_MOST_LEVELS = 33  # of user namespaces, user_namespaces(7)
_NS_GET_USERNS, _NS_GET_PARENT = 0xB701, 0xB702  # ioctl_ns(2)
_NS_GET_OWNER_UID = 0xB704
_RANGE = re.compile(r"([^:\n]{1,256}):(\d{1,10}):(\d{1,10})")


class Accounts:
    """Finds the accounts of processes and users. An account is a text that messages can show."""

    def __init__(self) -> None:
        """Reads nothing yet."""
        self._looked = float("-inf")
        self._version: object = None
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, str]] = []  # start, end, account
        self._own = _user_namespace("self")

    def of_process(self, pid: int, uid: int) -> str:
        """Returns the account of a running process, which the process cannot choose.

        Args:
            pid: the process.
            uid: its real user in the initial user namespace. If the process has ended, the account is that of ended
                processes of this user: a container's process may have had any other user's ID.
        """
        cgroup = cgroup_of(pid)
        if cgroup is not None and (container := outermost(cgroup)) is not None and _is_roots(container):
            return f"container {container}"
        namespace = _user_namespace(pid)
        if namespace is None:
            return f"{self.of_user(uid)} (ended processes)"
        if namespace == self._own:
            return self.of_user(uid)
        outer = _outermost(pid, self._own)
        if outer is None:
            return f"{self.of_user(uid)} (ended processes)"
        inode, owner = outer
        return self.of_user(owner) if owner else f"user namespace {inode}"

    def of_user(self, uid: int) -> str:
        """Returns the account of a user."""
        self._read_ranges()
        at = bisect.bisect_right(self._starts, uid) - 1
        if at >= 0 and uid < self._ranges[at][1]:
            return self._ranges[at][2]
        return f"user {uid}"

    def _read_ranges(self) -> None:
        now = time.monotonic()
        if now < self._looked + _LOOK_AGAIN_S:
            return
        self._looked = now
        version = _version(SUBORDINATE)
        if version == self._version:
            return
        self._version = version
        found = _RANGE.findall(_text(SUBORDINATE))[:_MOST_RANGES]
        uids = _uids_by_name() if found else {}
        ranges = []
        for name, start, count in found:
            uid = int(name) if name.isdigit() else uids.get(name)
            # Root has no subordinate IDs of its own: root's ranges are those of containers.
            account = f"user {uid}" if uid else f"subordinate users of {name}"
            ranges.append((int(start), int(start) + int(count), account))
        self._ranges = sorted(ranges)
        self._starts = [start for start, _, _ in self._ranges]


def describe(pid: int) -> dict[str, int | str | None]:
    """Reads what a FrameKind.PROCESS frame has of a process.

    Args:
        pid: in the recorder's pid namespace.

    Returns:
        `pid`; `ns_pid`, the pid in the innermost namespace, None if that is the recorder's; `cgroup`, None in the root
        cgroup; `container`, None outside of containers; `uid` and `gid`, with which files are opened for the process;
        `account`. All but `pid` are None if the process has ended.
    """
    status = _read(pid, "status")
    pids = _numbers(status, b"NSpid")
    uids, gids = _numbers(status, b"Uid"), _numbers(status, b"Gid")  # real, effective, saved, of the file system
    # A set-user-ID program has more rights than its user, who may have chosen which files it names.
    uid, gid = (ids[0] or ids[-1] if ids else None for ids in (uids, gids))
    cgroup = cgroup_of(pid)
    return {
        "pid": pid,
        "ns_pid": pids[-1] if len(pids) > 1 else None,
        "cgroup": cgroup,
        "container": None if cgroup is None else container(cgroup),
        "uid": uid,
        "gid": gid,
        "account": None if uid is None else ACCOUNTS.of_process(pid, uid),
    }


_MOST = 1 << 14  # bytes read of a file
_PATH_MAX = 4096  # limits.h; the kernel shows no longer path

# The names that container runtimes give to cgroups, each one part of a path:
#   docker/<id>, kubepods/.../<id>                 cgroupfs driver of Docker, containerd and CRI-O
#   docker-<id>.scope, cri-containerd-<id>.scope,
#   crio-<id>.scope, libpod-<id>.scope             systemd driver; conmon's scope is not the container's
#   lxc/<name>, lxc.payload.<name>                 LXC and LXD before and since 4.0
_ID = re.compile(r"(?:(?:docker|cri-containerd|crio|libpod)-)?([0-9a-f]{64})(?:\.scope)?")
_LXC = re.compile(r"(?:^|/)(?:lxc/|lxc\.payload\.)([^/]{1,64})(?:/|$)")


def _numbers(status: bytes, name: bytes) -> list[int]:
    match = re.search(rb"^" + name + rb":((?:\t\d+)+)$", status, re.MULTILINE)
    return [int(number) for number in match[1].split()] if match else []


def container(cgroup: str) -> str | None:
    """Returns the id or name of the container of a cgroup; of nested containers, the innermost one's."""
    for part in reversed(cgroup.split("/")):
        if match := _ID.fullmatch(part):
            return match[1]
    names = _LXC.findall(cgroup)
    return names[-1] if names else None


def outermost(cgroup: str) -> str | None:
    """Returns the cgroup of the outermost container around a cgroup; None outside of containers."""
    parts = cgroup.split("/")
    for number in range(1, len(parts) + 1):
        around = "/".join(parts[:number])
        if _ID.fullmatch(parts[number - 1]) or _LXC.search(around):
            return around
    return None


def cgroup_of(pid: int) -> str | None:
    """Returns the path of a process's cgroup; None in the root cgroup, or if it has ended."""
    return _cgroup(_read(pid, "cgroup").decode("utf-8", "backslashreplace"))


def _read(pid: int, name: str) -> bytes:
    try:
        with Path(f"/proc/{pid}/{name}").open("rb", buffering=0) as file:
            return file.read(_MOST) or b""
    except OSError:
        return b""


def _cgroup(text: str) -> str | None:
    """Returns the cgroup's path in the v2 hierarchy, or else the longest one of v1's hierarchies."""
    paths: dict[str, str] = {}
    for line in text.split("\n"):  # ID:controllers:path, cgroups(7)
        number, _, rest = line.partition(":")
        paths[number] = rest.partition(":")[2]
    path = max([paths.get("0", ""), *paths.values()], key=len) if paths.get("0", "/") == "/" else paths["0"]
    return path[:_PATH_MAX] if path not in ("", "/") else None


class Places:
    """Room that accounts share: so much for each, and some of all is kept for those that have little."""

    def __init__(self, most: int, of_one: int) -> None:
        """Begins empty.

        Args:
            most: for all.
            of_one: for one account.
        """
        self.most, self.of_one = most, of_one
        self._kept, self._little = most // 4, max(1, of_one // 8)
        self._taken: Counter[str] = Counter()

    def refusal(self, account: str) -> str:
        """Returns why an account gets no more, for a message; an empty string if there is room."""
        own = self._taken[account]
        if own >= self.of_one:
            return f"{account} has {own:,} already, which is the maximum"
        total = self._taken.total()
        if total >= self.most or (total >= self.most - self._kept and own >= self._little):
            return f"there are {total:,} of all users already, and the rest is kept for users that have few"
        return ""

    def take(self, account: str) -> None:
        """Counts one more."""
        self._taken[account] += 1

    def give_back(self, account: str) -> None:
        """Counts one less."""
        self._taken[account] -= 1
        if not self._taken[account]:
            del self._taken[account]


def _is_roots(cgroup: str) -> bool:
    """Whether root made a cgroup: others may name theirs like a container's."""
    if ".." in cgroup.split("/"):
        return False  # it is not below our own cgroup namespace's root
    try:
        hierarchies = [CGROUPS, *(CGROUPS / name for name in os.listdir(CGROUPS))]
    except OSError:
        return False
    owners = set()
    for hierarchy in hierarchies:
        try:
            owners.add(os.lstat(f"{hierarchy}{cgroup}").st_uid)
        except OSError:
            continue  # each hierarchy has its own cgroups
    return owners == {0}


def _user_namespace(pid: int | str) -> int | None:
    """Returns the inode of a process's user namespace; None if it has ended."""
    try:
        return os.stat(f"/proc/{pid}/ns/user").st_ino
    except OSError:
        return None


def _outermost(pid: int, own: int | None) -> tuple[int, int] | None:
    """Returns inode and owner of the outermost user namespace around a process below ours; None if it has ended."""
    try:
        fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(_MOST_LEVELS):
            parent = fcntl.ioctl(fd, _NS_GET_PARENT)
            if os.fstat(parent).st_ino == own:
                os.close(parent)
                break
            os.close(fd)
            fd = parent
        (owner,) = struct.unpack("I", fcntl.ioctl(fd, _NS_GET_OWNER_UID, bytes(4)))
        return os.fstat(fd).st_ino, owner
    except OSError:
        return None
    finally:
        os.close(fd)


def _is_in_roots_mounts(pid: int) -> bool:
    """Whether only root can mount something in a process's mount namespace: it is not a user namespace's below ours."""
    try:
        fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        owner = fcntl.ioctl(fd, _NS_GET_USERNS)
    except OSError:
        return False
    finally:
        os.close(fd)
    try:
        return os.fstat(owner).st_ino == _user_namespace("self")
    finally:
        os.close(owner)


def _version(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _uids_by_name() -> dict[str, int]:
    """Reads the users of this machine. Users from elsewhere (LDAP) are unknown: asking for them may take long."""
    rows = (line.split(":") for line in _text(USERS).split("\n"))
    return {row[0]: int(row[2]) for row in rows if len(row) > 2 and row[2].isdigit()}


ACCOUNTS = Accounts()


def may_read(pid: int, device: int, user_of: Callable[[int], int | None]) -> bool:
    """Tells whether reading a file that a process has mapped waits for nobody but root and who started this recording.

    Args:
        pid: the process.
        device: of the file, as in /proc/PID/maps: major number << 32 | minor number.
        user_of: returns a process's real user, None if it has ended.
    """
    if ROOTS_MOUNTS.has(device) or (_is_in_roots_mounts(pid) and device in devices_of(pid)):
        return True
    uid, starter = user_of(pid), (sudo_user() or (os.getuid(),))[0]
    return uid is not None and ACCOUNTS.of_process(pid, uid) in (ACCOUNTS.of_user(0), ACCOUNTS.of_user(starter))
