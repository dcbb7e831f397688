"""Files without a build-id: which file counts as the mapped one, and roots whose processes have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from iaprof.record.symbolize import roots
from iaprof.record.symbolize.opener import FileIdentity, Opener, Rights
from integration.attacking import NOBODY

pytestmark = [pytest.mark.root, pytest.mark.beside]
ROOT, STRANGER = Rights(0, 0), Rights(NOBODY, NOBODY)
ANOTHER, CHANGED = "the file there is not the one that was mapped", "it was changed since it was mapped, or just before"
MAP = (
    "import mmap, sys; f = open(sys.argv[1], 'rb');"
    "m = mmap.mmap(f.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC); print('mapped', flush=True);"
    "sys.stdin.read()"
)


@pytest.fixture
def opener() -> Iterator[Opener]:
    with Opener() as made:
        yield made


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose parents every user may enter."""
    path = Path("/tmp") / f"iaprof-same-{os.getpid()}-{time.monotonic_ns()}"
    path.mkdir(mode=0o755)
    yield path
    subprocess.run(["rm", "-r", path], check=True)


def file_of(path: Path, content: bytes = b"the mapped one") -> Path:
    path.write_bytes(content.ljust(8192, b"."))
    return path


def now(path: Path) -> FileIdentity:
    """The identity of a file that is mapped now, after the clock of file times has advanced."""
    status = path.stat()
    while (moment := time.clock_gettime_ns(5)) <= status.st_ctime_ns:  # CLOCK_REALTIME_COARSE
        time.sleep(0.001)
    return FileIdentity(os.major(status.st_dev) << 32 | os.minor(status.st_dev), status.st_ino, moment)


def read(found: int | str) -> bytes:
    assert isinstance(found, int), found
    with os.fdopen(found, "rb") as file:
        return file.read()


def test_the_file_itself(opener: Opener, folder: Path) -> None:
    path = file_of(folder / "lib.so")
    assert read(opener.open(str(path), ROOT, same=now(path))).startswith(b"the mapped one")


def test_a_file_that_was_put_in_its_place(opener: Opener, folder: Path) -> None:
    path = file_of(folder / "lib.so")
    same = now(path)
    file_of(folder / "new", b"another").rename(path)
    assert opener.open(str(path), ROOT, same=same) == ANOTHER


def test_a_file_that_was_written_to(opener: Opener, folder: Path) -> None:
    """Also if its modification time says that it was not, as after `cp --preserve`."""
    path = file_of(folder / "lib.so")
    same, times = now(path), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    with path.open("r+b") as file:
        file.write(b"another")
    assert opener.open(str(path), ROOT, same=same) == CHANGED
    os.utime(path, ns=times)
    assert opener.open(str(path), ROOT, same=same) == CHANGED


def test_a_file_that_got_the_inode_of_a_deleted_one(opener: Opener, folder: Path) -> None:
    path = file_of(folder / "lib.so")
    same = now(path)
    path.unlink()
    inode = file_of(path, b"another").stat().st_ino
    os.utime(path, ns=(0, 0))
    with_its_inode = FileIdentity(same.device, inode, same.before_ns)  # whether or not it is reused here
    assert opener.open(str(path), ROOT, same=with_its_inode) == CHANGED


def test_a_file_of_another_device(opener: Opener, folder: Path) -> None:
    path = file_of(folder / "lib.so")
    same = now(path)
    assert opener.open(str(path), ROOT, same=FileIdentity(same.device + 1, same.inode, same.before_ns)) == ANOTHER


def test_what_a_process_puts_in_place_of_its_file(opener: Opener, folder: Path) -> None:
    # given a stranger's library, and a file that only root may read
    (folder / "secret").write_bytes(b"secret")
    (folder / "secret").chmod(0o600)
    path = file_of(folder / "lib.so")
    same = now(path)
    # when, then
    swaps: list[Callable[[], None]] = [
        lambda: path.symlink_to(folder / "secret"),
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
        lambda: path.symlink_to("/dev/zero"),
    ]
    for swap in swaps:
        path.unlink()
        swap()
        for below in (None, str(folder.parent)):
            name = str(path) if below is None else f"/{path.relative_to(folder.parent)}"
            # what was put there may have the number of the library's inode
            assert opener.open(name, STRANGER, below=below, same=same) in (ANOTHER, "it is not a regular file")
            assert opener.open(name, STRANGER, below=below) == "it is not a regular file"
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
            path.touch()
    path.unlink()
    os.link(folder / "secret", path)
    assert opener.open(str(path), STRANGER) == "Permission denied"
    # and nothing is told of a file by another one in its place: the learner keeps what it was told for all processes
    assert opener.open(str(path), STRANGER, same=same) == ANOTHER
    assert opener.open(str(path), STRANGER, same=now(path)) == "Permission denied"


def test_a_deleted_file_that_is_still_mapped(opener: Opener, folder: Path) -> None:
    # given
    path = file_of(folder / "lib.so")
    same, written = now(path), file_of(folder / "written.so")
    same_written = now(written)
    processes: list[subprocess.Popen[Any]] = []
    for each in (path, written):
        command = [sys.executable, "-c", MAP, str(each)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stdout = processes[-1].stdout
        assert stdout is not None
        assert stdout.readline() == b"mapped\n"
    # when
    path.unlink()
    with written.open("r+b") as file:
        file.write(b"another")
    # then
    found = opener.open_mapped(processes[0].pid, str(path), same.inode, ROOT, same)
    assert read(found).startswith(b"the mapped one")
    assert opener.open_mapped(processes[1].pid, str(written), same_written.inode, ROOT, same_written) == CHANGED
    for process in processes:
        process.communicate(b"")


def test_a_file_whose_mappings_have_another_device_than_it_says(opener: Opener, folder: Path) -> None:
    """As on overlayfs, where containers' files are: a recorder knows the mappings' device."""
    # given an overlay whose layers are on two file systems
    lower, tmpfs, merged = folder / "lower", folder / "tmpfs", folder / "merged"
    for each in (lower, tmpfs, merged):
        each.mkdir()
    file_of(lower / "lib.so")
    subprocess.run(["mount", "-t", "tmpfs", "none", tmpfs], check=True)
    try:
        for name in ("upper", "work"):
            (tmpfs / name).mkdir()
        options = f"lowerdir={lower},upperdir={tmpfs}/upper,workdir={tmpfs}/work"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, merged], check=True)
        path = merged / "lib.so"
        command = [sys.executable, "-c", MAP, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"mapped\n"
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            words = next(line.split() for line in lines if line.endswith("/merged/lib.so"))
            process.communicate(b"")
        # when
        major, minor = (int(word, 16) for word in words[3].split(":"))
        same = FileIdentity(major << 32 | minor, int(words[4]), now(path).before_ns)
        # then
        assert read(opener.open(str(path), ROOT, same=same)).startswith(b"the mapped one")
        assert opener.open(str(path), ROOT, same=FileIdentity(same.device, same.inode + 1, same.before_ns)) == ANOTHER
    finally:
        subprocess.run(["umount", "--lazy", merged], check=False)
        subprocess.run(["umount", "--lazy", tmpfs], check=True)


def test_below_a_root_whose_process_is_gone(opener: Opener, folder: Path) -> None:
    # given a folder that only root may enter, and a root below it
    (folder / "closed").mkdir(mode=0o700)
    inside = folder / "closed" / "root"
    inside.mkdir()
    file_of(inside / "lib.so")
    (inside / "up").symlink_to("../../../etc")
    handle = os.open(inside, os.O_PATH | os.O_DIRECTORY)
    # when, then
    for below in (handle, str(inside)):
        assert read(opener.open("/lib.so", STRANGER, below=below)).startswith(b"the mapped one")
        assert opener.open("/../../open", STRANGER, below=below) == "it is not there (any more)"
        assert opener.open("/up/hostname", STRANGER, below=below) == "it is not there (any more)"
    os.close(handle)
    # a folder that was replaced by a link is refused
    (folder / "link").symlink_to(inside)
    assert opener.open("/lib.so", STRANGER, below=str(folder / "link")) == "Not a directory"
    assert opener.open("/lib.so", STRANGER, below=str(folder / "link/..")) == "it is a symbolic link"
    # and refusals do not end the child
    assert read(opener.open("/lib.so", STRANGER, below=str(inside))).startswith(b"the mapped one")


@contextlib.contextmanager
def in_a_namespace(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A program in a mount namespace of its own; it and its children end with the context."""
    words = ["unshare", "--mount", *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_process_comes_with_those_that_forked_it_in_there() -> None:
    # given a shell in a mount namespace, its child and grandchild; its parent is outside
    command = ["sh", "-c", "sh -c 'sleep 1000 & echo $$ $!; wait'; :"]
    with in_a_namespace(*command) as shell:
        assert shell.stdout is not None
        child, grandchild = map(int, shell.stdout.readline().split())
        place = roots._place(grandchild)
        assert place is not None
        assert place != roots._place(os.getpid())
        # when, then
        assert list(roots._with_ancestors(grandchild, place)) == [grandchild, child, shell.pid]
