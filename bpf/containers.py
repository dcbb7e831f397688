"""What /proc says of a process's container: the pid inside, the cgroup, and the container's id or name.

The kernel makes these files, and reading them is cheap. The names of cgroups are not trustworthy: whoever may make
cgroups can name one like a container's. So a container's name tells processes apart and proves nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

_MOST = 1 << 14  # bytes read of a file
_PATH_MAX = 4096  # limits.h; the kernel shows no longer path

# The names that container runtimes give to cgroups, each one part of a path:
#   docker/<id>, kubepods/.../<id>                 cgroupfs driver of Docker, containerd and CRI-O
#   docker-<id>.scope, cri-containerd-<id>.scope,
#   crio-<id>.scope, libpod-<id>.scope             systemd driver; conmon's scope is not the container's
#   lxc/<name>, lxc.payload.<name>                 LXC and LXD before and since 4.0
_ID = re.compile(r"(?:(?:docker|cri-containerd|crio|libpod)-)?([0-9a-f]{64})(?:\.scope)?")
_LXC = re.compile(r"(?:^|/)(?:lxc/|lxc\.payload\.)([^/]{1,64})(?:/|$)")


def describe(pid: int) -> dict[str, int | str | None]:
    """Reads what a FrameKind.PROCESS frame has of a process.

    Args:
        pid: in the recorder's pid namespace.

    Returns:
        `pid`; `ns_pid`, the pid in the innermost namespace, None if that is the recorder's; `cgroup`, None in the root
        cgroup; `container`, None outside of containers; `uid` and `gid`, with which files are opened for the process.
        All but `pid` are None if the process has ended.
    """
    status = _read(pid, "status")
    pids = _numbers(status, b"NSpid")
    uids, gids = _numbers(status, b"Uid"), _numbers(status, b"Gid")  # real, effective, saved, of the file system
    cgroup = cgroup_of(pid)
    return {
        "pid": pid,
        "ns_pid": pids[-1] if len(pids) > 1 else None,
        "cgroup": cgroup,
        "container": None if cgroup is None else container(cgroup),
        # A set-user-ID program has more rights than its user, who may have chosen which files it names.
        "uid": uids[0] or uids[-1] if uids else None,
        "gid": gids[0] or gids[-1] if gids else None,
    }


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
