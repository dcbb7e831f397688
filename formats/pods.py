"""The Kubernetes pod that a process is in, by its cgroup's path.

Names of cgroups are not trustworthy: whoever may make cgroups can name one like a pod's. So a pod's uid tells processes
apart and proves nothing. Only text that has the form of a uid is returned.
"""

from __future__ import annotations

import re

# What kubelet names the cgroup of a pod, one part of a path:
#   kubepods/pod<uid>, kubepods/burstable/pod<uid>                      cgroupfs driver
#   kubepods-pod<uid>.slice, kubepods-besteffort-pod<uid>.slice         systemd driver, which writes - in a uid as _
#   kubelet-kubepods-burstable-pod<uid>.slice                           with a root cgroup for kubelet, as in kind
# A pod that kubelet reads from a file has a hash in place of a UUID, without dashes.
_UID = r"([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})"
_OF_SYSTEMD = re.compile(rf"(?:[a-z0-9_]{{1,64}}-)?kubepods(?:-burstable|-besteffort)?-pod{_UID}\.slice")
_OF_CGROUPFS = re.compile(rf"(?:^|/)kubepods(?:/burstable|/besteffort)?/pod{_UID}(?=/|\Z)")
_MOST = 4096  # characters of a path, PATH_MAX of limits.h


def pod(cgroup: str) -> str | None:
    """Returns the uid of the pod of a cgroup, with dashes; of a pod in a pod, the inner one's. None outside of pods."""
    if len(cgroup) > _MOST or "kubepods" not in cgroup:
        return None
    found = [(match.start(1), match[1]) for match in _OF_CGROUPFS.finditer(cgroup)]
    at = 0
    for part in cgroup.split("/"):
        if match := _OF_SYSTEMD.fullmatch(part):
            found.append((at, match[1]))
        at += len(part) + 1
    return max(found)[1].replace("_", "-") if found else None
