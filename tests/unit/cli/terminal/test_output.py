"""What verbs do on a terminal, and when what reads their output goes away."""

import fcntl
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from iaprof.formats.writers.registry import FORMATS
from thorough import usually
from unit.capturing import capture, launch, record, stall

ADDRESS = 0x10000
KERNELS = 60
PROGRESS = re.compile(r"\r\x1b\[K(?:[^\r\n]*\r\x1b\[K)*")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture of more kernels than a terminal has lines."""
    places = [ADDRESS + 0x1000 * number for number in range(KERNELS)]
    stalls = [stall(99, *(record(place, sbid=number + 1) for number, place in enumerate(places)))]
    launches = [launch(2, 7, place, 11, name=f"kernel_{number}") for number, place in enumerate(places)]
    return capture(tmp_path_factory.mktemp("many") / "many.parquet", stall=stalls, launch=launches)


def on_terminal(*words: str | Path, **environment: str) -> tuple[int, str]:
    """The exit code and what comes to a terminal of 24 lines and 80 columns, stderr included.

    Leaves out progress, which is drawn and erased after a second, on a machine that is busy.
    """
    ours, theirs = pty.openpty()
    known = {name: value for name, value in os.environ.items() if name not in ("PAGER", "LESS", "NO_COLOR")}
    settings = {**known, "TERM": "xterm", "COLUMNS": "80", "LINES": "24", "NO_COLOR": "1", **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "iaprof", *words], stdin=theirs, stdout=theirs, stderr=theirs, env=settings
    )
    os.close(theirs)
    seen = drawn(ours)
    return process.wait(), PROGRESS.sub("", seen).replace("\r\n", "\n")


def drawn(terminal: int) -> str:
    """All that comes to a terminal until nobody has it open; closes it."""
    seen = b""
    while True:
        try:
            seen += os.read(terminal, 1 << 16)
        except OSError:  # EIO: the other end is closed
            os.close(terminal)
            return seen.decode()


def test_report_shows_a_table_of_all_kernels_in_the_pager(many: Path, tmp_path: Path) -> None:
    # given a pager that shows where it begins and ends
    pager = tmp_path / "pager"
    pager.write_text("#!/bin/sh\necho pager begins\ncat\necho pager ends\n")
    pager.chmod(0o755)
    # when a capture is reported on a terminal
    code, seen = on_terminal("report", many, "-q", PAGER=str(pager))
    # then all of the table is in the pager
    lines = seen.splitlines()
    assert (code, lines[0], lines[-1]) == (0, "pager begins", "pager ends")
    assert lines[1].split() == ["SAMPLES", "SHARE", "TOP", "REASON", "LAUNCHES", "PROCS", "KERNEL"]
    assert [line.split()[-1] for line in lines[2:-2]] == [f"kernel_{number}" for number in reversed(range(KERNELS))]


@pytest.mark.parametrize("pager", ["", "cat", "no-such-pager", "'"])
def test_without_a_pager_the_table_is_printed(many: Path, pager: str) -> None:
    code, seen = on_terminal("report", many, "-q", PAGER=pager)
    assert (code, len(seen.splitlines())) == (0, KERNELS + 2)


def test_a_pager_that_ends_early_is_no_error(many: Path) -> None:
    assert on_terminal("report", many, "-q", PAGER="true") == (0, "")


def test_a_short_table_needs_no_pager(many: Path) -> None:
    code, seen = on_terminal("report", many, "-q", "--kernel", "^kernel_5$", PAGER="false")
    assert (code, len(seen.splitlines())) == (0, 3)


@pytest.mark.parametrize("option", ["--format=folded", "--frames=function"])
def test_what_is_asked_for_is_no_table(many: Path, option: str) -> None:
    code, seen = on_terminal("report", many, "-q", option)
    assert code == 0
    assert "SAMPLES" not in seen
    assert len(seen.splitlines()) == KERNELS


BINARY = ("html", "perfetto", "pprof", "otlp", "parquet")


@pytest.mark.parametrize("format_", usually(("html", "parquet"), BINARY))
def test_no_binary_on_a_terminal(many: Path, format_: str) -> None:
    said = f"iaprof: refusing to write {format_} output to a terminal: name a file with -o, or use a pipe\n"
    assert on_terminal("report", many, f"--format={format_}") == (2, said)


@pytest.mark.parametrize("words", ["diff {0} {0} --format=html", "diff {0} {0} --format=parquet",
                                   "query {0} --format=parquet SELECT"])  # fmt: skip
def test_no_binary_of_other_verbs(many: Path, words: str) -> None:
    format_ = words.partition("=")[2].split()[0]
    said = f"iaprof: refusing to write {format_} output to a terminal: name a file with -o, or use a pipe\n"
    assert on_terminal(*words.format(many).split()) == (2, said)


@pytest.mark.parametrize("format_", usually(("folded", "html", "parquet"), FORMATS))
def test_a_closed_pipe_has_one_exit_code(many: Path, format_: str) -> None:
    """Given that what reads stdout is gone, any format ends with the exit code of SIGPIPE, and without a word."""
    if format_ == "otlp":
        pytest.importorskip("opentelemetry")
    assert into_closed_pipe("report", many, "-q", f"--format={format_}") == (141, b"")


@pytest.mark.parametrize("words", ["top {0}", "info {0}", "annotate {0}", "query {0}", "diff {0} {0} --json", "--help",
                                   "report --help"])  # fmt: skip
def test_a_closed_pipe_of_other_verbs(many: Path, words: str) -> None:
    assert into_closed_pipe(*words.format(many).split()) == (141, b"")


def into_closed_pipe(*words: str | Path) -> tuple[int, bytes]:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "iaprof", *words], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    return done.returncode, done.stderr


def test_nothing_is_lost_without_buffers_of_python(many: Path, tmp_path: Path) -> None:
    """Given PYTHONUNBUFFERED, with which Python drops what a short write leaves, and room for a part of the text."""
    written = tmp_path / "cap.folded"
    with written.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "iaprof", "report", many, "-q"],
            stdout=out,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
        )
    assert written.stat().st_size == 1000
    assert (done.returncode, done.stderr) == (1, b"iaprof: the output cannot be written: File too large\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_table_has_the_terminals_width(many: Path, unbuffered: str) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 46, 0, 0))
    known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    words = [sys.executable, "-m", "iaprof", "top", str(many), "-q", "-n", "2", "--by", "instruction"]
    with subprocess.Popen(words, stdout=theirs, env=known | {"PYTHONUNBUFFERED": unbuffered, "NO_COLOR": "1"}) as done:
        os.close(theirs)
        lines = drawn(ours).splitlines()
    assert (done.returncode, len(lines)) == (0, 5)
    assert 42 < max(map(len, lines)) <= 46
