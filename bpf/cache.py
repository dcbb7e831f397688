"""The cache of what depends on the running kernel, such as programs that were compiled for it: /var/cache/iaprof/bpf.

As this runs in the kernel, the folder and its files must belong to root, and nobody else may read or change them.
Other files there are ignored, and so are damaged ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import stat
from pathlib import Path

from iaprof.basics.files import make_public_folder, only_root_can_change

FOLDER = Path("/var/cache/iaprof/bpf")
_MOST_ENTRIES = 16  # of half a megabyte at most
_MOST_BYTES = 16 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def name_of(*parts: str) -> str:
    """Returns the name of the file for what depends on these texts and on the version of the running kernel."""
    return hashlib.sha256("\0".join((*parts, platform.release(), platform.version())).encode()).hexdigest()


def read(name: str) -> str | None:
    """Returns the text in a file; None if it is missing or cannot be trusted."""
    try:
        folder = _open_folder()
    except OSError:
        return None
    try:
        fd = os.open(name, _READ, dir_fd=folder)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o077:
                return None
            digest, _, text = file.read(_MOST_BYTES).partition(b"\n")
        return text.decode() if hashlib.sha256(text).hexdigest().encode() == digest else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(folder)


def write(name: str, text: str) -> None:
    """Writes a file; does nothing if that is not possible."""
    with contextlib.suppress(OSError):
        make_public_folder(FOLDER.parent)
        FOLDER.mkdir(mode=0o700, exist_ok=True)
        folder = _open_folder()
        try:
            _remove_oldest(folder)
            _write(folder, name, text.encode())
        finally:
            os.close(folder)


def _open_folder() -> int:
    """Opens the folder and returns its descriptor.

    Raises:
        OSError: the folder is missing, or others than root can read or change it.
    """
    fd = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid != 0 or status.st_mode & 0o077 or not only_root_can_change(FOLDER):
        os.close(fd)
        raise PermissionError(1, f"{FOLDER} is not root's alone")
    return fd


def _write(folder: int, name: str, text: bytes) -> None:
    temporary = f".{secrets.token_hex(8)}"
    try:
        with open(os.open(temporary, _CREATE, 0o600, dir_fd=folder), "wb") as file:
            file.write(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _remove_oldest(folder: int) -> None:
    """Removes the oldest files, also those of interrupted writes, so that one more can be added."""
    with os.scandir(folder) as entries:
        oldest_first = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in entries)
    for _, name in oldest_first[: max(0, len(oldest_first) - _MOST_ENTRIES + 1)]:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
