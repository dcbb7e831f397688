"""Caches tables of debug information in files under XDG_CACHE_HOME/iaprof/symbols.

The name of a file has the build-id and the identity (inode, times, size) of the file that was read, so that a file with
a forged build-id does not get another file's tables. A folder that others may write to is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from iaprof.basics.files import cache_home

MOST_BYTES = 1 << 30  # of all files; the least recently used ones are deleted first
_FORMAT = 1  # of the tables
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def default_folder() -> Path | None:
    """Returns the default folder; None if the user has no home."""
    home = cache_home(os.environ)
    return home / "iaprof" / "symbols" if home else None


def key_of(build_id: bytes | None, status: os.stat_result) -> str:
    """Returns the key of a file's tables."""
    identity = (_FORMAT, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
    return f"{(build_id or b'').hex()[:40]}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}"


class Cache:
    """Tables of debug information, each in a few pieces, a file per piece. Without a usable folder nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        """Touches nothing yet."""
        self._path = folder

    def find(self, key: str, pieces: int) -> list[int] | None:
        """Opens the files of all pieces for reading; returns None if one of them is missing."""
        with self._opened(make=False) as folder:
            if folder is None:
                return None
            files: list[int] = []
            try:
                for piece in range(pieces):
                    files.append(os.open(_name(key, piece, pieces), os.O_RDONLY | _FILE, dir_fd=folder))
                    status = os.fstat(files[-1])
                    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                        raise FileNotFoundError
                    with contextlib.suppress(OSError):
                        os.utime(files[-1])
            except OSError:
                for file in files:
                    os.close(file)
                return None
            return files

    @staticmethod
    def new_file() -> int:
        """Opens an empty file in memory, to be filled."""
        return os.memfd_create("iaprof symbols", os.MFD_CLOEXEC)

    def keep(self, key: str, files: list[int]) -> None:
        """Copies filled files into the folder. If that fails, they will be made again next time."""
        with self._opened(make=True) as folder, contextlib.suppress(OSError):
            if folder is None or sum(os.fstat(file).st_size for file in files) > MOST_BYTES // 4:
                return
            for piece, file in enumerate(files):
                _copy(file, folder, _name(key, piece, len(files)))
            _evict(folder)

    def forget(self, key: str, pieces: int) -> None:
        """Deletes the files of a key."""
        with self._opened(make=False) as folder:
            for piece in range(pieces if folder is not None else 0):
                with contextlib.suppress(OSError):
                    os.unlink(_name(key, piece, pieces), dir_fd=folder)

    @contextlib.contextmanager
    def _opened(self, make: bool) -> Iterator[int | None]:
        """Yields the folder's descriptor; None if there is no folder that only this user can write to."""
        folder = None
        try:
            if self._path is not None:
                if make and _is_ours(self._path) and not _is_redirected(str(self._path.resolve()), self._path):
                    self._path.mkdir(0o700, parents=True, exist_ok=True)
                folder = os.open(self._path, _FOLDER)
                status = os.fstat(folder)
                is_redirected = _is_redirected(os.readlink(f"/proc/self/fd/{folder}"), self._path)
                if is_redirected or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    os.close(folder)
                    folder = None
        except OSError:
            folder = None
        try:
            yield folder
        finally:
            if folder is not None:
                os.close(folder)


def _name(key: str, piece: int, pieces: int) -> str:
    return f"{key}.{piece}of{pieces}"


def _is_ours(path: Path) -> bool:
    """Tells whether the nearest existing parent folder is ours: root must not make folders in another user's home."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.stat().st_uid == os.geteuid()


def _is_redirected(real: str, path: Path) -> bool:
    """Tells whether links on the path lead root elsewhere: sudo may keep HOME, whose owner may link to root's files."""
    return os.geteuid() == 0 and real != os.path.normpath(path)


def _copy(file: int, folder: int, name: str) -> None:
    temporary = f".{os.urandom(8).hex()}.tmp"
    target = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder)
    try:
        size = os.fstat(file).st_size
        done = 0
        while done < size:
            done += os.sendfile(target, file, done, size - done)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(target)


def _evict(folder: int) -> None:
    """Deletes the least recently used files until the rest has at most MOST_BYTES."""
    with os.scandir(folder) as entries:
        files = [(entry.stat(follow_symlinks=False), entry.name) for entry in entries]
    files.sort(key=lambda file: file[0].st_mtime_ns, reverse=True)
    total = 0
    for status, name in files:
        total += status.st_size
        if total > MOST_BYTES and stat.S_ISREG(status.st_mode):
            os.unlink(name, dir_fd=folder)
