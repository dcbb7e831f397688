"""The child process for hostile bytes: what it may do, and what becomes of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from iaprof.report.gpu_sandbox import gpu_sandbox
from iaprof.sandbox import parent as sandbox_module
from iaprof.sandbox.parent import Limits, SandboxDied, SandboxError, SandboxRefused
from unit import fakeiga
from unit.zebins import debug_elf, read_zebin_code

CODE = read_zebin_code("bmg", "matmul")
XE2 = {"platform": 0x2000000}


@pytest.fixture
def sandbox():
    with gpu_sandbox() as made:
        yield made


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_it_starts_with_the_first_request_and_is_used_again(sandbox):
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


def test_the_child_has_given_up_its_rights(sandbox):
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


def test_the_child_inherits_no_file(sandbox, tmp_path):
    secret = os.open(tmp_path / "secret", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(secret, True)
    try:
        sandbox.call("disasm", XE2, CODE)
        folder = Path(f"/proc/{sandbox.pid}/fd")
        if os.geteuid() != 0:
            assert not os.access(folder, os.R_OK), "another process of this user's cannot look into it"
            return
        assert sorted(int(each.name) for each in folder.iterdir()) == [0, 1, 2]
    finally:
        os.close(secret)


def test_a_killed_child_is_replaced(sandbox):
    sandbox.call("disasm", XE2, CODE)
    os.kill(sandbox.pid, signal.SIGKILL)
    time.sleep(0.05)
    sandbox.call("disasm", XE2, CODE)


def test_a_child_that_dies_on_its_work(tmp_path, monkeypatch, sandbox):
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(fakeiga.build(tmp_path, fakeiga.ABORT)))
    with pytest.raises(SandboxDied, match="died of SIGABRT"):
        sandbox.call("disasm", XE2, b"E" * 16)
    assert len(sandbox.call("disasm", XE2, bytes(16))["instructions"]["offset"]) == 2


def test_a_child_that_takes_too_long(tmp_path, monkeypatch):
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(fakeiga.build(tmp_path, fakeiga.LOOP)))
    with gpu_sandbox(Limits(seconds=1.5)) as sandbox:
        sandbox.call("disasm", XE2, bytes(16))
        pid = sandbox.pid
        start = time.monotonic()
        with pytest.raises(SandboxDied, match=r"longer than 1\.5 s"):
            sandbox.call("disasm", XE2, b"E" * 16)
        assert time.monotonic() - start < 5
        assert not Path(f"/proc/{pid}").exists()
        sandbox.call("disasm", XE2, bytes(16))


def test_a_child_that_takes_too_much_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("IAPROF_IGA_LIBRARY", str(fakeiga.build(tmp_path, fakeiga.HOG)))
    with gpu_sandbox(Limits(memory_bytes=400 << 20)) as sandbox:
        with pytest.raises(SandboxDied, match="SIGSEGV"):
            sandbox.call("disasm", XE2, b"E" * 16)
        sandbox.call("disasm", XE2, bytes(16))


def test_refusals_come_with_their_reason(sandbox):
    with pytest.raises(SandboxRefused, match="not an ELF file") as caught:
        sandbox.call("module", {"platform": None, "only": None, "decode": True}, b"PAR1")
    assert caught.value.kind == "ZebinError"
    assert sandbox.pid is not None, "a refusal is no death"


def test_an_answer_that_is_too_long_is_not_sent():
    with gpu_sandbox(Limits(answer_bytes=1000)) as sandbox:
        with pytest.raises(SandboxRefused) as caught:
            sandbox.call("disasm", XE2, CODE)
        assert caught.value.kind == "TooLarge"


def test_a_request_that_is_too_long_is_not_sent(sandbox, monkeypatch):
    monkeypatch.setattr(sandbox_module, "LONGEST_DATA", 1000)
    with pytest.raises(SandboxError, match="more than 1000 are not read"):
        sandbox.call("disasm", XE2, bytes(1001))


def child_saying(monkeypatch, *answers: bytes):
    """A child in an attacker's hands: each answer is sent as it is, whatever was asked."""
    code = f"import os\nos.write(0, {framed(json.dumps({'ok': None}).encode())!r})\n"
    for answer in answers:
        code += f"os.read(0, 1 << 20); os.write(0, {answer!r})\n"
    monkeypatch.setattr(sandbox_module, "_START", code + "while os.read(0, 1 << 20): pass")


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
def test_nonsense_is_taken_for_a_death(monkeypatch, sandbox, answer):
    child_saying(monkeypatch, answer)
    with pytest.raises(SandboxDied, match=r"nonsense|too much"):
        sandbox.call("disasm", XE2, bytes(16))
    assert sandbox.pid is None


def test_a_child_that_ends_in_the_middle_of_its_answer(monkeypatch, sandbox):
    monkeypatch.setattr(sandbox_module, "_START", f"import os; os.write(0, {framed(b'x' * 50)[:20]!r})")
    with pytest.raises(SandboxError, match="could not start: the reader process ended with status 0"):
        sandbox.call("disasm", XE2, bytes(16))


def test_a_child_that_cannot_start(monkeypatch, sandbox):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(SandboxError, match="cannot be started"):
        sandbox.call("disasm", XE2, bytes(16))
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(SandboxError, match="does not know its own path"):
        sandbox.call("disasm", XE2, bytes(16))


def test_neither_environment_nor_folder_get_into_the_child(tmp_path, monkeypatch, sandbox):
    (tmp_path / "json.py").write_text("raise SystemExit('mine')")
    (tmp_path / "iaprof").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "json.py"))
    sandbox.call("disasm", XE2, CODE)


def test_the_child_ends_with_its_parent():
    code = (
        "import os; from iaprof.report.gpu_sandbox import gpu_sandbox; s = gpu_sandbox();"
        f"s.call('disasm', {XE2}, bytes(64)); print(s.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 5
    while Path(f"/proc/{int(done.stdout)}").exists() and status(int(done.stdout))["State"][0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_parent_stays_light():
    """What reads hostile bytes, and what is slow to import, is the child's alone."""
    code = "import sys, iaprof.report.gpu_module, iaprof.report.decoder; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"elftools", "cffi", "numpy", "pyarrow", "multi_demangle"} & set(done.stdout.split())
    code = "import sys, iaprof.sandbox.child; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "pyarrow", "typer"} & set(done.stdout.split())


def test_a_module_through_the_channel(sandbox):
    answer = sandbox.call("module", {"platform": None, "only": None, "decode": True}, debug_elf("bmg", "attention"))
    assert [kernel["name"] for kernel in answer["kernels"]] == ["attention_scores"]
