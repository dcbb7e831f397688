"""Which files the symbolizer of a recording can open, and with which rights."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaprof.formats.wire import sideband
from iaprof.formats.wire.process_maps import mappings, maps_of
from iaprof.record.symbolize.opener import ELSEWHERE, FileIdentity, Opener, Rights
from integration.attacking import NOBODY
from waiting import until

pytestmark = [pytest.mark.root, pytest.mark.beside]
CHROOT = "import os, sys; os.chroot(sys.argv[1]); os.chdir('/'); print(1, flush=True); sys.stdin.read()"
ROOT, STRANGER = Rights(0, 0), Rights(NOBODY, NOBODY)


@pytest.fixture
def opener() -> Iterator[Opener]:
    with Opener() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose parents every user may enter."""
    path = Path("/tmp") / f"iaprof-opener-{os.getpid()}-{tmp_path.name}"
    path.mkdir(mode=0o755)
    return path


def read(found: int | str) -> bytes:
    assert isinstance(found, int), found
    with os.fdopen(found, "rb") as file:
        return file.read()


def test_a_file_is_opened_with_the_rights_that_are_given(opener: Opener, folder: Path) -> None:
    (folder / "open").write_bytes(b"hello")
    (folder / "secret").write_bytes(b"secret")
    (folder / "secret").chmod(0o600)
    assert read(opener.open(f"{folder}/open", STRANGER)) == b"hello"
    assert read(opener.open(f"{folder}/secret", ROOT)) == b"secret"
    assert opener.open(f"{folder}/secret", STRANGER) == "Permission denied"
    # and a refusal does not end the child
    assert read(opener.open(f"{folder}/open", STRANGER)) == b"hello"


@pytest.mark.parametrize("name", [b"caf\xe9", rb"caf\xe9"])
def test_a_name_that_is_not_utf_8(name: bytes, opener: Opener, folder: Path) -> None:
    # given a file that a process has mapped, and whose path is in the capture as text
    path = os.fsencode(folder) + b"/" + name
    Path(os.fsdecode(path)).write_bytes(bytes(8192))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC):
        text_of_path = sideband.text(path)
        # when, then
        assert read(opener.open(text_of_path, ROOT)) == bytes(8192)
        assert read(opener.open_mapped(os.getpid(), text_of_path, 0, ROOT)) == bytes(8192)
        os.unlink(path)
        assert read(opener.open_mapped(os.getpid(), text_of_path, 0, ROOT)) == bytes(8192)
        assert opener.open(text_of_path, ROOT) == "it is not there (any more)"


def test_what_is_no_regular_file(opener: Opener, folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("/etc/hostname")
    for path in (folder / "fifo", folder / "link", folder, Path("/dev/zero")):
        assert opener.open(str(path), ROOT) == "it is not a regular file"
    assert opener.open(str(folder / "absent"), ROOT) == "it is not there (any more)"
    assert opener.open("/proc/self/root/etc/hostname", ROOT) != ""
    assert not isinstance(opener.open("/proc/self/root/etc/hostname", ROOT), int)


def test_a_perf_map_of_another_user_is_not_taken(opener: Opener, folder: Path) -> None:
    (folder / "perf-1.map").write_text("1000 10 lies\n")
    assert read(opener.open(f"{folder}/perf-1.map", STRANGER, owner=0)).endswith(b"lies\n")
    assert opener.open(f"{folder}/perf-1.map", STRANGER, owner=NOBODY) == "it belongs to another user than its process"


def test_a_mapped_file_that_was_deleted_or_replaced(opener: Opener, folder: Path) -> None:
    # given a process with a mapped library, which is deleted and replaced by another file
    library = folder / "libfoo.so"
    library.write_bytes(b"the mapped one".ljust(8192, b"."))
    script = (
        "import mmap, sys; f = open(sys.argv[1], 'rb');"
        "m = mmap.mmap(f.fileno(), 8192, prot=mmap.PROT_READ | mmap.PROT_EXEC); print('mapped', flush=True);"
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"mapped\n"
    inode = library.stat().st_ino
    library.unlink()
    library.write_bytes(b"another")
    # when, then
    assert read(opener.open_mapped(process.pid, str(library), inode, ROOT)).startswith(b"the mapped one")
    assert read(opener.open_mapped(process.pid, str(library), 0, ROOT)).startswith(b"the mapped one")
    assert opener.open_mapped(process.pid, str(library), inode + 1, ROOT) == "it is not mapped any more"
    assert opener.open_mapped(process.pid, "/lib/absent.so", 0, ROOT) == "it is not mapped any more"
    (mapping,) = [each for each in mappings(maps_of(process.pid)) if each.inode == inode]
    same = FileIdentity(*mapping.file, 1 << 62)
    assert read(opener.open_mapping(process.pid, mapping.start, mapping.end, ROOT, same)).startswith(b"the mapped one")
    # and once its process has ended, and nobody has waited for that yet
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert opener.open_mapped(process.pid, str(library), 0, ROOT) == "it is not mapped any more"
    assert opener.open_mapping(process.pid, mapping.start, mapping.end, ROOT, same) in ELSEWHERE
    process.wait()
    assert opener.open_mapping(process.pid, mapping.start, mapping.end, ROOT, same) in ELSEWHERE


def test_a_mapped_file_that_its_process_could_not_read(opener: Opener, folder: Path) -> None:
    # given a program that a stranger may execute, but not read
    program = folder / "sleep"
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o711)
    process = subprocess.Popen([program, "60"], user=NOBODY, group=NOBODY, extra_groups=[])
    until(lambda: str(program) in Path(f"/proc/{process.pid}/maps").read_text(), process)
    # when, then
    assert opener.open_mapped(process.pid, str(program), 0, STRANGER) == "Permission denied"
    assert read(opener.open_mapped(process.pid, str(program), 0, ROOT)).startswith(b"\x7fELF")
    process.kill()
    process.wait()


def test_a_path_means_what_it_means_to_its_process(opener: Opener, folder: Path) -> None:
    # given a process with its own root
    inside = folder / "root"
    (inside / "bin").mkdir(parents=True)
    (inside / "lib.so").write_bytes(b"inside")
    process = subprocess.Popen(
        [sys.executable, "-c", CHROOT,
         str(inside)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    # when, then
    assert read(opener.open("/lib.so", ROOT, process.pid)) == b"inside"
    assert opener.open("/lib.so", ROOT) == "it is not there (any more)"
    assert opener.open("/../../etc/hostname", ROOT, process.pid) == "it is not there (any more)"
    process.communicate(b"")


def test_a_child_that_dies_is_replaced(opener: Opener, folder: Path) -> None:
    (folder / "open").write_bytes(b"hello")
    assert read(opener.open(f"{folder}/open", ROOT)) == b"hello"
    assert opener._child is not None
    opener._child.kill()
    opener._child.wait()
    assert opener.open(f"{folder}/open", ROOT) == "the process that opens it died"
    assert read(opener.open(f"{folder}/open", ROOT)) == b"hello"
