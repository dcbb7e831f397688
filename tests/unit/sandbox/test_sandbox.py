"""The sandbox's child process: what it may do, and how its failures are handled."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from iaprof.report.gpu.decoder import gpu_sandbox
from iaprof.sandbox import messages, parent as sandbox_module, worker
from iaprof.sandbox.parent import Limits, Sandbox, SandboxDied, SandboxError, SandboxRefused
from limits import Within
from unit import fakeiga
from unit.zebins import debug_elf, read_zebin_code
from waiting import is_running, until

CODE = read_zebin_code("bmg", "matmul")
XE2 = {"instruction_set": ["intel", 0x2000000]}


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with gpu_sandbox() as made:
        yield made


def status(pid: int | None) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_the_child_starts_with_the_first_request_and_is_reused(sandbox: Sandbox) -> None:
    assert sandbox.pid is None
    first = sandbox.call("disasm", XE2, CODE)
    pid = sandbox.pid
    assert pid is not None
    assert sandbox.call("disasm", XE2, CODE) == first
    assert sandbox.pid == pid
    sandbox.close()
    assert sandbox.pid is None
    assert not Path(f"/proc/{pid}").exists()
    assert sandbox.call("disasm", XE2, CODE) == first


def test_close_does_not_wait_long_for_a_child_that_cannot_be_killed(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    # given a child that does not die, as if blocked in a file system in user space
    sandbox.call("disasm", XE2, CODE)
    child = sandbox._child
    assert child is not None
    kill = child.kill
    monkeypatch.setattr(child, "kill", lambda: None)
    os.kill(child.pid, signal.SIGSTOP)
    # when
    begun = time.monotonic()
    closing = threading.Thread(target=sandbox.close, daemon=True)
    closing.start()
    closing.join(120)
    # then
    took = time.monotonic() - begun
    kill()
    closing.join()
    child.wait()
    within.took(took, 9)


def test_the_child_has_given_up_its_rights(sandbox: Sandbox) -> None:
    sandbox.call("disasm", XE2, CODE)
    child = status(sandbox.pid)
    expected = "65534" if os.geteuid() == 0 else str(os.geteuid())
    assert child["Uid"].split() == [expected] * 4
    assert child["NoNewPrivs"] == "1"
    assert {int(child[name], 16) for name in ("CapEff", "CapPrm", "CapInh")} == {0}
    if os.geteuid() == 0:
        assert child["Gid"].split() == ["65534"] * 4
        assert child["Groups"] == ""
    limits = Path(f"/proc/{sandbox.pid}/limits").read_text()
    rows = {line[:25].strip(): line[25:].split()[:2] for line in limits.splitlines()[1:]}
    for name in ("Max core file size", "Max file size", "Max open files", "Max processes"):
        assert rows[name] == ["0", "0"], name
    assert rows["Max address space"] == [str(1 << 30)] * 2


def test_the_child_inherits_no_file(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = os.open(tmp_path / "secret", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(secret, True)
    try:
        sandbox.call("disasm", XE2, CODE)
        folder = Path(f"/proc/{sandbox.pid}/fd")
        if os.geteuid() != 0:
            assert not os.access(folder, os.R_OK), "another process of this user's cannot look into it"
            return
        opened = {int(each.name): os.readlink(each) for each in folder.iterdir()}
        assert {0, 1, 2} <= opened.keys()
        # NVIDIA's decoder runs in a process of its own, if it is there.
        assert all(path.startswith("socket:") for number, path in opened.items() if number > 2)
        assert len(opened) <= 4
    finally:
        os.close(secret)


def test_a_killed_child_is_replaced(sandbox: Sandbox) -> None:
    first = sandbox.call("disasm", XE2, CODE)
    pid = sandbox.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert sandbox.call("disasm", XE2, CODE) == first
    assert sandbox.pid != pid


def test_a_child_that_dies_during_a_request_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox
) -> None:
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(fakeiga.build(tmp_path, fakeiga.ABORT)))
    with pytest.raises(SandboxDied, match="died of SIGABRT"):
        sandbox.call("disasm", XE2, b"E" * 16)
    assert len(sandbox.call("disasm", XE2, bytes(16))["instructions"]["offset"]) == 2


def test_a_child_that_takes_too_long_is_killed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(fakeiga.build(tmp_path, fakeiga.LOOP)))
    with gpu_sandbox(Limits(seconds=2)) as sandbox:
        sandbox.call("disasm", XE2, bytes(16))
        pid = sandbox.pid
        with within(6), pytest.raises(SandboxDied, match="longer than 2 s"):
            sandbox.call("disasm", XE2, b"E" * 16)
        assert not Path(f"/proc/{pid}").exists()
        sandbox.call("disasm", XE2, bytes(16))


def test_a_child_that_takes_too_much_memory_dies_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(fakeiga.build(tmp_path, fakeiga.HOG)))
    with gpu_sandbox(Limits(memory_bytes=400 << 20)) as sandbox:
        with pytest.raises(SandboxDied, match="SIGSEGV"):
            sandbox.call("disasm", XE2, b"E" * 16)
        sandbox.call("disasm", XE2, bytes(16))


def test_an_answer_that_came_while_the_parent_was_stopped_counts(
    attacker: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a parent that is stopped between two parts of an answer, for longer than the limit
    attacker.call("read")
    receive = messages.receive

    def stopped(*arguments: object) -> bytearray:
        received = receive(*arguments)  # type: ignore[arg-type]
        time.sleep(1.5)
        return received

    monkeypatch.setattr(sandbox_module, "receive", stopped)
    # when / then
    assert attacker.call("read", seconds=1.0) == []


def test_refusals_come_with_their_reason(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxRefused, match="not an ELF file") as caught:
        sandbox.call("module", {"instruction_set": None, "only": None, "decode": True}, b"PAR1")
    assert caught.value.kind == "CodeObjectError"
    assert sandbox.pid is not None, "a refusal is not a death"


def test_an_answer_that_is_too_long_is_not_sent() -> None:
    with gpu_sandbox(Limits(answer_bytes=1000)) as sandbox:
        with pytest.raises(SandboxRefused) as caught:
            sandbox.call("disasm", XE2, CODE)
        assert caught.value.kind == "TooLarge"


def test_a_request_that_is_too_long_is_not_sent(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "LONGEST_DATA", 1000)
    with pytest.raises(SandboxError, match="more than 1000 are not read"):
        sandbox.call("disasm", XE2, bytes(1001))


def child_saying(monkeypatch: pytest.MonkeyPatch, *answers: bytes) -> None:
    """Replaces the child's program by one that sends these answers, whatever the requests are."""
    code = f"import os\nos.write(0, {framed(json.dumps({'ok': None}).encode())!r})\n"
    for answer in answers:
        code += f"os.read(0, 1 << 20); os.write(0, {answer!r})\n"
    monkeypatch.setattr(worker, "_program", lambda *_: code + "while os.read(0, 1 << 20): pass")


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "answer",
    [
        framed(b"no JSON"),
        framed(b"\xff\xfe"),
        framed(b"[]"),
        framed(b"{}"),
        framed(b'{"error": 1, "message": 2, "details": 3}'),
        framed(b"[" * 100_000),
        framed(b'{"ok": ' + b"9" * 10_000 + b"}"),
        (1 << 62).to_bytes(8, "little"),
    ],
)
def test_invalid_answers_raise_sandbox_died(monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox, answer: bytes) -> None:
    child_saying(monkeypatch, answer)
    with pytest.raises(SandboxDied, match=r"nonsense|too much"):
        sandbox.call("disasm", XE2, bytes(16))
    assert sandbox.pid is None


def test_a_child_that_ends_in_the_middle_of_its_first_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox
) -> None:
    code = f"import os; os.write(0, {framed(b'x' * 50)[:20]!r})"
    monkeypatch.setattr(worker, "_program", lambda *_: code)
    with pytest.raises(SandboxError, match="could not start: the reader process ended with status 0"):
        sandbox.call("disasm", XE2, bytes(16))


def test_a_child_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(SandboxError, match="cannot be started"):
        sandbox.call("disasm", XE2, bytes(16))
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(SandboxError, match="does not know its own path"):
        sandbox.call("disasm", XE2, bytes(16))


def test_environment_and_working_directory_do_not_affect_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('mine')")
    (tmp_path / "iaprof").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "json.py"))
    sandbox.call("disasm", XE2, CODE)


def test_the_child_ends_with_its_parent() -> None:
    code = (
        "import os; from iaprof.report.gpu.decoder import gpu_sandbox; s = gpu_sandbox();"
        f"s.call('disasm', {XE2}, bytes(64)); print(s.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    until(lambda: not is_running(int(done.stdout)))


def test_parent_and_child_do_not_import_heavy_modules() -> None:
    """Only the child imports what parses hostile bytes or is slow to import."""
    code = "import sys, iaprof.report.gpu.module, iaprof.report.gpu.decoder; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"elftools", "cffi", "pyarrow", "multi_demangle"} & set(done.stdout.split())
    code = "import sys, iaprof.sandbox.child; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "pyarrow", "typer", "subprocess", "iaprof.sandbox.parent"} & set(done.stdout.split())


def test_a_child_that_was_begun_serves_the_first_call() -> None:
    with gpu_sandbox() as sandbox:
        sandbox.begin()
        begun = sandbox.pid
        assert begun is not None
        sandbox.begin()
        assert sandbox.pid == begun
        assert sandbox.call("disasm", XE2, CODE)["strings"]
        assert sandbox.pid == begun
    assert sandbox.pid is None
    until(lambda: not is_running(begun))


def test_why_a_child_that_was_begun_did_not_get_ready_comes_with_the_first_call() -> None:
    with Sandbox("iaprof.no_such_reader") as sandbox:
        sandbox.begin()
        with pytest.raises(SandboxError, match=r"could not start: No module named 'iaprof\.no_such_reader'"):
            sandbox.call("disasm", XE2, CODE)
        assert sandbox.pid is None


def test_a_child_that_was_begun_and_died_is_replaced() -> None:
    with gpu_sandbox() as sandbox:
        sandbox.begin()
        begun = sandbox.pid
        assert begun is not None
        os.kill(begun, signal.SIGKILL)
        until(lambda: not is_running(begun))
        assert sandbox.call("disasm", XE2, CODE)["strings"]
        assert sandbox.pid != begun


def test_a_gpu_module_can_be_sent_to_the_child(sandbox: Sandbox) -> None:
    answer = sandbox.call(
        "module", {"instruction_set": None, "only": None, "decode": True}, debug_elf("bmg", "attention")
    )
    assert [kernel["name"] for kernel in answer["kernels"]] == ["attention_scores"]


# A reader that an attacker controls: it does whatever the system permits.
ATTACKER = """
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
kept = []

def system_call(parameters, data, files):
    names = [each.encode() if isinstance(each, str) else each for each in parameters["arguments"]]
    arguments = [ctypes.c_char_p(each) if isinstance(each, bytes) else ctypes.c_long(each) for each in names]
    ctypes.set_errno(0)
    done = libc.syscall(ctypes.c_long(parameters["number"]), *arguments)
    return ctypes.get_errno() if done < 0 else 0

def other_architecture(parameters, data, files):
    code = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3")  # mov eax, 20 (getpid); int 0x80; ret
    start = ctypes.addressof(ctypes.c_char.from_buffer(code))
    return ctypes.CFUNCTYPE(ctypes.c_int)(start)()

def read(parameters, data, files):
    return [os.pread(file, 100, 0).decode() for file in files]

def write(parameters, data, files):
    os.pwrite(files[0], b"x" * parameters["count"], 0)

def map(parameters, data, files):
    with mmap.mmap(files[0], 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        return len(mapped) + mapped[-1]

def shrink(parameters, data, files):
    with mmap.mmap(files[0], 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        os.ftruncate(files[0], 0)
        return mapped[0]

def hoard(parameters, data, files):
    kept.append(bytes(parameters["count"]))

def operations(stage_seconds):
    return {each.__name__: each for each in (system_call, other_architecture, read, write, map, shrink, hoard)}
"""


@pytest.fixture
def attacker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    (tmp_path / "attacker.py").write_text(ATTACKER)
    monkeypatch.syspath_prepend(tmp_path)
    limits = Limits(memory_bytes=200 << 20, seconds=20.0, files=3, mapped_bytes=8 << 30, written_bytes=1000)
    with Sandbox("attacker", limits) as made:
        yield made


def test_open_files_come_with_a_request_and_are_closed_after_it(attacker: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("two")
    with open(tmp_path / "a", "rb") as a, open(tmp_path / "b", "rb") as b:
        for _ in range(10):
            assert attacker.call("read", fds=[a.fileno(), b.fileno()]) == ["one", "two"]
        assert attacker.call("read") == []
        with pytest.raises(SandboxError, match="3 open files at most, not 4"):
            attacker.call("read", fds=[a.fileno()] * 4)


# Numbers of x86-64; the last three are allowed with other arguments.
FORBIDDEN = {
    "open": (2, "/etc/hostname", 0),
    "openat": (257, -100, "/etc/hostname", 0),
    "openat2": (437, -100, "/etc/hostname", 0, 24),
    "creat": (85, "/tmp/iaprof-attacker", 0o600),
    "socket": (41, 1, 1, 0),
    "socketpair": (53, 1, 1, 0, 0),
    "connect": (42, 0, 0, 0),
    "bind": (49, 0, 0, 0),
    "execve": (59, "/bin/true", 0, 0),
    "execveat": (322, -100, "/bin/true", 0, 0, 0),
    "fork": (57,),
    "vfork": (58,),
    "clone": (56, 17, 0, 0, 0, 0),
    "clone3": (435, 0, 0),
    "ptrace": (101, 16, 1, 0, 0),
    "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
    "process_vm_writev": (311, 1, 0, 0, 0, 0, 0),
    "io_uring_setup": (425, 1, 0),
    "memfd_create": (319, "x", 0),
    "unlink": (87, "/tmp/iaprof-attacker"),
    "kill": (62, 1, 0),
    "bpf": (321, 0, 0, 0),
    "tgkill": (234, 1, 1, 0),
    "prlimit64": (302, 1, 7, 0, 0),
    "mmap, shared": (9, 0, 4096, 3, 0x21, -1, 0),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_system_calls_that_reading_does_not_need_are_refused(attacker: Sandbox, name: str) -> None:
    number, *arguments = FORBIDDEN[name]
    assert attacker.call("system_call", {"number": number, "arguments": arguments}) == errno.EPERM


def test_the_filter_holds_for_a_child_without_files_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attacker.py").write_text(ATTACKER)
    monkeypatch.syspath_prepend(tmp_path)
    with Sandbox("attacker") as sandbox:
        assert sandbox.call("system_call", {"number": 257, "arguments": [-100, "/", 0]}) == errno.EPERM
        assert sandbox.call("system_call", {"number": 39, "arguments": []}) == 0, "getpid"
        assert status(sandbox.pid)["Seccomp"] == "2"


def test_another_architecture_s_system_calls_kill_the_child(attacker: Sandbox) -> None:
    with pytest.raises(SandboxDied, match="SIGSYS"):
        attacker.call("other_architecture")


def test_files_are_written_up_to_the_limit_and_only_if_opened_for_writing(attacker: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "wb") as file:
        attacker.call("write", {"count": 1000}, fds=[file.fileno()])
        assert path.read_bytes() == b"x" * 1000
        attacker.call("write", {"count": 2000}, fds=[file.fileno()])
        assert path.stat().st_size == 1000
    with open(path, "rb") as file, pytest.raises(SandboxRefused, match="Bad file descriptor"):
        attacker.call("write", {"count": 1}, fds=[file.fileno()])


def test_a_file_may_be_larger_than_the_memory(attacker: Sandbox, tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb+") as file:
        file.truncate(2 << 30)
        assert attacker.call("map", fds=[file.fileno()]) == 2 << 30
    attacker.call("hoard", {"count": 50 << 20})
    with pytest.raises(SandboxRefused) as caught:
        attacker.call("hoard", {"count": 200 << 20})
    assert caught.value.kind == "MemoryError"


def test_a_file_that_shrinks_while_it_is_mapped_kills_the_child_only(attacker: Sandbox, tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb+") as file:
        file.truncate(1 << 20)
        with pytest.raises(SandboxDied, match="SIGBUS"):
            attacker.call("shrink", fds=[file.fileno()])
        file.truncate(1 << 20)
        assert attacker.call("map", fds=[file.fileno()]) == 1 << 20


def test_a_request_may_have_its_own_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(fakeiga.build(tmp_path, fakeiga.LOOP)))
    with gpu_sandbox() as sandbox:
        sandbox.call("disasm", XE2, bytes(16))
        with pytest.raises(SandboxDied, match=r"longer than 0\.5 s"):
            sandbox.call("disasm", XE2, b"E" * 16, seconds=0.5)
