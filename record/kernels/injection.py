"""The library that is injected into a recorded command to report its launches, and its folder.

The library is a copy (source: inject.c), as LD_PRELOAD takes no path with spaces or colons, and other users may not
read iaprof's installation. It writes debug ELFs to its folder, and reads from the file `skip` there which drivers, or
builds of them, are recorded in another way. Only root makes folders where this folder lies: a program that outlives
the recording may start others with this LD_PRELOAD, and nobody else may put a library there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from iaprof.basics.errors import IaprofError
from iaprof.basics.files import make_public_folder

FOLDERS = Path("/var/cache/iaprof/injected")
_BUILT = Path(__file__).with_name("libiaprof_inject.so")
_PREFIX = "inject-"
_ELF = re.compile(rb"[0-9]{1,10}-[0-9a-f]{16}\.elf")


def built_library() -> Path:
    """Returns the path of the installed library.

    Raises:
        IaprofError: iaprof was built without it.
    """
    if not os.access(_BUILT, os.R_OK):
        raise IaprofError(
            f"this installation lacks {_BUILT.name}: install a C compiler and <sys/sdt.h> "
            "(Debian: gcc, libc6-dev and systemtap-sdt-dev), then reinstall iaprof"
        )
    return _BUILT


def check_folders(folders: Path = FOLDERS) -> None:
    """Checks that a library can be loaded from there, and that strangers cannot put others there.

    Raises:
        IaprofError: it cannot be loaded, or strangers can.
    """
    place = next(path for path in (folders, *folders.parents) if path.exists())
    status, flags = place.stat(), os.statvfs(place).f_flag
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if others_write or status.st_uid not in (0, os.geteuid()):
        raise IaprofError(f"users other than root and you can put libraries into {place}: change its owner or mode")
    if flags & os.ST_NOEXEC:
        raise IaprofError(f"no library can be loaded from {place}, which is mounted noexec")
    if flags & os.ST_RDONLY:
        raise IaprofError(f"no library can be put into {place}, which is mounted read-only")


class Injection:
    """The folder with the library, while it exists."""

    def __init__(self, skip: Iterable[str] = (), folders: Path = FOLDERS) -> None:
        """Makes the folder.

        Args:
            skip: drivers that are recorded in another way: build-ids, in lower-case hexadecimal, or names, as in
                formats.header.no_launches.DRIVERS.
            folders: where to make the folder; every user may enter it, and only root and we write to it.

        Raises:
            IaprofError: iaprof was built without the library, or a library cannot be loaded from there.
        """
        built = built_library()
        try:
            make_public_folder(folders)
            for folder in (folders.parent, folders):
                check_folders(folder)
            folders.chmod(0o711)  # others may enter it, and cannot list what is in it
            self._folder, self._fd = _make_folder(folders)
        except OSError as error:
            raise IaprofError(f"no folder can be created in {folders}: {error.strerror}") from error
        self.library = self._folder / _BUILT.name
        try:
            shutil.copyfile(built, self.library)
            self.library.chmod(0o755)
            skipped = self._folder / "skip"
            skipped.write_text("".join(f"{driver}\n" for driver in skip))
            skipped.chmod(0o644)
            self._folder.chmod(0o1733)  # a command that became another user writes there, but cannot list its files
        except OSError as error:
            self.close()
            raise IaprofError(f"{self._folder} cannot be written to: {error.strerror}") from error

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the command's environment; the library restores it before the command's own code runs."""
        before = environment.get("LD_PRELOAD")
        return {**environment, "LD_PRELOAD": f"{self.library}" if before is None else f"{self.library}:{before}"}

    def remove_elf(self, path: bytes) -> None:
        """Removes a debug ELF of the folder, by the path in a `compile_kernel` record; ignores other paths."""
        folder, name = os.path.split(path)
        if folder == os.fsencode(self._folder) and _ELF.fullmatch(name):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)

    def close(self) -> None:
        """Removes the folder. Running programs go on, and report nothing more."""
        _remove(self._folder)
        os.close(self._fd)


def _make_folder(folders: Path) -> tuple[Path, int]:
    """Makes a folder, opened and locked; removes folders of dead recorders, which nobody locks."""
    parent = os.open(folders, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)
        for old in folders.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                os.close(_lock(old))
                _remove(old)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folders))
        return folder, _lock(folder)
    finally:
        os.close(parent)


def _lock(folder: Path) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove(folder: Path) -> None:
    with contextlib.suppress(RecursionError):  # any user may have nested folders deeply in it
        shutil.rmtree(folder, ignore_errors=True)
