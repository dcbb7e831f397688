"""Output files: nothing is overwritten unasked, nobody is misled by half a file, and root does not get redirected.

A new file is written under a temporary name in the same folder, created by us alone (O_EXCL, O_NOFOLLOW) for its
owner's eyes only, and gets its name when it is whole.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from iaprof.formats.errors import IaprofError

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def check_output(path: Path, force: bool, source: Path | None = None) -> None:
    """Whether a file may be written at `path`.

    Args:
        path: of the output.
        force: it may exist.
        source: what is read to make it, which even then it must not replace.

    Raises:
        IaprofError: it exists and `force` is false, or its folder cannot be written to.
    """
    if path.is_dir():
        raise IaprofError(f"{path} is a folder: name a file with -o")
    if path.exists() and not path.is_file():  # it would be replaced, not written to: think of /dev/null
        raise IaprofError(f"{path} is not a file: name another one with -o")
    if not force and os.path.lexists(path):
        raise IaprofError(f"{path} exists: name another file with -o, or overwrite it with --force")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise IaprofError(f"{path} is what is read: name another file with -o")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise IaprofError(f"the folder {folder} does not exist: make it first, or name another file with -o")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise IaprofError(f"the folder {folder} cannot be written to: name another file with -o")


def create(path: Path, mode: int = 0o600) -> int:
    """A descriptor of a file that did not exist; with sudo, of the user who called it.

    Raises:
        OSError: as open(2) says.
    """
    fd = os.open(path, _CREATE, mode)
    uid, gid = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    if os.geteuid() == 0 and uid.isdecimal() and gid.isdecimal():
        os.fchown(fd, int(uid), int(gid))
    return fd


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and leaves no trace when it does not.

    Raises:
        IaprofError: the folder refuses, the disk is full, or the like.
    """
    temporary = path.absolute().with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        file = open(create(temporary, mode), "wb")
    except OSError as error:
        raise IaprofError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with file:
            yield file
        os.replace(temporary, path)
    except OSError as error:
        raise IaprofError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
