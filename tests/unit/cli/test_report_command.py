"""`iaprof report` and `recover` on bad input: one sentence, the right exit code, and no files left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from iaprof.record.spool import Spool
from unit.capturing import capture, launch, record, stall
from unit.in_process import iaprof

ADDRESS = 0x8000_0001_0000


@pytest.fixture
def good(tmp_path: Path) -> Path:
    kernel = {"time_ns": 1, "pid": 7, "path": "/tmp/x.elf", "digest": b"1", "size": 9, "elf": b"\x7fELFbroken"}
    stalls = [stall(9, record(ADDRESS, sbid=3), record(0x40, send=2))]
    return capture(
        tmp_path / "c", stall=stalls, launch=[launch(2, 7, ADDRESS, 11, name="evil;name\x1b[2J")], kernel=[kernel]
    )


def test_a_broken_debug_elf_is_a_warning(good: Path) -> None:
    done = iaprof("report", good)
    assert done.code == 0
    assert done.out == (
        "[unknown process];-;[unknown kernel]_[G];send_[g];0x40_[g] 2\n"
        "app;7;[stack lost];-;evil:name\\x1b[2J_[G];[no binary]_[g];sbid_[g];0x0_[g] 3\n"
    )
    assert "iaprof: warning: /tmp/x.elf: it is" in done.err
    assert "matched to a kernel 60.0 %" in done.err
    assert "Traceback" not in done.err


def test_outputs(good: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.folded"
    assert iaprof("report", good, "-o", target, "-q").code == 0
    content = target.read_text()
    assert content == iaprof("report", good, "-q").out
    again = iaprof("report", good, "-o", target)
    assert (again.code, "exists" in again.err) == (1, True)
    other = tmp_path / "out.txt"
    assert iaprof("report", good, "-o", other, "--format", "iaprof").code == 0
    assert iaprof("report", good, "-o", other, "--format", "iaprof", "--force").code == 0
    assert other.read_text().startswith("interval\t")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("report", "{folder}/absent"), 1, "does not exist: name a file that 'iaprof record' wrote"),
        (("report", "{folder}/empty"), 1, "is empty"),
        (("report", "{folder}/text"), 1, "not an iaprof capture"),
        (("report", "{folder}/c", "--format", "xml"), 2, "--format takes folded, html"),
        (("report", "{folder}/c", "-o", "{folder}/x.unknown"), 2, "does not determine the format: end it in .folded, "),
        (("report", "{folder}/c", "-o", "{folder}/no/x.folded"), 1, "does not exist"),
        (("report", "{folder}/empty", "-o", "{folder}/x.folded"), 1, "is empty"),
        (("report", "{folder}/c", "-o", "{folder}/c", "--force", "--format", "folded"), 1, "is the input"),
        (("report", "{folder}/c", "-o", "/dev/null", "--force", "--format", "folded"), 1, "is not a file"),
        (("report", "{folder}/c", "--interval", "nan"), 2, "--interval must be"),
        (("report", "{folder}/c", "--interval", "inf"), 2, "--interval must be"),
        (("report", "{folder}/c", "--interval", "0"), 2, "--interval must be"),
        (("recover", "{folder}/text.spool", "-o", "{folder}/text.spool", "--force"), 1, "is not the spool"),
        (("recover", "{folder}/text"), 2, "does not end in .spool"),
        (("recover", "{folder}"), 2, " is a folder, not a spool: name the file CAPTURE.spool that a recording left"),
        (("recover", "{folder}/absent"), 1, "does not exist: name the spool"),
        (("recover", "{folder}/text.spool"), 1, "is not the spool"),
        (
            ("recover", "{folder}/absent.spool"),
            1,
            "does not exist: name the spool that a recording left; its folder has text.spool",
        ),
    ],
)
def test_errors(good: Path, tmp_path: Path, words: tuple[str, ...], code: int, message: str) -> None:
    (tmp_path / "empty").write_text("")
    for name in ("text", "text.spool"):
        (tmp_path / name).write_text("this is not a capture and no spool\x1b[31m")
    before = sorted(tmp_path.iterdir())
    done = iaprof(*(word.format(folder=tmp_path) for word in words))
    assert done.code == code
    assert message in done.err
    assert done.err.startswith("iaprof: ")
    assert done.err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_damaged_capture_leaves_no_output(tmp_path: Path) -> None:
    # given a capture whose second row group of stalls names an undefined stream
    path = capture(tmp_path / "c", stall=[stall(9, record(64, sbid=3), stream=4)])
    done = iaprof("report", path, "-o", tmp_path / "x.folded")
    assert done.code == 1
    assert "its header does not name" in done.err
    assert not (tmp_path / "x.folded").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def test_a_closed_pipe_is_no_error(good: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m iaprof report {good} | head -c 1", shell=True, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("redirection", "message"), [(">/dev/full", "No space left on device"), (">&-", "there is no stdout")]
)
def test_a_full_stdout_is_an_error(good: Path, redirection: str, message: str) -> None:
    command = f"{sys.executable} -m iaprof report {good} {redirection}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("iaprof: the output cannot be written: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_stderr_the_summary_is_left_out(good: Path) -> None:
    command = f"{sys.executable} -m iaprof report {good} 2>&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, iaprof("report", good, "-q").out)


def test_folded_text_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    path = capture(tmp_path / "c", stall=[stall(9, record(ADDRESS, sbid=3))], launch=[launch(2, 7, ADDRESS, name="é")])
    command: list[str | Path] = [sys.executable, "-m", "iaprof", "report", path, "-q"]
    done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert "é_[G]".encode() in done.stdout


def test_a_spool_is_not_replaced_by_its_own_capture(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s")
    spool.close()
    done = iaprof("recover", spool.path, "-o", spool.path, "--force")
    assert (done.code, "is the input" in done.err) == (1, True)
    assert spool.path.read_bytes().startswith(b"IAPS")


def test_warnings_about_many_modules_are_limited(tmp_path: Path) -> None:
    kernels = [{"time_ns": 1, "pid": 7, "path": "/x", "digest": b"%d" % n, "size": 9, "elf": b"x"} for n in range(100)]
    done = iaprof("report", capture(tmp_path / "c", kernel=kernels))
    assert done.err.count("warning: /x") == 1
    assert "warning: /x (and 99 more): it is" in done.err


def test_memory_has_a_limit(good: Path) -> None:
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from iaprof.cli import main\n"
        "from iaprof.formats.capture import reader\n"
        "reader.CaptureReader = lambda path: bytearray(2 << 30)\n"
        f"sys.argv = ['iaprof', 'report', '--memory-limit=1G', {str(good)!r}]\n"
        "main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = "iaprof: this needs more memory than the 1G that it may take: if you trust the files, allow more with "
    assert (done.returncode, done.stderr) == (1, f"{said}--memory-limit\n")


@pytest.mark.parametrize("verb", ["", "record", "report", "recover"])
def test_help_fits_a_terminal_and_has_examples(verb: str) -> None:
    done = iaprof(*[verb][: bool(verb)], "--help")
    assert done.code == 0
    assert max(len(line) for line in done.out.splitlines()) <= 100
    assert ("Examples" in done.out) == bool(verb)
    assert iaprof("--version").out.startswith("iaprof ")
