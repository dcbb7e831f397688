"""Programs of others on untrusted bytes: what they get, what they may do, and how their failures are handled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from iaprof.gpu.instructions import Program
from iaprof.sandbox.programs import FILE, open_program
from iaprof.sandbox.reader import OutOfTime, stage_limit
from limits import Within
from unit.fakeprogram import build
from waiting import is_running, until

MOST, SECONDS = 1 << 20, 20.0


Opened = Callable[..., Program]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Opens programs, by default with their file as the only argument, and ends their helpers at the end."""
    channels: list[int] = []
    before = set(helpers())

    def open_one(path: Path, choices: Sequence[Sequence[str]] = ((FILE,),)) -> Program:
        program = open_program(str(path), choices)
        channels.append(program._channel)  # type: ignore[attr-defined]
        return program

    yield open_one
    for channel in channels:
        os.close(channel)
    for helper in set(helpers()) - before:
        assert os.waitpid(helper, 0)[1] == 0


def helpers() -> Iterator[int]:
    """The children of this process."""
    for thread in Path("/proc/self/task").iterdir():
        yield from map(int, (thread / "children").read_text().split())


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    body = 'fwrite(code, 1, length, stdout); fprintf(stderr, "%d %s", count, arguments[1]); return 7;'
    return build(tmp_path_factory.mktemp("echo"), body)


def test_it_reads_the_bytes_and_its_output_comes_back(echo: Path, opened: Opened) -> None:
    program = opened(echo, [["first", FILE], ["second", "x", FILE]])
    for data in (b"", b"x", os.urandom(1 << 20)):
        assert program.run(0, data, 2 << 20, SECONDS) == (7, data, b"3 first")
        assert program.run(1, data, 2 << 20, SECONDS) == (7, data, b"4 second")


def test_it_runs_for_a_process_with_much_memory_and_handlers_for_forks(tmp_path: Path) -> None:
    """A process of its own, as Arrow's handlers stay: its descriptors that Arrow closes are no longer there."""
    program = build(tmp_path, "fwrite(code, 1, length, stdout);")
    asks = f"""
import io, mmap, os, pyarrow.csv
from iaprof.sandbox.programs import FILE, open_program
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
pyarrow.csv.read_csv(io.BytesIO(b"a\\n1\\n"))  # from now on Arrow has a pipe and a thread for signals
memory = mmap.mmap(-1, 3 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
program = open_program({str(program)!r}, [[FILE]])
for data in (b"", os.urandom(1 << 20)):
    assert program.run(0, data, 2 << 20, {SECONDS}) == (0, data, b"")
"""
    subprocess.run([sys.executable, "-c", asks], check=True)


def test_what_is_no_program(tmp_path: Path, echo: Path) -> None:
    script, plain = tmp_path / "script", tmp_path / "plain"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    plain.write_bytes(echo.read_bytes())
    for path in (script, plain, tmp_path, tmp_path / "none"):
        with pytest.raises(OSError, match=r"is no program|Is a directory|No such file"):
            open_program(str(path), [[]])


def test_its_rights(tmp_path: Path, opened: Opened) -> None:
    """The tries of a program that an attacker has taken over."""
    tries = [
        'open("/etc/passwd", O_RDONLY)',
        f'open("{tmp_path}/secret", O_RDONLY)',
        f'open("{tmp_path}/new", O_WRONLY | O_CREAT, 0666)',
        'open("/tmp", O_TMPFILE | O_RDWR, 0600)',
        f'unlink("{tmp_path}/secret")',
        "socket(AF_UNIX, SOCK_STREAM, 0)",
        "socket(AF_INET, SOCK_STREAM, 0)",
        "fork()",
        "kill(getppid(), 0)",
        'memfd_create("m", 0)',
        "setuid(0)",
        "(long)mmap(0, 4096, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0)",
        'write(open("/proc/self/fd/0", O_RDWR), "x", 1)',
        'execl("/bin/true", "true", 0)',
    ]
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secret").chmod(0o666)
    folder = tmp_path / "program"
    folder.mkdir()
    body = "".join(f"TRY({each});" for each in tries[:-1]) + 'printf("uid %d\\n", getuid());'
    status, output, errors = opened(build(folder, body)).run(0, b"data", MOST, SECONDS)
    assert (status, errors) == (0, b"")
    *results, uid = output.decode().splitlines()
    for each, line in zip(tries, results, strict=False):
        assert line.startswith(f"{each} -1 "), line
        assert line.endswith((" EPERM", " EACCES", " EBADF")), line
    assert uid == f"uid {os.geteuid() or 65534}"
    assert (tmp_path / "secret").read_text() == "secret"
    assert not (tmp_path / "new").exists()


def test_it_cannot_write_into_what_it_reads(tmp_path: Path, opened: Opened) -> None:
    body = 'TRY(ftruncate(0, 1 << 30)); TRY(write(0, "xxxxxxxxxxx", 11)); TRY(1);'
    status, output, _ = opened(build(tmp_path, body)).run(0, b"data", MOST, SECONDS)
    assert (status, output) != (0, b"")  # SIGXFSZ, or errors
    assert b"11" not in output.replace(b", 11)", b"")


def test_it_may_take_too_long(tmp_path: Path, opened: Opened, within: Within) -> None:
    program = opened(build(tmp_path, "if (code[0] == 'E') for (;;) ; else puts(\"well\");"))
    with within(20), pytest.raises(TimeoutError):
        program.run(0, b"E", MOST, 0.5)
    assert program.run(0, b"x", MOST, SECONDS) == (0, b"well\n", b"")


@pytest.mark.parametrize("file", ["stdout", "stderr"])
def test_it_may_write_too_much(tmp_path: Path, opened: Opened, within: Within, file: str) -> None:
    program = opened(build(tmp_path, f'if (code[0] == 69) for (;;) fputs("xxxxxxx", {file});'))
    with within(20), pytest.raises(TimeoutError):
        program.run(0, b"E", MOST, SECONDS)
    assert program.run(0, b"x", MOST, SECONDS) == (0, b"", b"")


@pytest.mark.parametrize(
    ("evil", "status"),
    [
        ("abort()", -signal.SIGABRT),
        ("exit(1)", 1),
        ("raise(SIGSEGV)", -signal.SIGSEGV),
        ("for (;;) if (!malloc(1 << 20)) exit(9)", 9),
    ],
)
def test_it_may_die(tmp_path: Path, opened: Opened, evil: str, status: int) -> None:
    program = opened(build(tmp_path, f"if (code[0] == 69) {evil};"))
    assert program.run(0, b"E", MOST, SECONDS)[0] == status
    assert program.run(0, b"x", MOST, SECONDS) == (0, b"", b"")


def test_it_may_close_its_pipes_and_stay(tmp_path: Path, opened: Opened, within: Within) -> None:
    program = build(tmp_path, "close(1); close(2); for (;;) pause();")
    with within(20), pytest.raises(TimeoutError):
        opened(program).run(0, b"", MOST, 0.5)


def test_whoever_asks_may_give_up(tmp_path: Path, opened: Opened, within: Within) -> None:
    """The time limit of a stage ends the waiting; the next answer is not that of the request before."""
    body = "if (code[0] == 'E') for (;;) puts(\"evil\"); fwrite(code, 1, length, stdout);"
    program = opened(build(tmp_path, body))
    with within(30):
        for number in range(5):
            with pytest.raises(OutOfTime), stage_limit(0.1):
                program.run(0, b"E" * (1 + 100_000 * number), 1 << 40, 100)
            data = os.urandom(200_000).replace(b"E", b"e")
            assert program.run(0, data, MOST, SECONDS) == (0, data, b"")


def test_requests_that_whoever_is_taken_over_would_make(echo: Path, opened: Opened) -> None:
    program = opened(echo)
    channel = program._channel  # type: ignore[attr-defined]
    for evil in (b"", b"r", b"r" + bytes(36), b"d" + bytes(90), b"r" + b"\xff" * 36, os.urandom(500)):
        if evil:
            os.write(channel, evil)
    assert program.run(0, b"x", MOST, SECONDS) == (7, b"x", b"2 /proc/self/fd/0")
    with pytest.raises(OSError, match="more than"):
        program.run(0, bytes(65 << 20), MOST, SECONDS)


def executes(pid: int) -> str:
    """The path of a process's program; empty before it executes one that this user may look at."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except PermissionError:
        return ""


def test_it_ends_with_its_helper(tmp_path: Path, opened: Opened) -> None:
    before = set(helpers())
    program = opened(build(tmp_path, "for (;;) pause();"))
    (helper,) = set(helpers()) - before
    refusals: list[OSError] = []

    def ask() -> None:
        try:
            program.run(0, b"", MOST, 60.0)
        except OSError as error:
            refusals.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    children = Path(f"/proc/{helper}/task/{helper}/children")
    until(lambda: children.read_text() != "")
    status = Path(f"/proc/{helper}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert f"Uid:\t{os.geteuid() or 65534}\t" in status
    running = int(children.read_text())
    until(lambda: executes(running).endswith("/program"))
    os.kill(helper, signal.SIGKILL)
    asking.join(60)
    assert len(refusals) == 1
    os.waitpid(helper, 0)
    until(lambda: not is_running(running))
