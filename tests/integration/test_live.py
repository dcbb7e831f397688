"""`iaprof top --live` on the stand-in, in a terminal: what it shows, keeps, and leaves behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from integration.recording import IAPROF, environment, iaprof
from standin import runtime
from standin.hardware import Hardware
from terminals import Terminal
from waiting import until

pytestmark = pytest.mark.bpf
SCRIPT = (
    'echo "this is printed"; told=$1; shift; "$@" & while [ ! -e $told ]; do sleep 0.1; done; kill $!; wait; exit 3'
)
USER = "12345"  # neither root nor the user that children of root become
SUDO = {"SUDO_UID": USER, "SUDO_GID": USER}


def shown(hardware: Hardware, *words: object, **more: str) -> Terminal:
    return Terminal(
        [*IAPROF, "top", "--live", *words], os.environ | environment(hardware) | SUDO | more, columns=120, lines=30
    )


def displays(recorder: int) -> list[Path]:
    """The processes that show what a recorder records."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((each / "stat").read_text().rpartition(") ")[2].split()[1])
            if parent == recorder and b"cli.live.display" in (each / "cmdline").read_bytes():
                found.append(each)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_a_recording_is_shown_by_a_process_without_rights_and_kept_if_wanted(tmp_path: Path) -> None:
    # given a program that launches kernels until it is told to fail
    capture, told = tmp_path / "cap.parquet", tmp_path / "told"
    with Hardware(tmp_path / "gpu") as hardware:
        command = runtime.command([runtime.debug_elf("bmg", "matmul")], "--seconds", 300)
        words = ["sh", "-c", SCRIPT, "sh", told, *command]
        # when
        with shown(hardware, "-o", capture, "--", *words) as terminal:
            terminal.until("multiply_local_access_and_tiling", "launches/s", "CPU: recorder")
            # then
            (display,) = displays(terminal.process.pid)
            status = dict(line.split(":", 1) for line in (display / "status").read_text().splitlines())
            assert status["Uid"].split() == status["Gid"].split() == [USER] * 4
            assert status["CapEff"].split() == ["0000000000000000"]
            assert status["NoNewPrivs"].split() == ["1"]
            # when
            told.touch()
            terminal.until("the recording has ended")
            terminal.press("v")
            terminal.until("this is printed")
            terminal.press("q")
            terminal.press("q")
            code = terminal.wait()
            # then
            assert code == 3
            assert "wrote " in terminal.text
    done = iaprof("top", capture, "--json", "-q")
    assert f'"samples": {hardware.ledger().samples_captured}' in done.out


def test_quitting_ends_the_command_and_leaves_nothing(tmp_path: Path) -> None:
    # given
    folder = tmp_path / "temporary"
    folder.mkdir()
    with Hardware(tmp_path / "gpu") as hardware:
        command = runtime.command([runtime.debug_elf("bmg", "matmul")], "--seconds", 300)
        # when
        with shown(hardware, "--", *command, TMPDIR=str(folder)) as terminal:
            terminal.until("multiply_basic", "launches/s")
            (spool,) = folder.rglob("*.spool")
            until(lambda: spool.stat().st_blocks * 512 < spool.stat().st_size / 2)  # what was read is released
            terminal.press("q")
            code = terminal.wait()
            # then
            assert code == 0  # as this program ends in good order
    assert list(folder.iterdir()) == []


def test_a_user_who_cannot_read_what_is_installed_sees_it_all_the_same(tmp_path: Path) -> None:
    # given an installation in a folder of root's
    secret, here = tmp_path / "secret", tmp_path / "secret" / "installed"
    (here / "bin").mkdir(parents=True)
    (here / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    for name in ("lib", "pyvenv.cfg"):
        (here / name).symlink_to(Path(sys.prefix) / name)
    secret.chmod(0o700)
    with Hardware(tmp_path / "gpu") as hardware:
        command = runtime.command([runtime.debug_elf("bmg", "matmul")], "--seconds", 300)
        words = [here / "bin" / "python", "-m", "iaprof", "top", "--live", "--", *command]
        # when
        with Terminal(words, os.environ | environment(hardware) | SUDO, columns=120, lines=30) as terminal:
            terminal.until("multiply_basic", "launches/s")
            # then
            (display,) = displays(terminal.process.pid)
            assert (display / "cmdline").read_bytes().startswith(bytes(here))
            terminal.press("?")
            terminal.until("clear all filters")  # in the help
            terminal.press("q")
            terminal.press("q")
            assert terminal.wait() == 0


def test_without_a_terminal_it_says_so() -> None:
    done = iaprof("top", "--live", "--", "true")
    assert (done.code, done.err) == (2, "iaprof: --live needs a terminal for its input, output and errors\n")
