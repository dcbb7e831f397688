"""What an unprivileged user can do to a recorder that is root by naming debug ELFs: nothing, and all of it is told.

While the other user fires `compile_kernel` with odd paths, a program launches kernels, and all of that is recorded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import KINDS
from iaprof.record.spool import FrameKind, SpoolReader
from integration.attacking import (
    AS_NOBODY,
    FIRE,
    GATE,
    NOBODY,
    PYTHON,
    at_once,
    firing,
    firing_with_root,
    folder_of_the_other_user,
    hanging,
    library,
)
from integration.recording import BARE, IAPROF, IN_TURN, ended, environment, spool_of, until_recording
from limits import Within
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough
from waiting import until

pytestmark = [pytest.mark.bpf, IN_TURN]

LONGEST_REST_S = 1.5  # between two reads of stalls; a file that takes too long takes 2 s

# Fires a thousand times with each path, as fast as it can.
FLOOD = FIRE.replace("    fire(", "    for _ in range(1000): fire(")
ELF = runtime.debug_elf("bmg", "matmul").read_bytes()


def write(path: Path, content: bytes = ELF, owner: int = NOBODY, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    os.chown(path, owner, owner)
    return path


def answered(capture: Path) -> int:
    """To how many files that were named the recorder has answered so far; the honest programs' are not counted."""
    reader, count = SpoolReader(spool_of(capture)), 0
    for frame in reader.frames({FrameKind.KERNEL, FrameKind.LOSS}):
        told = json.loads(frame.payload[: frame.shape] if frame.kind is FrameKind.KERNEL else frame.payload)
        refused = (told.get("source"), told.get("what")) == ("kernels", "refused")
        honest = "dumped_zebin_module" in (told["detail"] if refused else told.get("path", ""))
        count += (refused or frame.kind is FrameKind.KERNEL) and not honest
    reader.close()
    return count


class Attacked:
    """A recording under attack, and what came of it."""

    def __init__(
        self,
        folder: Path,
        *attacks: list[str],
        answers: int,
        seconds: float = 1.5,
        may_lose: bool = False,
        named: bool = False,
    ) -> None:
        """`answers` is to how many of the attackers' files the recorder has to answer before they may end; `seconds` is
        how long the honest program launches beside the attacks; `may_lose`: its module may be lost; `named`: with CPU
        names, for which more files are read."""
        capture = folder.parent / "c"
        with Hardware(folder.parent / "gpu") as hardware:
            env = environment(hardware)
            env["LD_LIBRARY_PATH"] += f":{library().parent}"
            env |= {"STANDIN_DUMP_DIR": str(folder.parent), "STANDIN_KEEP": "1"}
            honest = runtime.command([runtime.debug_elf("bmg", "attention")], "--seconds", seconds, "--rate", 500)
            begun = time.monotonic()
            options = () if named else BARE
            words = [*IAPROF, "record", "-q", *options, "-o", str(capture), "--", *at_once(honest, *attacks)]
            recorder = subprocess.Popen(words, env=os.environ | env, stderr=subprocess.PIPE, text=True)
            until_recording(recorder)
            until(lambda: answered(capture) >= answers, recorder)
            (folder / GATE).touch()
            ended(recorder, interrupt=False)
            self.seconds = time.monotonic() - begun
        self.bytes = capture.read_bytes()
        self.reader = CaptureReader(capture)
        self.kernels = self.reader.table("kernel").to_pylist()
        self.losses = self.reader.table("loss").to_pylist()
        # The honest program's launches are all there, and so are its kernels.
        ledger = hardware.ledger()
        ours = {launch.pid for launch in ledger.launches}
        rows = self.reader.table("launch", ("pid",))["pid"].to_pylist()
        assert sum(pid in ours for pid in rows) == sum(launch.count for launch in ledger.launches) > 100
        self.missing = ours - {kernel["pid"] for kernel in self.kernels}
        assert not self.missing or may_lose, self.losses
        # A GPU that executes something always has stalls, so a long time without a read is the recorder's.
        reads = sorted(self.reader.table("stall", ("time_ns",))["time_ns"].to_pylist())
        self.longest_rest_s = max(after - before for before, after in itertools.pairwise(reads)) / 1e9

    def reasons(self, path: str | Path) -> list[str]:
        """Why a path was refused, each time."""
        start = f"{os.fsencode(path).decode('utf-8', 'backslashreplace')} of process "
        rows = [row for row in self.losses if (row["source"], row["what"]) == ("kernels", "refused")]
        assert all(row["count"] == 1 for row in rows if row["detail"].startswith(start))
        return [row["detail"].split(": ", 1)[1] for row in rows if row["detail"].startswith(start)]

    def taken(self, path: str | Path) -> int:
        """How often a path was taken."""
        name = os.fsencode(path).decode("utf-8", "backslashreplace")
        return sum(kernel["path"] == name for kernel in self.kernels)

    def holds(self, secret: bytes) -> bool:
        """Whether something is anywhere in the capture, as it is or in its decompressed rows."""
        rows: list[Any] = [self.reader.table(kind).to_pylist() for kind in KINDS if kind != "stall"]
        told = repr(rows).encode() + repr(self.reader.header).encode()
        elves = b"".join(kernel["elf"] or b"" for kernel in self.kernels)
        return any(secret in where for where in (self.bytes, told, elves))


class Secret:
    """A file of root's that the debug-ELF collector would take from its owner."""

    def __init__(self, folder: Path) -> None:
        self.text = secrets.token_hex(16).encode()
        self.path = write(folder / "secret", ELF + self.text, owner=0)


@pytest.fixture
def secret(folder: Path) -> Secret:
    return Secret(folder)


def link(folder: Path, secret: Secret) -> Path:
    (folder / "link").symlink_to(secret.path)
    return folder / "link"


def link_on_the_way(folder: Path, secret: Secret) -> Path:
    (folder / "way").symlink_to(secret.path.parent)
    return folder / "way" / "secret"


def hard_link(folder: Path, secret: Secret) -> Path:
    os.link(secret.path, folder / "hard")
    return folder / "hard"


def dots(folder: Path, secret: Secret) -> Path:
    return folder / ".." / folder.name / "secret"


def readable_by_roots_groups(folder: Path, secret: Secret) -> Path:
    return write(folder / "group", secret.path.read_bytes(), owner=0, mode=0o040)


def fifo(folder: Path, _: Secret) -> Path:
    os.mkfifo(folder / "fifo", 0o666)
    return folder / "fifo"


def device(folder: Path, _: Secret) -> Path:
    os.mknod(folder / "device", 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero
    return folder / "device"


def bound_socket(folder: Path, _: Secret) -> Path:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
    return folder / "socket"


def huge(folder: Path, _: Secret) -> Path:
    os.truncate(write(folder / "huge"), 100 << 30)
    return folder / "huge"


def very_long(folder: Path, _: Secret) -> str:
    """More than the 4,095 bytes that a path can have: it is cut there, and leads to a folder."""
    return str(folder) + "/." * 2500


REFUSED: dict[str, tuple[Callable[[Path, Secret], str | Path], str]] = {
    "another user's file": (lambda folder, secret: secret.path, "Permission denied"),
    "a link to it": (link, "it is not a regular file"),
    "a link on the way to it": (link_on_the_way, "Permission denied"),
    "a hard link to it": (hard_link, "Permission denied"),
    "a path with dots to it": (dots, "Permission denied"),
    "a relative path to it": (lambda folder, secret: "secret", "Permission denied"),
    "a file of root's groups": (readable_by_roots_groups, "Permission denied"),
    "passwords": (lambda folder, secret: "/etc/shadow", "Permission denied"),
    "another process's root": (lambda folder, secret: "/proc/1/root/etc/shadow", "Permission denied"),
    "its own root": (lambda folder, secret: f"/proc/self/root{secret.path}", "it is a symbolic link"),
    "an open file of the recorder's": (lambda folder, secret: "/proc/self/fd/3", "it is not a regular file"),
    "the recorder's memory": (lambda folder, secret: "/proc/self/mem", "Permission denied"),
    "the recorder's environment": (lambda folder, secret: "/proc/self/environ", "Permission denied"),
    "another's environment": (lambda folder, secret: "/proc/1/environ", "Permission denied"),
    "a FIFO": (fifo, "it is not a regular file"),
    "a device node": (device, "it is not a regular file"),
    "a terminal": (lambda folder, secret: "/dev/tty", "it is not a regular file"),
    "a socket": (bound_socket, "it is not a regular file"),
    "a folder": (lambda folder, secret: folder, "it is not a regular file"),
    "a huge file": (huge, "it is larger than 256 MiB"),
    "an empty file": (lambda folder, secret: write(folder / "empty", b""), "it is empty"),
    "a text": (
        lambda folder, secret: write(folder / "text", b"root:*:1" * 9),
        "it is not a 64-bit little-endian ELF file",
    ),
    "another machine's": (
        lambda folder, secret: write(folder / "x86", Path(sys.executable).read_bytes()),
        "it is an ELF file, but not for an Intel GPU",
    ),
    "a path that leaves where it works": (
        lambda folder, secret: f"../{folder.name}/secret",
        "its relative path leaves the folder that the process works in",
    ),
    "a path of too many bytes": (very_long, "it is not a regular file"),
    "a name that is not a text": (
        lambda folder, secret: str(folder) + "/\udcff\x1b[2J\n",
        "it is not there (any more)",
    ),
}


@dataclass(frozen=True)
class Told:
    """The recording in which all of REFUSED is tried, in turn with files that the other user may well name."""

    attacked: Attacked
    secret: Secret
    paths: dict[str, str]
    own: list[Path]


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    with folder_of_the_other_user() as folder:
        secret = Secret(folder)
        paths = {case: str(make(folder, secret)) for case, (make, _) in REFUSED.items()}
        own = [write(folder / f"own{number}") for number in range(len(paths))]
        turns = [path for pair in zip(paths.values(), own, strict=True) for path in pair]
        attacked = Attacked(folder, firing(*turns, cwd=folder), answers=len(turns), named=True)
        yield Told(attacked, secret, {case: path[:4095] for case, path in paths.items()}, own)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(told: Told, case: str) -> None:
    assert told.attacked.reasons(told.paths[case]) == [REFUSED[case][1]]
    assert told.attacked.taken(told.paths[case]) == 0


def test_a_recording_that_refuses_goes_on_and_tells_no_secret(told: Told, within: Within) -> None:
    assert [told.attacked.taken(path) for path in told.own] == [1] * len(told.own)
    assert not told.attacked.holds(told.secret.text)
    within.took(told.attacked.seconds, 15)
    within.took(told.attacked.longest_rest_s, LONGEST_REST_S)


def test_a_pointer_to_nowhere_and_no_name(folder: Path) -> None:
    attacked = Attacked(folder, firing(None, "", None, cwd=folder), answers=0)
    lost = [row["count"] for row in attacked.losses if (row["source"], row["what"]) == ("kernels", "lost")]
    assert sum(lost) == 3


def test_a_path_of_4095_bytes(folder: Path) -> None:
    # given the longest path that open(2) takes
    path = str(folder) + "/" * (4095 - len(str(folder)) - len("elf")) + "elf"
    write(folder / "elf")
    # when
    attacked = Attacked(folder, firing(path, cwd=folder), answers=1)
    # then
    assert (attacked.taken(path), attacked.reasons(path)) == (1, [])


def test_a_setuid_program_gets_what_its_caller_may_read(folder: Path, secret: Secret) -> None:
    attacked = Attacked(folder, firing_with_root(secret.path, folder), answers=1, named=True)
    assert attacked.reasons(secret.path) == ["Permission denied"]
    assert not attacked.holds(secret.text)


@thorough
def test_root_of_a_user_namespace_is_nobody(folder: Path, secret: Secret) -> None:
    # given a process that calls itself root, in a file system of its own
    own = folder / "own"
    (folder / "mount").mkdir()
    inside = folder / "mount" / "elf"
    write(own)
    script = f'mount -t tmpfs none {folder}/mount && cp {own} {inside} && exec "$@"'
    prefix = ("unshare", "-Urm", "sh", "-c", script, "sh")
    # when
    attacked = Attacked(folder, firing(secret.path, inside, cwd=folder, prefix=prefix), answers=2, named=True)
    # then
    assert attacked.reasons(secret.path) == ["Permission denied"]
    assert not attacked.holds(secret.text)
    assert attacked.taken(inside) == 1


def test_a_process_that_is_gone_before_its_file_is_opened(folder: Path) -> None:
    # given processes that fire and are no more
    path = write(folder / "elf")
    commands = [firing(path, cwd=folder, stay=0) for _ in range(12)]
    # when
    attacked = Attacked(folder, *commands, answers=0)
    # then each is there or refused
    reasons = attacked.reasons(path)
    assert set(reasons) <= {"it is not there (any more)", "No such process"}
    assert attacked.taken(path) + len(reasons) == 12


@pytest.mark.alone
def test_thousands_per_second(folder: Path, within: Within) -> None:
    # given more than can be taken
    path = write(folder / "elf")
    script = firing(*[path] * 20, cwd=folder, stay=2.5)
    script[script.index("-c") + 1] = FLOOD
    # when
    attacked = Attacked(folder, script, answers=0, seconds=2.5, may_lose=True)
    # then each is there, refused or lost, and the honest program's too, if there was no room for it
    full = [row["count"] for row in attacked.losses if row["detail"] == "too many were compiled at once"]
    lost = [row["count"] for row in attacked.losses if (row["source"], row["what"]) == ("kernels", "lost")]
    assert attacked.taken(path) + len(attacked.reasons(path)) + sum(full) + sum(lost) == 20_000 + len(attacked.missing)
    # and the recording ends in time (its end waits 3 s at most for what was named)
    within.took(attacked.seconds, 15)
    within.took(attacked.longest_rest_s, LONGEST_REST_S)


def test_a_file_that_grows_and_shrinks(folder: Path) -> None:
    # given a file that is truncated and written all the time
    path = write(folder / "elf", ELF + bytes(1 << 20))
    change = (
        f"import os\nfd, gate = os.open({str(path)!r}, os.O_RDWR), {str(folder / GATE)!r}\n"
        "while not os.path.exists(gate): os.ftruncate(fd, 50000); os.ftruncate(fd, 1 << 20)"
    )
    # when
    attacked = Attacked(
        folder, firing(*[path] * 100, cwd=folder), [*AS_NOBODY, PYTHON, "-I", "-c", change], answers=100
    )
    # then each time it is a whole file of some size, or told
    reasons = attacked.reasons(path)
    assert set(reasons) <= {"it became shorter while it was read"}, attacked.losses
    assert attacked.taken(path) + len(reasons) == 100, attacked.losses
    for kernel in attacked.kernels:
        if kernel["elf"] is not None:
            assert kernel["size"] == len(kernel["elf"])
            assert kernel["digest"] == hashlib.sha256(kernel["elf"]).digest()


def test_a_file_system_that_never_answers(folder: Path, within: Within) -> None:
    # given a path that keeps who opens it, even when killed
    (folder / "mount").mkdir()
    own = write(folder / "elf")
    never = folder / "mount" / "elf"
    # when it is named once, among others
    command = firing(own, never, own, cwd=folder)
    attacked = Attacked(folder, hanging(folder / "mount", command), answers=3, seconds=5)
    # then the recorder goes on and ends without it
    assert attacked.reasons(never) == ["reading it took too long"]
    assert attacked.taken(own) == 2
    within.took(attacked.seconds, 15)
    within.took(attacked.longest_rest_s, LONGEST_REST_S)
