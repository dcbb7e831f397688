"""What was read of debug information, kept in files under XDG_CACHE_HOME/iaprof/symbols.

A file is named by the build-id and the identity of the file that it was read from: who forges a build-id gets names of
a cache of their own. The folder is the user's alone, and one that is not is left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 1 << 30  # of all files; the ones that were used longest ago go first
_FORMAT = 1  # of what is kept
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def usual_folder() -> Path | None:
    """Where caches are kept by default; None where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.environ.get("HOME", ""), ".cache")
    return Path(base) / "iaprof" / "symbols" if os.path.isabs(base) else None


def key_of(build_id: bytes | None, status: os.stat_result) -> str:
    """What a file's cache is called."""
    identity = (_FORMAT, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
    return f"{(build_id or b'').hex()[:40]}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:32]}"


class Cache:
    """Files of a few parts each. Where they cannot be kept, files without a name take their place."""

    def __init__(self, folder: Path | None) -> None:
        """Touches nothing yet."""
        self._path = folder

    def find(self, key: str, parts: int) -> list[int] | None:
        """Open files for reading, one for each part; None where not all of them are kept."""
        with self._opened(make=False) as folder:
            if folder is None:
                return None
            files: list[int] = []
            try:
                for part in range(parts):
                    files.append(os.open(_name(key, part, parts), os.O_RDONLY | _FILE, dir_fd=folder))
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
        """An open file without a name, to be filled."""
        return os.memfd_create("iaprof symbols", os.MFD_CLOEXEC)

    def keep(self, key: str, files: list[int]) -> None:
        """Keeps what is in filled files, as far as that goes: where it does not, it will be read again."""
        with self._opened(make=True) as folder, contextlib.suppress(OSError):
            if folder is None or sum(os.fstat(file).st_size for file in files) > MOST_BYTES // 4:
                return
            for part, file in enumerate(files):
                _copy(file, folder, _name(key, part, len(files)))
            _evict(folder)

    def forget(self, key: str, parts: int) -> None:
        """Deletes what is kept under a key."""
        with self._opened(make=False) as folder:
            for part in range(parts if folder is not None else 0):
                with contextlib.suppress(OSError):
                    os.unlink(_name(key, part, parts), dir_fd=folder)

    @contextlib.contextmanager
    def _opened(self, make: bool) -> Iterator[int | None]:
        """The folder's descriptor, None where there is none that is ours alone."""
        folder = None
        try:
            if self._path is not None:
                if make and _ours(self._path) and not _is_led_away(str(self._path.resolve()), self._path):
                    self._path.mkdir(0o700, parents=True, exist_ok=True)
                folder = os.open(self._path, _FOLDER)
                status = os.fstat(folder)
                led_away = _is_led_away(os.readlink(f"/proc/self/fd/{folder}"), self._path)
                if led_away or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    os.close(folder)
                    folder = None
        except OSError:
            folder = None
        try:
            yield folder
        finally:
            if folder is not None:
                os.close(folder)


def _name(key: str, part: int, parts: int) -> str:
    return f"{key}.{part}of{parts}"


def _ours(path: Path) -> bool:
    """Whether the next folder on the way that exists is ours: root makes no folders in anybody's home."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.stat().st_uid == os.geteuid()


def _is_led_away(real: str, path: Path) -> bool:
    """Whether links, in a home that sudo kept, lead root to where its own files are."""
    return os.geteuid() == 0 and real != os.path.normpath(path)


def _copy(file: int, folder: int, name: str) -> None:
    temporary = f".{secrets.token_hex(8)}.tmp"
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
    """Deletes the files that were used longest ago, until the rest is within bounds."""
    with os.scandir(folder) as entries:
        files = [(entry.stat(follow_symlinks=False), entry.name) for entry in entries]
    files.sort(key=lambda each: each[0].st_mtime_ns, reverse=True)
    total = 0
    for status, name in files:
        total += status.st_size
        if total > MOST_BYTES and stat.S_ISREG(status.st_mode):
            os.unlink(name, dir_fd=folder)
