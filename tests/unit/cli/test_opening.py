"""`iaprof report --open` and `--serve`: pages for the local user only."""

import http.client
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import pytest

from iaprof.formats.export import Export
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.flame_svg import FlameSvg
from thorough import thorough
from unit.capturing import capture, launch, record, stall
from unit.in_process import iaprof

ADDRESS = 0x8000_0001_0000
REPORT = [sys.executable, "-m", "iaprof", "report"]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    stalls = [stall(9, record(ADDRESS, sbid=3), record(0x40, send=2))]
    return capture(tmp_path / "c.parquet", stall=stalls, launch=[launch(2, 7, ADDRESS, 11)])


@thorough
def test_a_served_page_is_that_of_a_file(good: Path, tmp_path: Path) -> None:
    # given
    page = tmp_path / "c.svg"
    subprocess.run([*REPORT, "-q", good, "-o", page], check=True)
    # when
    with subprocess.Popen([*REPORT, good, "--serve", "--format=svg"], stderr=subprocess.PIPE, text=True) as serving:
        assert serving.stderr is not None
        address = next(found[1] for line in serving.stderr if (found := re.search(r"serving (\S+) until Ctrl-C", line)))
        at = urlsplit(address)
        connection = http.client.HTTPConnection(at.netloc, timeout=120)
        connection.request("GET", at.path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        serving.send_signal(signal.SIGINT)
        rest = serving.stderr.read()
    # then
    assert (at.hostname, answer.status, answer.headers["Content-Type"]) == (
        "127.0.0.1",
        200,
        "image/svg+xml; charset=utf-8",
    )
    assert body == page.read_bytes()
    assert (serving.returncode, rest) == (0, "")


def test_a_page_is_opened_in_the_users_browser(good: Path, tmp_path: Path) -> None:
    # given a user other than root, with a browser
    good.chmod(0o644)
    os.chmod(tmp_path, 0o755)
    browser = tmp_path / "browser"
    browser.write_text('#!/bin/sh\nhead -c 5 "${1#file://}"\necho " of $1"\n')
    browser.chmod(0o755)
    folder = tmp_path / "temporary"
    folder.mkdir()
    # when
    words: list[str | Path] = [*REPORT, good, "--open", "--format=svg"]
    environment = os.environ | {"BROWSER": f"{browser} %s", "TMPDIR": str(folder)}
    if os.geteuid() == 0:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        # then root gets a message, and no browser starts
        assert "a browser is not started as root: open file://" in done.stderr
        assert done.stdout == ""
    else:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("<svg")
    # and only the user can read the page
    (made,) = folder.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in made.iterdir()] == ["c.svg"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--open", "--format=folded"), "folded is for other programs"),
        (("--serve", "-o", "x.html"), "--serve writes no file"),
        (("--open", "-o", "x.folded"), "folded is for other programs"),
    ],
)
def test_errors(good: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = subprocess.run([*REPORT, good, *words], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c.parquet"]


def test_a_failed_page_leaves_no_folder(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a page that needs too much memory
    def write(self: FlameSvg, export: Export, options: StackOptions, out: IO[str]) -> None:
        out.write("<svg")
        raise MemoryError

    monkeypatch.setattr(FlameSvg, "write", write)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    # when
    done = iaprof("report", good, "--open", "--format=svg", "--memory-limit=1G")
    # then
    assert done.code == 1
    assert done.err.startswith("iaprof: this needs more memory than the 1G that it may take: ")
    assert list(folder.iterdir()) == []


def test_without_a_folder_for_temporary_files(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    done = iaprof("report", good, "--open", "--format=svg", "-q")
    problem = "there is no room for temporary files (No such file or directory)"
    assert (done.code, done.err) == (1, f"iaprof: {problem}: name a file with -o\n")
