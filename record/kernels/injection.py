"""The folder of a recording whose command tells its launches itself: the library for that, and what it writes.

The library is a copy (its source is inject.c), as LD_PRELOAD takes no path with spaces or colons, and other users may
not read where iaprof is installed. It writes debug ELFs beside itself, and reads from the file `skip` which drivers, or
builds of them, are recorded in another way. The folder lies where only root makes folders: a program that outlives the
recording may start others with that path, and nobody else may put a library there.
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

FOLDERS = Path("/var/cache/iaprof")
_BUILT = Path(__file__).with_name("libiaprof_inject.so")
_PREFIX = "inject-"
_ELF = re.compile(rb"[0-9]{1,10}-[0-9]{1,10}\.elf")


def built_library() -> Path:
    """The library as it was installed.

    Raises:
        IaprofError: iaprof was built without it.
    """
    if not os.access(_BUILT, os.R_OK):
        raise IaprofError(
            f"this installation is without {_BUILT.name}: install a C compiler and <sys/sdt.h> "
            "(Debian: gcc, libc6-dev and systemtap-sdt-dev), then iaprof anew"
        )
    return _BUILT


def check_folders(folders: Path = FOLDERS) -> None:
    """Whether a library can be put there, and no other one by strangers.

    Raises:
        IaprofError: it cannot; or they can.
    """
    place = next(path for path in (folders, *folders.parents) if path.exists())
    status, flags = place.stat(), os.statvfs(place).f_flag
    of_strangers = status.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
    if of_strangers or status.st_uid not in (0, os.geteuid()):
        raise IaprofError(f"others than root and you can put libraries into {place}: change its owner or mode")
    if flags & os.ST_NOEXEC:
        raise IaprofError(f"no library can be loaded from {place}, which is mounted noexec")
    if flags & os.ST_RDONLY:
        raise IaprofError(f"no library can be put into {place}, which is mounted read-only")


class Injection:
    """The folder, while it exists."""

    def __init__(self, skip: Iterable[str] = (), folders: Path = FOLDERS) -> None:
        """Makes it.

        Args:
            skip: drivers that are recorded in another way: build-ids, in lower-case hexadecimal, or names, as in
                formats.no_launches.DRIVERS.
            folders: where to make it; every user may enter that, and none but ours write to it.

        Raises:
            IaprofError: iaprof was built without the library, or a library cannot be loaded from there.
        """
        built = built_library()
        try:
            make_public_folder(folders)
            check_folders(folders)
            self._folder, self._fd = _make_folder(folders)
        except OSError as error:
            raise IaprofError(f"no folder can be made in {folders}: {error.strerror}") from error
        self.library = self._folder / _BUILT.name
        try:
            shutil.copyfile(built, self.library)
            self.library.chmod(0o755)
            skipped = self._folder / "skip"
            skipped.write_text("".join(f"{each}\n" for each in skip))
            skipped.chmod(0o644)
            self._folder.chmod(0o1733)  # a command that became another user writes there, and sees nothing of others
        except OSError as error:
            self.close()
            raise IaprofError(f"{self._folder} cannot be filled: {error.strerror}") from error

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What the command is to be started with; the library takes it back before the command's own code runs."""
        before = environment.get("LD_PRELOAD")
        return {**environment, "LD_PRELOAD": f"{self.library}" if before is None else f"{self.library}:{before}"}

    def forget(self, path: bytes) -> None:
        """Removes a debug ELF, by the path that `compile_kernel` told; any other path is left alone."""
        folder, name = os.path.split(path)
        if folder == os.fsencode(self._folder) and _ELF.fullmatch(name):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._fd)

    def close(self) -> None:
        """Removes the folder. Programs that still run go on, and tell nothing more."""
        _remove(self._folder)
        os.close(self._fd)


def _make_folder(folders: Path) -> tuple[Path, int]:
    """A new folder, open and locked. Those of recorders that died are removed: nobody holds their locks."""
    everything = os.open(folders, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(everything, fcntl.LOCK_EX)
        for left in folders.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                os.close(_lock(left))
                _remove(left)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folders))
        return folder, _lock(folder)
    finally:
        os.close(everything)


def _lock(folder: Path) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove(folder: Path) -> None:
    with contextlib.suppress(RecursionError):  # anybody may have made folders in it, deep ones
        shutil.rmtree(folder, ignore_errors=True)
