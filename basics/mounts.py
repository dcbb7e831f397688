"""The devices of file systems that root mounted, in which opening or reading a file waits for no other user.

A file system in user space can keep whoever opens one of its files waiting forever, and so can another file system,
such as an overlay, that a user mounts over it in a user namespace. Nothing here accesses a file system but /proc.
"""

from __future__ import annotations

import os
import re
import select

_TABLES = ("/proc/self/mountinfo", "/proc/1/mountinfo")  # ours may be a container's
_MOST_BYTES = 64 << 20  # 100,000 mounts are the most that a namespace has, unless somebody allowed more
# proc_pid_mountinfo(5): number, parent, device, root, place, options, fields until a dash, type, source, options.
_LINE = re.compile(rb"^\d+ \d+ (\d+):(\d+) [^\n]*? - (\S+) \S* (\S*)$", re.MULTILINE)
_IN_USER_SPACE = re.compile(rb"fuse(?:blk)?(?:\..*)?")
_LOCAL = re.compile(
    rb"bcachefs|btrfs|devtmpfs|erofs|exfat|ext[234]|f2fs|hugetlbfs|iso9660|jfs|msdos|ntfs3?|proc|ramfs|reiserfs|rootfs"
    rb"|squashfs|sysfs|tmpfs|udf|vfat|xfs|zfs"
)
"""Those that wait for a disk at most, and for no other machine or process."""
_OF_ROOT = re.compile(rb"(?:^|,)user_id=0(?:,|$)")


class RootsMounts:
    """The mounts of our mount namespace and of the first process's; tables are read again when they have changed."""

    def __init__(self) -> None:
        """Reads nothing yet."""
        self._files: list[int] | None = None
        self._changes = select.poll()
        self._devices: dict[int, bool] = {}  # whether a file system that root mounted may not answer

    def has(self, device: int) -> bool:
        """Whether root mounted the file system of a device: major number << 32 | minor number."""
        if self._files is None:
            self._open()
        elif not self._changes.poll(0):
            return device in self._devices
        self._devices = dict.fromkeys(_kernels_own(), False)
        for file in self._files or ():
            self._devices |= _devices(_read(file))
        return device in self._devices

    def may_wait(self, device: int) -> bool:
        """Whether a file system may not answer, such as one of a server that is gone; to be called after `has`."""
        return self._devices.get(device, True)

    def _open(self) -> None:
        self._files = []
        for path in _TABLES:
            try:
                self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                continue
            self._changes.register(self._files[-1], select.POLLPRI)


def devices_of(pid: int) -> set[int]:
    """Returns the devices that a process sees mounted, without users' file systems in user space; none if it has ended.

    Root mounted them only if root owns that mount namespace.
    """
    try:
        file = os.open(f"/proc/{pid}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return set()
    try:
        return set(_devices(_read(file)))
    finally:
        os.close(file)


def _kernels_own() -> list[int]:
    """Returns the device of the file system that the kernel mounted for files in memory (memfd_create(2)).

    No table has it, and reading there waits for nobody.
    """
    try:
        file = os.memfd_create("device", os.MFD_CLOEXEC)
    except OSError:
        return []
    try:
        device = os.fstat(file).st_dev
        return [os.major(device) << 32 | os.minor(device)]
    finally:
        os.close(file)


def _read(file: int) -> bytes:
    parts, length = [], 0
    try:
        os.lseek(file, 0, os.SEEK_SET)
        while length < _MOST_BYTES and (part := os.read(file, 1 << 16)):
            parts.append(part)
            length += len(part)
    except OSError:
        pass
    return b"".join(parts)


def _devices(table: bytes) -> dict[int, bool]:
    """Returns the devices that root mounted, and whether they may not answer."""
    return {
        int(major) << 32 | int(minor): _LOCAL.fullmatch(kind) is None
        for major, minor, kind, options in _LINE.findall(table)
        if not _IN_USER_SPACE.fullmatch(kind) or _OF_ROOT.search(options)
    }


ROOTS_MOUNTS = RootsMounts()
