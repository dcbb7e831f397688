"""The BPF programs that ship are loaded; where the kernel refuses them, a process apart compiles them anew.

What that process hands over, what it says where it cannot, how waiting for it ends, and what it does not believe.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iaprof.bpf import cache, loader, sizes, uprobe
from iaprof.bpf.bytecode import BpfUnavailable
from iaprof.bpf.compile import compilation
from iaprof.bpf.compile.compilation import Compilation
from iaprof.bpf.compile.compiler import BCC_FOLDERS, Source
from iaprof.bpf.loader import Origin
from iaprof.bpf.maps import read_element
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.programs import PHASES, WAIT_PROGRAMS, WHEN_NEEDED, shipped, source
from iaprof.bpf.sizes import map_entries
from iaprof.bpf.uprobe import ProgramFor, load_program
from iaprof.record.checks import bpf as bpf_checks
from iaprof.record.checks.result import Level
from iaprof.record.signals import Interrupted, StopSignals
from integration.refused import refused, where_it_is_refused
from limits import Within
from thorough import thorough

pytestmark = [pytest.mark.bpf, pytest.mark.beside]

WAIT = "from iaprof.bpf.probes.launches import LaunchProbes; p = LaunchProbes(); p.ready()"
SAY = f"""
from iaprof.bpf.bytecode import BpfUnavailable
try:
    {WAIT}
    print(p.origin)
except BpfUnavailable as error:
    print(error)
"""
RING_BUFFER = 27  # enum bpf_map_type


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders for compiling are made; nothing else is there, and nothing was compiled before."""
    path = tmp_path / "private"
    path.mkdir(mode=0o700)
    monkeypatch.setattr(compilation, "PARENTS", (path,))
    monkeypatch.setattr(cache, "FOLDER", tmp_path / "cache" / "bpf")
    return path


@pytest.fixture
def probes(private: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchProbes]:
    """Those that have to be compiled."""
    monkeypatch.setattr(loader, "shipped", refused)
    opened = LaunchProbes()
    yield opened
    opened.close()


@contextlib.contextmanager
def refusing(
    monkeypatch: pytest.MonkeyPatch, refusal: Callable[[str, bytes], OSError | None]
) -> Iterator[LaunchProbes]:
    """Loaded where the kernel refuses some programs: `refusal` gets name and code."""

    def load_or_refuse(name: str, code: bytes, kind: ProgramFor) -> int:
        if error := refusal(name, code):
            raise error
        return load_program(name, code, kind)

    monkeypatch.setattr(loader, "load_program", load_or_refuse)
    with contextlib.closing(LaunchProbes()) as probes:
        probes.ready()
        yield probes


def test_a_kernel_that_refuses_calls_of_its_functions_gets_bounded_loops(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without BPF's JIT."""
    calls = b"\x85\x20\0\0"  # the instruction; its operand is the function

    def without_jit(_: str, code: bytes) -> OSError | None:
        has_calls = any(code[at : at + 4] == calls for at in range(0, len(code), 8))
        return OSError(errno.EINVAL, "calling kernel functions needs the JIT") if has_calls else None

    with refusing(monkeypatch, without_jit) as probes:
        assert (probes.origin, probes.follows_frame_pointers) == (Origin.SHIPPED, False)


def child_of(probes: LaunchProbes) -> int:
    compiling = probes._loader._compilation
    assert compiling is not None and compiling._child is not None
    return compiling._child.pid


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def said(*command: str) -> str:
    """What a process says that tries to load, run by `command`."""
    done = subprocess.run([*command, sys.executable, "-c", SAY], capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    return done.stdout.strip()


def is_complete(probes: LaunchProbes) -> None:
    probes.need(WHEN_NEEDED)
    fds = probes._loaded.fds  # type: ignore[union-attr]
    links = {name: os.readlink(f"/proc/self/fd/{fd}") for name, fd in fds.items()}
    programs = {name for name in links if name.startswith("on_")}
    assert programs == set(source().functions) - set(WAIT_PROGRAMS)
    assert {links[name] for name in programs} == {"anon_inode:bpf-prog"}
    assert {links[name] for name in links.keys() - programs} == {"anon_inode:bpf-map"}
    assert not any(os.get_inheritable(fd) for fd in fds.values())
    held = list(fds.values())
    probes.close()
    for fd in held:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


# ---- what ships ----


def test_what_ships_is_loaded_by_this_process_alone() -> None:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    before = children.read_text()
    probes = LaunchProbes()
    assert children.read_text() == before
    probes.ready()
    assert (probes.origin, probes.compile_cpu_seconds) == (Origin.SHIPPED, 0)
    is_complete(probes)


def test_programs_that_few_drivers_need_are_loaded_for_these() -> None:
    with contextlib.closing(LaunchProbes()) as probes:
        fds = probes.maps

        def loaded() -> set[str]:
            phases = PHASES["phases"].items()
            called = {name for phase, name in phases if read_element(fds["phases"], struct.pack("<I", phase), 4)}
            assert called == set(PHASES["phases"].values()) & fds.keys()
            return fds.keys() & WHEN_NEEDED.keys()

        assert loaded() == set()
        probes.need(["on_transfer", "on_execute"])
        assert {"on_handle_launched", "on_execute", "on_executed"} < loaded() == set(WHEN_NEEDED["on_execute"])
        before = dict(fds)
        probes.need(["on_execute", "on_draw"])
        assert loaded() == WHEN_NEEDED.keys()
        assert before.items() < dict(fds).items()


def test_a_kernel_that_refuses_what_few_drivers_need_records_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_made(name: str, _: bytes) -> OSError | None:
        return OSError(errno.EACCES, "Permission denied; the verifier: R1 is wrong") if name == "on_made" else None

    with refusing(monkeypatch, on_made) as probes:
        assert probes.origin is Origin.SHIPPED
        probes.need(["on_handle_launch"])
        for _ in range(2):
            with pytest.raises(OSError, match=r"^on_made: Permission denied; the verifier: R1 is wrong$"):
                probes.need(["on_draw", "on_made"])
        # and the check says so
        check, needs_bcc = bpf_checks._programs()
        assert (check.level, needs_bcc) == (Level.PROBLEM, False)
        assert check.text.startswith("the kernel refuses one that Intel's drivers need")
        # and what had no memory once is complete the next time
        monkeypatch.undo()
        probes.need(["on_draw"])
        for phase, name in PHASES["phases"].items():
            assert read_element(probes.maps["phases"], struct.pack("<I", phase), 4), name


def test_the_kernels_offsets_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(_: Path) -> None:
        raise AssertionError("BTF was read")

    monkeypatch.setattr(cache, "FOLDER", tmp_path / "iaprof" / "bpf")
    found = sizes.kernel_offsets()
    assert found is not None
    assert found.task_mm > 0
    (kept,) = (tmp_path / "iaprof" / "bpf").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(sizes, "Btf", unread)
        assert sizes.kernel_offsets() == found
    # and where the kernel has no BTF, nothing that was kept counts
    with monkeypatch.context() as patched:
        patched.setattr(sizes, "VMLINUX", Path("/dev/null"))
        assert sizes.kernel_offsets() is None
    # and again after a change of what is kept
    for text in ("", "[]", '{"task_mm": 1, "other": 2}'):
        cache.write(kept.name, text)
        assert sizes.kernel_offsets() == found


def test_the_recorder_stays_small() -> None:
    # given the same program, without BPF and with
    tell = "; print(*[line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    words = [sys.executable, "-c"]
    before = subprocess.run([*words, WAIT.partition(";")[0] + tell], capture_output=True, check=True)
    after = subprocess.run([*words, WAIT + tell], capture_output=True, check=True)
    # then what it takes is the ring buffers, which are mapped twice in a row
    rings = sum(map_entries()[name] for name, each in shipped().maps.items() if each.type == RING_BUFFER)
    assert rings > 0
    assert (int(after.stdout) - int(before.stdout)) << 10 < 2 * rings + (3 << 20)
    # and bcc was not imported
    no_bcc = subprocess.run(
        [*words, WAIT + "; import sys; print('bcc' in sys.modules)"], capture_output=True, check=True
    )
    assert no_bcc.stdout == b"False\n"


def test_neither_bcc_nor_headers_are_needed() -> None:
    hidden = ["/usr/src", "/lib/modules", *(f"{folder}/bcc" for folder in BCC_FOLDERS)]
    mounts = [f"mount -t tmpfs none {path} && " for path in hidden if Path(path).is_dir()]
    assert said("unshare", "-m", "sh", "-c", "".join(mounts) + 'exec "$@"', "sh") == Origin.SHIPPED


def test_no_permission() -> None:
    refusal = said("setpriv", "--bounding-set=-sys_admin,-bpf,-perfmon")
    assert refusal.startswith("the kernel does not permit BPF here")


def test_not_root() -> None:
    # given another user, who may read the folder that we are in all the same
    user = ("--reuid=65534", "--regid=65534", "--clear-groups")
    refusal = said("setpriv", *user, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    assert refusal == "BPF needs root: run it with sudo"


def test_a_program_that_the_verifier_refuses() -> None:
    exit_without_result = bytes([0x95, 0, 0, 0, 0, 0, 0, 0])
    with pytest.raises(PermissionError, match=r"the verifier: .*R0 !read_ok"):
        load_program("no_result", exit_without_result)


def test_the_end_of_a_long_log_is_told_where_the_kernel_keeps_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a kernel before 6.4: a log that has no room is cut at its end, and the call says so
    log = b"0: (b7) r0 = 0\n" * 200_000 + b"7: (79) r2 = *(u64 *)(r6 +104)\nR6 invalid mem access\nprocessed 7 insns\n"

    def before_6_4(_: int, attributes: bytes) -> int:
        size, address = struct.unpack_from("<IQ", attributes, 28)
        if address:
            kept = log[: size - 1]
            ctypes.memmove(address, kept + b"\0", len(kept) + 1)
        raise OSError(errno.ENOSPC if 0 < size <= len(log) else errno.EACCES, "refused")

    monkeypatch.setattr(uprobe, "bpf", before_6_4)
    # when
    with pytest.raises(OSError, match=r"the verifier: 7: .* / R6 invalid mem access$") as refusal:
        load_program("wrong", bytes(16))
    # then
    assert refusal.value.errno == errno.EACCES


# ---- what is compiled ----


@thorough
def test_what_the_kernel_refuses_is_compiled_once(
    probes: LaunchProbes, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = child_of(probes)
    # when
    probes.ready()
    # then
    assert probes.origin is Origin.COMPILED
    assert 0.05 < probes.compile_cpu_seconds < 30
    # and it left nothing behind
    assert not runs(child)
    assert list(private.iterdir()) == []
    is_complete(probes)
    # and the next one compiles nothing
    monkeypatch.setattr(loader, "Compilation", None)
    again = LaunchProbes()
    again.ready()
    assert (again.origin, again.compile_cpu_seconds) == (Origin.CACHED, 0)
    is_complete(again)
    # unless it is with another bcc
    monkeypatch.setattr(loader, "bcc_version", lambda: "9.9")
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        LaunchProbes()


@thorough
def test_neither_environment_nor_folder_confuse_it(
    tmp_path: Path, probes: LaunchProbes, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes.close()
    # given modules of the same names as those that it imports
    for name in ("json", "socket", "tempfile", "ctypes", "bcc", "iaprof", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    for variable in ("PYTHONPATH", "PYTHONHOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "json.py"))
    # when, then
    probes = LaunchProbes()
    probes.ready()
    assert probes.origin is Origin.COMPILED
    probes.close()


@pytest.mark.parametrize(
    ("hidden", "what"),
    [
        ([f"{folder}/bcc" for folder in BCC_FOLDERS], "bcc is not installed: install the distribution's package"),
        pytest.param(
            ["/usr/src", "/lib/modules", "/sys/kernel"],
            "no kernel headers were found for compiling BPF: install the headers of the running kernel",
            marks=thorough,
        ),
    ],
)
def test_what_is_not_installed(hidden: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    mounts = " && ".join(f"mount -t tmpfs none {path}" for path in hidden if Path(path).is_dir())
    refusal = said(*where_it_is_refused(tmp_path, before=mounts))
    assert refusal.startswith("the BPF programs that ship with iaprof do not load here (on_launch: Permission denied")
    assert what in refusal


def test_a_program_that_the_compiler_refuses(private: Path) -> None:
    compiling = Compilation(Source("int f(void *ctx) { return nonsense; }", {}, (), ("f",)))
    with pytest.raises(BpfUnavailable, match=r"^the BPF programs did not compile \(.*error: .*nonsense"):
        compiling.wait()
    assert list(private.iterdir()) == []


def test_a_child_that_is_killed(probes: LaunchProbes, private: Path) -> None:
    os.kill(child_of(probes), signal.SIGKILL)
    with pytest.raises(BpfUnavailable, match=r"the process that compiles BPF died \(SIGKILL\): make sure"):
        probes.ready()
    assert list(private.iterdir()) == []


def test_a_child_that_hangs(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(loader, "shipped", refused)
    probes = LaunchProbes()
    child = child_of(probes)
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(BpfUnavailable, match=r"took longer than 0.3 s: record again"):
        probes.ready()
    assert not runs(child)
    assert list(private.iterdir()) == []


def test_no_room_for_a_child(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(loader, "shipped", refused)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(BpfUnavailable, match="cannot be started: Resource temporarily unavailable"):
        LaunchProbes()
    assert list(private.iterdir()) == []


def test_a_signal_ends_the_wait_at_once(probes: LaunchProbes, private: Path, within: Within) -> None:
    # given a child that takes its time
    child = child_of(probes)
    os.kill(child, signal.SIGSTOP)
    with StopSignals() as signals:
        # when others come first that are not reason to end
        begun = time.monotonic()
        for delay, number in ((0.1, signal.SIGCHLD), (0.2, signal.SIGUSR2), (0.4, signal.SIGTERM)):
            threading.Timer(delay, os.kill, (os.getpid(), number)).start()
        with pytest.raises(Interrupted):
            probes.ready(signals)
    # then
    took = time.monotonic() - begun
    assert took > 0.35
    within.took(took, 2)
    assert not runs(child)
    assert list(private.iterdir()) == []


def test_closed_before_it_is_ready(probes: LaunchProbes, private: Path, within: Within) -> None:
    child = child_of(probes)
    with within(0.5):
        probes.close()
    assert not runs(child)
    assert list(private.iterdir()) == []


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("", "maps=ok bcc=ok headers=ok programs=ok"),
        (
            "mount -t tmpfs none /usr/src && mount -t tmpfs none /lib/modules",
            "maps=ok bcc=ok headers=problem programs=problem",
        ),
    ],
)
@thorough
def test_check_looks_at_bcc_and_headers_where_they_are_needed(before: str, expected: str, tmp_path: Path) -> None:
    say = "from iaprof.record.checks import bpf; print(*(f'{each.name}={each.level.value}' for each in bpf.checks()))"
    hidden = before and f"{before} && mount -t tmpfs none /sys/kernel"
    command = where_it_is_refused(tmp_path, sys.executable, "-c", say, before=hidden)
    environment = {name: value for name, value in os.environ.items() if name != "BCC_KERNEL_SOURCE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout == expected + "\n", done.stderr
