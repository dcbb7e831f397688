"""Output files: nothing is overwritten unasked, nobody is misled by half a file, and root does not get redirected.

A new file is written under a temporary name in the same folder, created by us alone (O_EXCL, O_NOFOLLOW) for its
owner's eyes only, and gets its name when it is whole.

The folder is opened at the first question about it and stays open as long as this process lives (`hold` hands it on
to another one): everything happens in that folder, whoever renames it or its parents meanwhile. In a folder that
others can write to they can do with our names what they like, as with their own; what they cannot do is to make us
write, give away or name a file anywhere else.

Nothing waits for the disk (fsync): it would stop the recorder for seconds per gigabyte, and a file that a power cut
left incomplete is told from a whole one by its reader.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from iaprof.basics.errors import IaprofError

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_held: dict[Path, int] = {}  # O_PATH descriptors of folders, by what they are called
_unfinished: dict[str, int] = {}  # temporary names, and their folders
_MOST_LINKS = 40  # on the way to a folder, as in the kernel's own walk (path_resolution(7))


def check_output(path: Path, force: bool, source: Path | None = None) -> None:
    """Whether a file may be written at `path`.

    Args:
        path: of the output.
        force: it may exist.
        source: what is read to make it, which even then it must not replace.

    Raises:
        IaprofError: it exists and `force` is false, or its folder cannot be written to.
    """
    try:
        folder, name = _place(path)
        found = _status(folder, name, follow=True)
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise IaprofError(f"{path} is a folder: name a file with -o")
        if found is not None and not stat.S_ISREG(found.st_mode):  # it would be replaced: think of /dev/null
            raise IaprofError(f"{path} is not a file: name another one with -o")
        if not force and _status(folder, name, follow=False) is not None:
            raise IaprofError(f"{path} exists: name another file with -o, or overwrite it with --force")
        if source is not None and found is not None and source.exists() and os.path.samestat(found, source.stat()):
            raise IaprofError(f"{path} is what is read: name another file with -o")
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
            raise IaprofError(f"the folder {path.absolute().parent} cannot be written to: name another file with -o")
    except (FileNotFoundError, NotADirectoryError):
        raise IaprofError(
            f"the folder {path.parent} does not exist: make it first, or name another file with -o"
        ) from None
    except OSError as error:
        raise IaprofError(f"{path} cannot be written ({error.strerror}): name another file with -o") from error


def create(path: Path, mode: int = 0o600) -> int:
    """A descriptor of a file that did not exist; with sudo, of the user who called it.

    Raises:
        IaprofError: a stranger's symbolic link is on the way.
        OSError: as open(2) and fchown(2) say; there is no new file then.
    """
    folder, name = _place(path)
    fd = os.open(name, _CREATE, mode, dir_fd=folder)
    try:
        if owner := behind_sudo():
            os.fchown(fd, *owner)
    except OSError:
        os.close(fd)
        os.unlink(name, dir_fd=folder)
        raise
    return fd


def rename(path: Path, target: Path) -> None:
    """Gives a file another name in the same folder.

    Raises:
        OSError: as rename(2) says.
    """
    folder, name = _place(path)
    os.rename(name, target.name, src_dir_fd=folder, dst_dir_fd=folder)


def remove(path: Path) -> None:
    """Deletes a file, if it is there.

    Raises:
        OSError: as unlink(2) says.
    """
    folder, name = _place(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and leaves no trace when it does not.

    Raises:
        IaprofError: the folder refuses, the disk is full, or the like.
    """
    temporary = path.with_name(f".iaprof-{secrets.token_hex(8)}.tmp")
    try:
        folder, name = _place(path)
        fd = create(temporary, mode)
    except OSError as error:
        raise IaprofError(f"{path} cannot be written: {error.strerror}") from error
    _unfinished[temporary.name] = folder
    try:
        with open(os.dup(fd), "wb") as file:
            yield file
        os.replace(temporary.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        there = _status(folder, name, follow=False)
        if there is None or not os.path.samestat(os.fstat(fd), there):
            raise IaprofError(f"{path} is not what was written: somebody else changes the files of its folder")
    except OSError as error:
        raise IaprofError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        os.close(fd)
        del _unfinished[temporary.name]
        with contextlib.suppress(OSError):
            os.unlink(temporary.name, dir_fd=folder)


def remove_unfinished() -> None:
    """Removes the files that `replacing` is writing, in a process that ends at once."""
    for name, folder in _unfinished.items():
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)


def can_be_strangers(status: os.stat_result) -> bool:
    """Whether others than root and who runs this own a file, or whether everybody may write to it."""
    return status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & stat.S_IWOTH)


def make_for_everyone(folder: Path) -> None:
    """Makes a folder that is not there, with its parents; everybody may enter it, whatever the umask.

    Raises:
        OSError: it cannot be made.
    """
    if not folder.exists():
        folder.mkdir(parents=True)
        folder.chmod(0o755)


def folder_of(path: Path) -> int:
    """The descriptor of a file's folder, for another process, which is to `hold` it.

    Raises:
        IaprofError: a stranger's symbolic link is on the way.
        OSError: there is no such folder.
    """
    return _place(path)[0]


def hold(path: Path, folder: int) -> None:
    """From now on takes an inherited descriptor for the folder of a file, wherever its path leads."""
    _held[path.absolute().parent] = folder


def _place(path: Path) -> tuple[int, str]:
    """The descriptor of a file's folder, and the file's name there."""
    absolute = path.absolute()
    folder = absolute.parent
    if folder not in _held:
        _held[folder] = _opened(folder)
    return _held[folder], absolute.name or "."


def _status(folder: int, name: str, follow: bool) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=follow)
    except FileNotFoundError:
        return None


def behind_sudo() -> tuple[int, int] | None:
    """User and group who called sudo, if that is how we became root."""
    ids = [os.environ.get(name, "") for name in ("SUDO_UID", "SUDO_GID")]
    if os.geteuid() != 0 or not all(text.isdecimal() and len(text) <= 10 and int(text) < (1 << 32) - 1 for text in ids):
        return None
    return int(ids[0]), int(ids[1])


def _opened(folder: Path) -> int:
    """An O_PATH descriptor of a folder, opened name by name.

    Root follows only links that belong to root or to the user behind sudo: the kernel's own walk would let anybody
    who can make a link lead root where it points (fs.protected_symlinks refuses some of them, where it is set).
    """
    trusted = {0, *(behind_sudo() or ())[:1]} if os.geteuid() == 0 else None
    here = os.open("/", _FOLDER)
    names = list(reversed(folder.parts[1:]))
    links = 0
    while names:
        name, above = names.pop(), here
        try:
            try:
                here = os.open(name, _FOLDER, dir_fd=above)
                continue
            except NotADirectoryError:
                link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
            try:
                status = os.fstat(link)
                if not stat.S_ISLNK(status.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
                if trusted is not None and status.st_uid not in trusted:
                    raise IaprofError(
                        f"on the way to {folder} the symbolic link '{name}' belongs to user {status.st_uid}, and root "
                        "does not follow it: name the folder that it leads to"
                    )
                target = Path(os.readlink("", dir_fd=link))
            finally:
                os.close(link)
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            here = os.open("/" if target.is_absolute() else ".", _FOLDER, dir_fd=above)
            names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        finally:
            os.close(above)
    return here
