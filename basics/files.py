"""Output files: overwrite only on request, leave no half-written file, and let nobody redirect a write by root.

A new file gets a temporary name in the same folder (O_EXCL, O_NOFOLLOW; mode 0600 unless the caller asks for another)
and takes its final name when it is complete.

A folder is opened when first used, and stays open until the process ends (`use_folder` passes the descriptor on to
another process): every operation is relative to that descriptor, even if the folder or its parents are renamed. Users
who can write to the folder can rename or replace our files there, as they can their own, but they cannot make us
create, chown or rename a file in any other folder.

Nothing here calls fsync: it would stop a verb for seconds per gigabyte, and readers recognize a file that a power
failure truncated. A recording's capture is the exception (`record/capture/finish.py`): its spool is removed then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from iaprof.basics.errors import IaprofError, UsageError

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_held: dict[Path, int] = {}  # O_PATH descriptors of folders, by absolute path
_unfinished: dict[str, int] = {}  # temporary name -> descriptor of its folder
_MOST_LINKS = 40  # in a path, as in the Linux kernel (path_resolution(7))


def check_output(path: Path, force: bool, source: Path | None = None) -> None:
    """Checks that a file may be written at `path`.

    Args:
            path: the output file.
            force: whether an existing file may be replaced.
            source: the input file, which must never be replaced.

    Raises:
            IaprofError: `path` exists and `force` is false, it is `source` or no regular file, or the folder refuses.
            UsageError: `path` is `-`, by which other programs mean stdout.
    """
    if str(path) == "-":
        raise UsageError("'-' does not stand for stdout: name a file with -o; reports go to stdout without -o")
    try:
        folder, name = _place(path)
        found = _status(folder, name, follow=True)
        if found is not None and stat.S_ISDIR(found.st_mode):
            raise IaprofError(f"{path} is a folder: name a file with -o")
        # Such as /dev/null, or /dev/stdout that leads to a file: the rename would replace them, for the whole machine.
        if found is not None and (not stat.S_ISREG(found.st_mode) or _leads_into_proc(folder, name)):
            raise IaprofError(f"{path} is not a file: name another one with -o")
        if not force and _status(folder, name, follow=False) is not None:
            raise IaprofError(f"{path} exists: name another file with -o, or overwrite it with --force")
        if source is not None and found is not None and source.exists() and os.path.samestat(found, source.stat()):
            raise IaprofError(f"{path} is the input: name another file with -o")
        if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
            raise IaprofError(f"the folder {path.absolute().parent} cannot be written to: name another file with -o")
    except (FileNotFoundError, NotADirectoryError):
        raise IaprofError(
            f"the folder {path.parent} does not exist: make it first, or name another file with -o"
        ) from None
    except OSError as error:
        raise IaprofError(f"{path} cannot be written ({error.strerror}): name another file with -o") from error


def create(path: Path, mode: int = 0o600) -> int:
    """Creates a new file and returns its descriptor; under sudo, the file belongs to the user who called sudo.

    Raises:
            IaprofError: the path leads through a symbolic link of another user.
            OSError: open(2) or fchown(2) failed; no new file is left.
    """
    folder, name = _place(path)
    fd = os.open(name, _CREATE, mode, dir_fd=folder)
    try:
        if owner := sudo_user():
            os.fchown(fd, *owner)
    except OSError:
        os.close(fd)
        os.unlink(name, dir_fd=folder)
        raise
    return fd


def rename(path: Path, target: Path) -> None:
    """Renames a file within its folder.

    Raises:
            OSError: rename(2) failed.
    """
    folder, name = _place(path)
    os.rename(name, target.name, src_dir_fd=folder, dst_dir_fd=folder)


def remove(path: Path) -> None:
    """Deletes a file if it exists.

    Raises:
            OSError: unlink(2) failed.
    """
    folder, name = _place(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def regular_file(path: Path) -> os.stat_result | None:
    """Returns the status of a regular file; None if there is none, or a link, folder or device.

    Raises:
            OSError: stat(2) failed.
    """
    folder, name = _place(path)
    found = _status(folder, name, follow=False)
    return found if found is not None and stat.S_ISREG(found.st_mode) else None


def regular_files(path: Path) -> list[tuple[str, os.stat_result]]:
    """Lists the regular files beside `path`, itself included: names and status, in no order; links are left out.

    Raises:
            OSError: the folder cannot be read.
    """
    folder, _ = _place(path)
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        found = [(name, _status(folder, name, follow=False)) for name in os.listdir(fd)]
    finally:
        os.close(fd)
    return [(name, status) for name, status in found if status is not None and stat.S_ISREG(status.st_mode)]


@contextlib.contextmanager
def replace_file(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A temporary file that replaces `path` if the block succeeds, and is deleted if the block raises.

    Raises:
            IaprofError: the file cannot be written, for example because the disk is full.
    """
    temporary = path.with_name(f".iaprof-{os.urandom(8).hex()}.tmp")
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
            raise IaprofError(f"{path} is not what was written: somebody else is changing files in its folder")
    except OSError as error:
        raise IaprofError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        os.close(fd)
        del _unfinished[temporary.name]
        with contextlib.suppress(OSError):
            os.unlink(temporary.name, dir_fd=folder)


def mode_of_report(*sources: Path | str) -> int:
    """Returns the mode for a report of these files: nobody may read it who may not read them. At most 0644.

    A report has the group of whoever makes it, so what only another group may read becomes the owner's alone.
    """
    mode, group = 0o644, (sudo_user() or (os.geteuid(), os.getegid()))[1]
    for source in sources:
        with contextlib.suppress(OSError):  # a URL, or it is gone
            status = os.stat(source)
            mode &= status.st_mode | 0o600
            if status.st_gid != group and not status.st_mode & stat.S_IROTH:
                mode &= ~stat.S_IRGRP
    return mode


def remove_unfinished() -> None:
    """Deletes the temporary files of `replace_file`, for a process that is about to call `os._exit`."""
    for name, folder in _unfinished.items():
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)


def open_regular(path: str) -> BinaryIO:
    """Opens a regular file to read it. Others, such as named pipes, would block, or never end.

    Raises:
        OSError: it is none, or cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return open(fd, "rb")
    except OSError:  # also of fstat(2), such as that of a FUSE file system whose server is gone
        os.close(fd)
        raise


def is_untrusted(status: os.stat_result) -> bool:
    """Whether another user than root and the effective user owns a file, or a group or everybody may write to it."""
    return status.st_uid not in (0, os.geteuid()) or others_write(status)


def only_root_can_change(path: Path) -> bool:
    """Whether root owns the file or folder and everything in its path, and nobody else may write to these."""
    here, names, links = Path("/"), list(path.absolute().parts[1:]), 0
    while names:
        name = names.pop(0)
        if name == "..":
            here = here.parent
            continue
        try:
            status = os.lstat(here / name)
            if stat.S_ISLNK(status.st_mode):
                target = Path(os.readlink(here / name))
                names = [*target.parts, *names]
        except OSError:
            return False
        if status.st_uid != 0:
            return False
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                return False
            if target.is_absolute():
                here, names = Path("/"), names[1:]
            continue
        # In a sticky folder such as /tmp, others cannot rename root's files.
        if others_write(status) and not (names and status.st_mode & stat.S_ISVTX):
            return False
        here /= name
    return True


def others_write(status: os.stat_result) -> bool:
    """Whether users other than a file's owner may write to it, by its mode."""
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def make_public_folder(folder: Path) -> None:
    """Makes a folder and its parents, those that do not exist, with mode 0755 whatever the umask.

    Raises:
            OSError: mkdir(2) or chmod(2) failed.
    """
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            each.mkdir(0o755)
            each.chmod(0o755)


def folder_descriptor(path: Path) -> int:
    """The descriptor of a file's folder, for another process to pass to `use_folder`.

    Raises:
            IaprofError: the path leads through a symbolic link of another user.
            OSError: the folder does not exist or cannot be opened.
    """
    return _place(path)[0]


def use_folder(path: Path, folder: int) -> None:
    """Uses an inherited descriptor for a file's folder from now on, instead of resolving the path."""
    _held[path.absolute().parent] = folder


def _place(path: Path) -> tuple[int, str]:
    """The descriptor of a file's folder, and the file's name."""
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


def _leads_into_proc(folder: int, name: str) -> bool:
    """Whether a name is a link to what processes have open."""
    try:
        return os.readlink(name, dir_fd=folder).startswith("/proc/")
    except OSError:  # it is none
        return False


def cache_home(environment: Mapping[str, str]) -> Path | None:
    """The user's folder for caches: $XDG_CACHE_HOME unless it is relative, or else ~/.cache; None without a home."""
    base = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(environment.get("HOME", ""), ".cache")
    return Path(base) if os.path.isabs(base) else None


def sudo_user() -> tuple[int, int] | None:
    """The uid and gid of the user who called sudo, or None if this process is not root through sudo."""
    ids = [os.environ.get(name, "") for name in ("SUDO_UID", "SUDO_GID")]
    if os.geteuid() != 0 or not all(text.isdecimal() and len(text) <= 10 and int(text) < (1 << 32) - 1 for text in ids):
        return None
    return int(ids[0]), int(ids[1])


def _opened(folder: Path) -> int:
    """Opens a folder component by component and returns an O_PATH descriptor.

    Root follows only links that belong to root or to the user who called sudo: the kernel's own path walk would let any
    user who can create a link redirect root (fs.protected_symlinks, where it is set, refuses some of these links only).
    """
    trusted = {0, *(sudo_user() or ())[:1]} if os.geteuid() == 0 else None
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
