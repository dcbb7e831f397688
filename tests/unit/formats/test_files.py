"""Output files: complete or absent, in the checked folder, readable by their owner only."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from iaprof.basics import files
from iaprof.basics.errors import IaprofError
from iaprof.basics.files import check_output, create, make_public_folder, remove, replace_file
from iaprof.record.spool import Spool
from unit.in_process import iaprof

CAPTURE = Path(__file__).parents[2] / "data" / "captures" / "format-9.parquet"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with replace_file(path) as file:
        # given an unfinished file: nobody else sees its name or can read it
        file.write(b"whole")
        assert not path.exists()
        (temporary,) = tmp_path.iterdir()
        assert temporary.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == b"whole"
    assert path.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_failed_write_keeps_the_old_file(tmp_path: Path, number: int) -> None:
    path = tmp_path / "c"
    path.write_bytes(b"before")
    with pytest.raises(IaprofError, match=os.strerror(number)), replace_file(path) as file:
        file.write(b"half")
        raise OSError(number, os.strerror(number))
    assert path.read_bytes() == b"before"
    assert names(tmp_path) == ["c"]


def test_names_of_maximum_length_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("c" * 255)
    check_output(path, force=False)
    with replace_file(path) as file:
        file.write(b"x")
    assert names(tmp_path) == [path.name]
    with pytest.raises(IaprofError, match="name too long"):
        check_output(tmp_path / ("c" * 256), force=True)


def test_refused_outputs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for path, force, message in [
        (tmp_path, True, "is a folder"),
        (Path("/"), True, "is a folder"),
        (tmp_path / "..", True, "is a folder"),
        (tmp_path / "fifo", True, "is not a file"),
        (tmp_path / "file", False, "exists"),
        (tmp_path / "dangling", False, "exists"),
        (tmp_path / "no" / "c", True, "does not exist"),
        (tmp_path / "file" / "c", True, "does not exist"),
        (tmp_path / "round" / "c", True, os.strerror(errno.ELOOP)),
    ]:
        with pytest.raises(IaprofError, match=message):
            check_output(path, force)
    with pytest.raises(IaprofError, match="is the input"):
        check_output(tmp_path / "file", True, tmp_path / "file")
    check_output(tmp_path / "file", force=True)
    check_output(tmp_path / "dangling", force=True)


def test_a_link_to_what_a_process_has_open_is_not_replaced(tmp_path: Path) -> None:
    # given /dev/stdout, and a shell that has redirected it to a file
    with (tmp_path / "redirected").open("wb") as file:
        (tmp_path / "stdout").symlink_to(f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(IaprofError, match="is not a file"):
            check_output(tmp_path / "stdout", force=True)


def test_a_new_folder_is_never_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    chmod = Path.chmod

    def watched(self: Path, mode: int) -> None:
        modes.append(self.stat().st_mode & 0o777)
        chmod(self, mode)

    monkeypatch.setattr(Path, "chmod", watched)
    before = os.umask(0)
    try:
        make_public_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert modes == [0o755, 0o755]


@pytest.mark.parametrize("closed", ["0<&-", "2>&-", "0<&- 2>&-", "0<&- 1>&- 2>&-"])
def test_no_file_gets_what_is_written_to_a_closed_stderr(tmp_path: Path, closed: str) -> None:
    # given a program that starts us without some of its standard files
    path = tmp_path / "spool"
    program = (
        "import os, sys; from iaprof.cli import main, start; from iaprof.record.spool import Spool;"
        "main.main = lambda: (Spool(__import__('pathlib').Path(sys.argv[1])), os.write(2, b'told'));"
        "start.main()"
    )
    command = shlex.join([sys.executable, "-c", program, str(path)])
    # when something is said while a recording is under way
    done = subprocess.run(["sh", "-c", f"exec {command} {closed}"], capture_output=True, check=False)
    # then the recording has nothing of it
    assert done.returncode == 0
    assert b"told" not in path.read_bytes()


@pytest.mark.parametrize(
    "words",
    [
        ("archive", CAPTURE),
        ("merge", CAPTURE, CAPTURE),
        ("import", CAPTURE),
        ("report", CAPTURE, "--format=svg"),
        ("query", CAPTURE, "SELECT 1", "--json"),
        ("recover", "s"),
    ],
)
def test_a_hyphen_is_no_name_of_an_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str | Path, ...]
) -> None:
    # given a folder, and a spool in it
    monkeypatch.chdir(tmp_path)
    Spool(Path("s")).close()
    # when an output is called as other programs call stdout
    done = iaprof(*words, "-o", "-")
    # then it is refused, and nothing is written
    said = "iaprof: '-' does not stand for stdout: name a file with -o; reports go to stdout without -o\n"
    assert done == (2, "", said)
    assert names(tmp_path) == ["s"]


def test_own_symbolic_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a" / "real").mkdir(parents=True)
    (tmp_path / "relative").symlink_to("a/../a/real")
    (tmp_path / "absolute").symlink_to(tmp_path / "relative")
    check_output(tmp_path / "absolute" / "c", force=False)
    with replace_file(tmp_path / "absolute" / "c") as file:
        file.write(b"x")
    assert names(tmp_path / "a" / "real") == ["c"]


def test_a_renamed_folder_stays_the_checked_one(tmp_path: Path) -> None:
    # given a checked folder
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir()
    victim.mkdir()
    check_output(folder / "c", force=False)
    # when it is replaced by a link
    folder.rename(tmp_path / "moved")
    folder.symlink_to(victim)
    os.close(create(folder / "c.spool"))
    with replace_file(folder / "c") as file:
        file.write(b"x")
    # then the files are in the checked folder
    assert names(tmp_path / "moved") == ["c", "c.spool"]
    (victim / "c.spool").write_text("another's")
    remove(folder / "c.spool")
    assert names(tmp_path / "moved") == ["c"]
    assert names(victim) == ["c.spool"]


def test_a_swapped_temporary_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IaprofError, match="somebody else"), replace_file(tmp_path / "c") as file:
        file.write(b"ours")
        (temporary,) = tmp_path.iterdir()
        temporary.unlink()
        temporary.write_bytes(b"theirs")


def test_a_file_that_fchown_refuses_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a file system without owners
    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refuse)
    monkeypatch.setattr(files, "sudo_user", lambda: (1000, 1000))
    # when, then
    with pytest.raises(PermissionError):
        create(tmp_path / "c")
    with pytest.raises(IaprofError, match="not permitted"), replace_file(tmp_path / "c"):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("text", ["", "-1", "root", "4294967295", "9" * 30, "9" * 5000, "1000\n"])
def test_invalid_sudo_ids_change_no_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_UID", text)
    monkeypatch.setenv("SUDO_GID", "1000")
    os.close(create(tmp_path / "c"))
    assert (tmp_path / "c").stat().st_uid == os.getuid()
