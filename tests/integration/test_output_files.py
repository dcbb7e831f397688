"""Where a recorder that is root writes: in the folder it was given, for the user behind sudo, whatever others do."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from iaprof.formats.capture.reader import CaptureReader
from integration.attacking import NOBODY
from integration.recording import (
    BARE,
    IAPROF,
    environment,
    has_stalls,
    iaprof,
    one_sentence,
    record,
    spool_of,
    until_recording,
)
from standin import runtime
from standin.hardware import Hardware
from thorough import usually
from waiting import until

pytestmark = pytest.mark.bpf
THIRD = 65533
SUDO = {"SUDO_UID": str(NOBODY), "SUDO_GID": str(NOBODY), "SUDO_USER": "nobody"}


def matmul(*options: str | int | float) -> list[str]:
    return runtime.command([runtime.debug_elf("bmg", "matmul")], *options)


class Recorder:
    """A recorder that is recording, and ends with `stop`."""

    def __init__(self, hardware: Hardware, capture: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [*IAPROF, "record", "-o", str(capture), *BARE],
            env=os.environ | environment(hardware) | env,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.spool = spool_of(capture)
        until_recording(self.process)

    def stop(self) -> tuple[int, str]:
        """Its exit code, and what it said."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=300)
        return self.process.returncode, errors


def as_user(user: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command as a user."""
    return subprocess.run(
        [str(word) for word in words], user=user, group=user, extra_groups=[], cwd="/", capture_output=True, text=True
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Reports with a user's rights. It reports once before, unseen and as root, and is called wrongly once: that loads what
# only root may get at.
REPORT = """
import contextlib, io, os, sys
from iaprof.cli.main import main
import iaprof.gpu.intel.zebin  # what reads modules where no process can be started for that
user = int(sys.argv.pop(1))
unseen = io.StringIO()
asked = sys.argv
for sys.argv in ([*asked, "--no-such-option"], asked):
    with contextlib.redirect_stdout(unseen), contextlib.redirect_stderr(unseen), contextlib.suppress(SystemExit):
        main()
os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)
main()
"""


def test_recorded_as_root_reported_as_a_user(folder: Path) -> None:
    # given a recording that a user started with sudo
    capture = folder / "c"
    with Hardware(folder.parent / "gpu") as hardware:
        recorder = Recorder(hardware, capture, SUDO)
        # when, then: from the first byte the user's, and nobody else's
        (spool,) = folder.iterdir()
        assert (spool.stat().st_uid, spool.stat().st_gid, spool.stat().st_mode & 0o777) == (NOBODY, NOBODY, 0o600)
        subprocess.run(
            matmul("--seconds", 1), env=os.environ | {"STANDIN_DIR": str(hardware.folder)}, stdout=subprocess.DEVNULL
        )
        code, errors = recorder.stop()
    assert code == 0, errors
    assert names(folder) == ["c"]
    assert (capture.stat().st_uid, capture.stat().st_gid, capture.stat().st_mode & 0o777) == (NOBODY, NOBODY, 0o600)
    # and the user reports what was recorded, a third one does not
    reports = []
    for user in (NOBODY, THIRD):
        words = [IAPROF[0], "-c", REPORT, str(user), "report", str(capture)]
        reports.append(subprocess.run(words, capture_output=True, text=True, cwd="/", check=False))
    assert reports[0].returncode == 0, reports[0].stderr
    counted = sum(int(line.rsplit(" ", 1)[1]) for line in reports[0].stdout.splitlines())
    assert counted == hardware.ledger().samples_captured > 0
    assert "cannot be opened: Permission denied" in reports[1].stderr
    assert (reports[1].returncode, reports[1].stdout) == (1, "")
    # and the user may throw it away, and the third may not even read a byte
    assert as_user(THIRD, "cat", capture).returncode != 0
    assert as_user(NOBODY, "rm", capture).returncode == 0


def test_a_folder_that_is_swapped_for_a_link(folder: Path) -> None:
    # given a recording into a folder of the other user's, and a folder of root's
    victim = folder.parent / "victim"
    victim.mkdir(mode=0o755)
    target = folder / "a" / "b"
    target.mkdir(parents=True)
    for path in (folder / "a", target):
        os.chown(path, NOBODY, NOBODY)
    with Hardware(folder.parent / "gpu") as hardware:
        recorder = Recorder(hardware, target / "c", {})
        # when the other user puts a link to that in the way
        assert as_user(NOBODY, "mv", folder / "a", folder / "moved").returncode == 0
        assert as_user(NOBODY, "mkdir", folder / "a").returncode == 0
        assert as_user(NOBODY, "ln", "-s", victim, folder / "a" / "b").returncode == 0
        (victim / "c.spool").write_text("root's own")
        # and the recorder goes on in another file, and ends
        recorder.process.send_signal(signal.SIGUSR2)
        until(
            lambda: len(names(folder / "moved" / "b")) == 2 and "c" not in names(folder / "moved" / "b"),
            recorder.process,
        )
        code, errors = recorder.stop()
    # then the captures are in the folder that was meant
    assert code == 0, errors
    captures = names(folder / "moved" / "b")
    assert len(captures) == 2
    assert "c" in captures
    for capture in captures:
        assert CaptureReader(folder / "moved" / "b" / capture).header["recovered"] is False
        assert (folder / "moved" / "b" / capture).stat().st_mode & 0o777 == 0o600
    assert names(victim) == ["c.spool"]


@pytest.mark.parametrize("output", usually(["way/victim/c"], ["link/c", "way/victim/c"]))
def test_a_strangers_link_is_not_followed(folder: Path, output: str) -> None:
    # given a link that the other user made before
    victim = folder.parent / "victim"
    victim.mkdir()
    assert as_user(NOBODY, "ln", "-s", victim, folder / "link").returncode == 0
    assert as_user(NOBODY, "ln", "-s", folder.parent, folder / "way").returncode == 0
    with Hardware(folder.parent / "gpu") as hardware:
        # when, then root refuses it, says which, and writes nothing
        done = iaprof("record", "-o", folder / output, "-d", "0.2", env=environment(hardware) | {"SUDO_UID": ""})
        assert done.code == 1
        assert f"'{output.split('/')[0]}' belongs to user {NOBODY}" in done.err
        assert names(victim) == []
        # and the same user may have root follow it by sudo
        done = iaprof("record", "-o", folder / output, "-d", "0.2", env=environment(hardware) | SUDO)
        assert done.code == 0, done.err
        assert names(victim) == ["c"]


def test_names_that_are_taken_by_links(folder: Path) -> None:
    """The spool's name is not a secret: another user can put something there first."""
    victim = folder.parent / "victim"
    victim.write_text("root's own")
    (folder / "c.spool").symlink_to(victim)
    (folder / "d").symlink_to(victim)
    with Hardware(folder.parent / "gpu") as hardware:
        done = iaprof("record", "-o", folder / "c", "-d", "0.2", env=environment(hardware))
        assert done.code == 1
        assert "c.spool exists" in done.err
        # a name that is a link is replaced, if that is what was asked for, and what it leads to is not
        record(hardware, folder / "d", "-f", "-d", "0.2")
    assert victim.read_text() == "root's own"
    assert not (folder / "d").is_symlink()
    assert CaptureReader(folder / "d").header["recovered"] is False


@pytest.mark.alone  # others would fill what little room there is
def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu", rate=100_000) as hardware:
        # given a recorder whose files may have a megabyte more than it has written
        recorder = Recorder(hardware, tmp_path / "c", {})
        environ = os.environ | {"STANDIN_DIR": str(hardware.folder)}
        command = matmul("--seconds", 600, "--rate", 100, "--duration-us", 9000)
        program = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
        until(lambda: has_stalls(tmp_path / "c"), recorder.process)
        most = recorder.spool.stat().st_size + (1 << 20)
        resource.prlimit(recorder.process.pid, resource.RLIMIT_FSIZE, (most, most))
        before = recorder.spool.stat().st_size  # it may have written that much meanwhile
        # when more comes
        code, errors = recorder.wait()
        program.terminate()
        program.wait()
    # then it ends with one sentence, and what was recorded is there
    assert code == 1
    assert one_sentence(errors), errors
    assert "File too large" in errors
    assert f"iaprof recover {tmp_path}/c.spool" in errors
    assert (tmp_path / "c.spool").stat().st_size <= max(most, before)
    assert iaprof("recover", tmp_path / "c.spool").code == 0
    assert 0 < CaptureReader(tmp_path / "c").header["totals"]["stalls"] < hardware.ledger().records_produced
