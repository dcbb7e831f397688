"""Command lines completed by bash, zsh and fish themselves, as a user would type them."""

import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from thorough import usually

WITHIN_S = 60
READY = "ready-now"
LINES = {  # what is typed before Tab, and what the line is then
    "iaprof rep": "iaprof report ",
    "iaprof --ver": "iaprof --version ",
    "iaprof report --no-inl": "iaprof report --no-inlines ",
    "iaprof report --format spe": "iaprof report --format speedscope ",
    "iaprof report --format=spe": "iaprof report --format=speedscope ",
    "iaprof report --frames host,pi": "iaprof report --frames host,pid",
    "iaprof top --by laun": "iaprof top --by launcher ",
    "iaprof info ca": "iaprof info cap.parquet ",
    "iaprof diff cap.parquet ne": "iaprof diff cap.parquet new.parquet ",
    "iaprof recover d": "iaprof recover died.spool ",
    "iaprof report -o not": "iaprof report -o notes.txt ",
    "iaprof report --source-dir s": "iaprof report --source-dir src/",
    "iaprof record --launches inj": "iaprof record --launches inject ",
    "iaprof help calib": "iaprof help calibrate ",
}
SOME = ("iaprof rep", "iaprof report --frames host,pi", "iaprof info ca")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cap.parquet", "new.parquet", "died.spool", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "src").mkdir()
    return tmp_path


class Shell:
    """An interactive shell on a terminal of its own."""

    def __init__(self, command: list[str], folder: Path, setup: str) -> None:
        """Starts it, and waits until it has read what sets it up."""
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe(command[0], command, {**os.environ, "TERM": "dumb", "HISTFILE": "", "HOME": str(folder)})
        self.type(f"{setup}; echo {READY[:5]}''{READY[5:]}\n")
        self.wait_for(f"\n{READY}")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> str:
        """Reads until a text has come; returns all that came."""
        end, seen = time.monotonic() + WITHIN_S, ""
        while text not in seen:
            ready, _, _ = select.select([self._fd], [], [], max(end - time.monotonic(), 0))
            assert ready, f"no {text!r} came: {seen!r}"
            seen += os.read(self._fd, 4096).decode(errors="replace").replace("\a", "").replace("\r", "")
        return seen

    def end(self) -> None:
        os.close(self._fd)  # the shell gets a SIGHUP
        os.waitpid(self._pid, 0)


def completed(shell: Shell, line: str) -> str:
    """The line after Tab: it becomes an argument of printf, which prints it between brackets."""
    shell.type(f"{line}\t")
    shell.type("\x01printf '[''[%s]'']' '\x05'\n")  # Ctrl-A and Ctrl-E: before and behind it; the echo has no [[
    return shell.wait_for("]]").rpartition("[[")[2].partition("]]")[0]


@pytest.fixture
def bash(installed: Path, folder: Path) -> Iterator[Shell]:
    script = installed / "share/bash-completion/completions/iaprof"
    shell = Shell(["bash", "--norc", "--noprofile", "-i"], folder, f"PS1='$ '; source {script}")
    yield shell
    shell.end()


@pytest.fixture
def zsh(installed: Path, folder: Path) -> Iterator[Shell]:
    functions = installed / "share/zsh/site-functions"
    setup = f"PS1='> '; bindkey -e; fpath=({functions} $fpath); autoload -Uz compinit; compinit -u -D"
    shell = Shell(["zsh", "-f", "-i"], folder, setup)
    yield shell
    shell.end()


def test_bash(bash: Shell) -> None:
    for line, expected in LINES.items():
        assert completed(bash, line) == expected


def test_zsh(zsh: Shell) -> None:
    for line, expected in LINES.items():
        # zsh drops the comma, slash or space that it put behind a value when nothing follows.
        assert completed(zsh, line).rstrip(", /") == expected.rstrip(" /")


@pytest.mark.parametrize("line", usually(SOME, LINES))
def test_fish(line: str, installed: Path, folder: Path) -> None:
    script = installed / "share/fish/vendor_completions.d/iaprof.fish"
    command = f"source {script}; complete -C {line!r}"
    done = subprocess.run(
        ["fish", "--no-config", "-c", command], cwd=folder, env={**os.environ, "HOME": str(folder)},
        capture_output=True, text=True,
    )  # fmt: skip
    offered = [each.partition("\t")[0] for each in done.stdout.splitlines()]
    typed = line.rpartition(" ")[2]
    expected = LINES[line].strip().rpartition(" ")[2]
    assert (done.stderr, offered[0]) == ("", expected), offered
    assert all(each.startswith(typed) for each in offered)


def test_the_recorded_command_has_its_own_completion(bash: Shell, zsh: Shell, folder: Path) -> None:
    assert completed(zsh, "iaprof record -o x -- cat not").rstrip() == "iaprof record -o x -- cat notes.txt"
    assert completed(bash, "iaprof record -o x -- cat not") == "iaprof record -o x -- cat notes.txt "
