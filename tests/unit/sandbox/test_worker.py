"""Workers: what they inherit, and how they and their own children end."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import iaprof
from iaprof.basics.libraries import ONE_THREAD
from iaprof.sandbox.worker import Worker
from limits import Within
from unit.builds import no_descriptor_is_lost
from waiting import LONGEST_WAIT_S, is_running, until

Start = Callable[..., Worker]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Start]:
    """Returns a function that starts a worker with a script."""
    started: list[Worker] = []

    def start(source: str, *arguments: object, **how: Any) -> Worker:
        script = tmp_path / f"script{len(started)}.py"
        script.write_text(source)
        started.append(Worker("runpy:run_path", script, **how))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def told(run: Start, source: str, **how: Any) -> Any:
    """Runs a script in a worker, and returns the JSON that it prints."""
    with tempfile.TemporaryFile() as output:
        worker = run(source, output=output, errors=None, **how)
        assert worker.wait(LONGEST_WAIT_S)
        output.seek(0)
        return json.load(output)


STATE = """
import json, os, sys
files = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if int(name) > 2
         and os.path.exists(f"/proc/self/fd/{name}")}
print(json.dumps({"files": files, "stdin": os.readlink("/proc/self/fd/0"), "environment": dict(os.environ),
                  "session": os.getsid(0) == os.getpid(), "folder": os.getcwd(), "path": sys.path,
                  "prefix": sys.prefix, "modules": sorted(sys.modules)}))
"""


@pytest.mark.parametrize("bare", [False, True])
def test_a_worker_inherits_only_what_it_is_given(
    run: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: bool
) -> None:
    # given a process with an environment and inheritable open files
    monkeypatch.setenv("SECRET", "1")
    secret, given = (os.open(tmp_path / name, os.O_CREAT | os.O_RDWR) for name in ("secret", "given"))
    os.set_inheritable(secret, True)
    # when
    child = told(run, STATE, bare=bare, files=[given], environment={"GIVEN": "1"}, folder="/")
    os.close(secret)
    os.close(given)
    # then
    assert child["files"] == {str(given): str(tmp_path / "given")}
    assert child["stdin"] == "/dev/null"
    assert set(child["environment"]) <= {"GIVEN", "LC_CTYPE", *ONE_THREAD}  # Python sets LC_CTYPE if there is no locale
    assert child["session"], "Ctrl-C in a terminal would reach it"
    assert child["folder"] == "/"


@pytest.mark.parametrize("bare", [False, True])
def test_environment_and_working_directory_do_not_change_imports(
    run: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: bool
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('mine')")
    (tmp_path / "runpy.py").write_text("raise SystemExit('mine')")
    planted = {"PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": str(tmp_path / "json.py"), "PYTHONHOME": str(tmp_path)}
    child = told(run, STATE, bare=bare, environment=planted, folder=str(tmp_path))
    assert str(tmp_path) not in child["path"]


def test_a_worker_has_this_process_s_sys_path_and_a_bare_one_only_our_package(
    run: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    child = told(run, STATE)
    assert child["path"][0] == str(tmp_path / "elsewhere")
    assert child["prefix"] == sys.prefix
    assert "site" not in child["modules"], "it runs what packages put into their .pth files"
    bare = told(run, "import iaprof.record.kernels.collector_child" + STATE, bare=True)
    assert bare["path"][-1] == str(Path(iaprof.__file__).parents[1])
    assert all(path.startswith((sys.base_prefix, sys.prefix)) for path in bare["path"][:-1])
    assert not {"site", "numpy", "subprocess"} & set(bare["modules"])


def test_messages_can_include_open_files(run: Start, tmp_path: Path) -> None:
    worker = run(
        """
import json, os, socket
channel = socket.socket(fileno=0)
message, (file,), *_ = socket.recv_fds(channel, 1000, 1)
copy = os.memfd_create("copy")
os.write(copy, json.loads(message)["word"].encode() + os.pread(file, 100, 0))
socket.send_fds(channel, [b'{"done": true}'], [copy])
""",
        channel=socket.SOCK_SEQPACKET,
    )
    worker.channel.settimeout(LONGEST_WAIT_S)
    (tmp_path / "file").write_text(" there")
    with open(tmp_path / "file", "rb") as file:
        worker.send({"word": "hello"}, [file.fileno()])
        answer, (copy,) = worker.receive()
    assert answer == {"done": True}
    with open(copy, "rb") as file:
        assert os.pread(file.fileno(), 100, 0) == b"hello there"
    # and when it has ended
    assert worker.wait(LONGEST_WAIT_S)
    with pytest.raises(ConnectionResetError):
        worker.receive()
    with pytest.raises(OSError, match="Broken pipe"):
        worker.send({})


def test_status_and_cpu_time_of_an_ended_worker(run: Start) -> None:
    worker = run("import time\nwhile time.process_time() < 0.1: pass\nraise SystemExit(3)")
    assert worker.wait(LONGEST_WAIT_S)
    assert worker.has_ended()
    assert worker.status == 3
    assert 0.1 <= worker.cpu_seconds == worker.cpu_seconds_so_far()
    worker.close()
    assert worker.status == 3
    with pytest.raises(ChildProcessError):  # it has been reaped
        os.waitpid(worker.pid, os.WNOHANG)


def test_a_wait_has_a_time_limit(run: Start, within: Within) -> None:
    worker = run("import time\nwhile True: pass")
    with within(1):
        assert not worker.wait(0.05)
    assert worker.status is None
    while worker.cpu_seconds_so_far() == 0:
        assert not worker.has_ended()
    worker.kill()
    assert worker.wait(LONGEST_WAIT_S)
    assert worker.status == -signal.SIGKILL


STARTS = "import os, subprocess, sys\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_processes_of_a_worker_end_with_it(run: Start, ends: str) -> None:
    with tempfile.TemporaryFile() as output:
        worker = run(STARTS + ("" if ends == "by itself" else "while True: pass"), output=output)
        until(lambda: os.pread(output.fileno(), 100, 0).endswith(b"\n"))
        child = int(os.pread(output.fileno(), 100, 0))
    if ends == "by itself":
        assert worker.wait(LONGEST_WAIT_S)
    else:
        worker.close(LONGEST_WAIT_S)
    until(lambda: not is_running(child))


def test_a_worker_that_cannot_be_started_leaves_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with no_descriptor_is_lost(sockets=True), pytest.raises(BlockingIOError):
        Worker("runpy:run_path", channel=socket.SOCK_STREAM)


@pytest.mark.root
@pytest.mark.beside
def test_another_user_needs_no_right_to_search_the_folders_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a package in a private folder, as of an installation in root's home
    packages = tmp_path / "private" / "packages"
    packages.mkdir(parents=True)
    (packages / "greeting.py").write_text("import os, numpy\ndef greet(): print(os.getresuid(), os.getresgid())")
    packages.parent.chmod(0o700)
    monkeypatch.syspath_prepend(packages)
    # when
    with tempfile.TemporaryFile() as output:
        worker = Worker("greeting:greet", user=65534, output=output, errors=None)
        assert worker.wait(LONGEST_WAIT_S)
        worker.close()
        # then
        output.seek(0)
        assert output.read() == b"(65534, 65534, 65534) (65534, 65534, 65534)\n"


@pytest.mark.root  # for others, the kernel takes one nice value of a session each 100 ms, of all processes
@pytest.mark.beside
def test_a_child_and_what_it_starts_have_the_nice_value_that_is_asked_for(run: Start) -> None:
    # given a child that starts another one
    source = """
import json, os, time
from iaprof.basics.libraries import ONE_THREAD
from iaprof.sandbox.worker import Worker

def session(pid):
    path = f"/proc/{pid}/autogroup"
    return open(path).read().split()[-1:] if os.path.exists(path) else []

while os.getpriority(os.PRIO_PROCESS, 0) != 7 or session("self") == ["0"]:  # its parent sets it after its start
    time.sleep(0.01)
with Worker("time:sleep", 600) as worker:
    print(json.dumps([[os.getpriority(os.PRIO_PROCESS, each) for each in (0, worker.pid)],
                      session("self"), session(worker.pid)]))
"""
    # then so have their sessions, which can have a share of their own
    assert told(run, source, nice=7) in ([[7, 7], ["7"], ["7"]], [[7, 7], [], []])
