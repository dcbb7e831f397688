"""What is compiled into the kernel is ours and root's: planted headers, environments and caches have no part in it."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from iaprof.basics.files import only_root_can_change
from iaprof.basics.libraries import ONE_THREAD
from iaprof.bpf import cache as kept
from iaprof.bpf.bytecode import BpfUnavailable
from iaprof.bpf.compile import compilation, headers
from iaprof.bpf.compile.compilation import Compilation
from iaprof.bpf.programs import source
from thorough import thorough

pytestmark = [pytest.mark.bpf, pytest.mark.beside]

ROOT = Path(__file__).parents[2]
NOBODY = 65534
TEXT = "a line\n" * 1000
COMPILE = """
from iaprof.bpf.compile.compilation import Compilation
from iaprof.bpf.programs import source
sends_signals = bytes.fromhex("850000006d000000")  # calls bpf_send_signal
print(any(sends_signals in program.code for program in Compilation(source()).wait().programs.values()))
"""
PAYLOAD = """
#define bpf_ktime_get_ns() (((long (*)(unsigned))109)(9), bpf_ktime_get_ns())
"""


@pytest.fixture(scope="module")
def kernel_headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with those that this machine compiles with."""
    folder, found = tmp_path_factory.mktemp("headers"), headers.find_headers({})
    whole = folder / "whole"
    whole.mkdir()
    if found.folders:
        for source_folder in found.folders:
            parts = [name for name in ("include", "arch/x86/include") if (source_folder / name).is_dir()]
            subprocess.run(["cp", "-rL", "--parents", *parts, str(whole)], cwd=source_folder, check=True)
    elif own := headers._own_headers():
        subprocess.run(["cp", "-rL", "--parents", "include", "arch/x86/include", str(whole)], cwd=own[0], check=True)
    else:
        subprocess.run(["tar", "-xf", "/sys/kernel/kheaders.tar.xz", "-C", str(whole)], check=True)
    return whole


@pytest.fixture
def planted(kernel_headers: Path, tmp_path: Path) -> Path:
    """A user's own, with code in them."""
    folder = tmp_path / "planted"
    shutil.copytree(kernel_headers, folder)
    with (folder / "include/uapi/linux/ptrace.h").open("a") as file:
        file.write(PAYLOAD)
    subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(folder)], check=True)
    return folder


def where(steps: list[str], script: str) -> subprocess.CompletedProcess[str]:
    """Runs Python after what a shell does in a mount namespace of its own."""
    command = " && ".join([*steps, 'exec "$@"'])
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", command, "sh", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={name: value for name, value in os.environ.items() if name != headers.VARIABLE},
    )


@thorough
def test_headers_planted_in_tmp(kernel_headers: Path, planted: Path, tmp_path: Path) -> None:
    # given a kernel that brings its headers in an archive, and what bcc would take for them unpacked
    archive = tmp_path / "kheaders.tar"
    subprocess.run(["tar", "-cf", str(archive), "-C", str(kernel_headers), "."], check=True)
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    planted.rename(shared / f"kheaders-{platform.release()}")
    kernel, modules = "mount -t tmpfs none /sys/kernel", "mount -t tmpfs none /lib/modules"
    steps = [kernel, modules, f"cp {archive} /sys/kernel/kheaders.tar.xz"]
    if ROOT.is_relative_to("/tmp"):  # what is imported must not be hidden
        own = shared / ROOT.relative_to("/tmp")
        own.mkdir(parents=True)
        steps.append(f"mount --bind {shlex.quote(str(ROOT))} {shlex.quote(str(own))}")
    steps.append(f"mount --rbind {shared} /tmp")
    # when, then
    done = where(steps, COMPILE)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@thorough
def test_the_planted_headers_would_work(planted: Path) -> None:
    # given that nobody looked whose they are
    allow = "from iaprof.bpf.compile import headers; headers._belongs_to_root = lambda folder: True\n"
    run = f"import os; os.environ['BCC_KERNEL_SOURCE'] = {str(planted)!r}\n" + allow
    run += "from iaprof.bpf.compile.compiler import compile_source\nfrom iaprof.bpf.programs import source\n"
    run += "compiled = compile_source(source())\n"
    run += "print(any(bytes.fromhex('850000006d000000') in each.code for each in compiled.programs.values()))"
    done = where([":"], run)
    # then it would be in the programs
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_headers_of_a_user_are_not_compiled(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(headers.VARIABLE, str(planted))
    with pytest.raises(BpfUnavailable, match=r"BCC_KERNEL_SOURCE names .* users other than root can change"):
        Compilation(source()).wait()


def test_one_file_that_a_user_can_change_is_enough(kernel_headers: Path, tmp_path: Path) -> None:
    folder = tmp_path / "headers"
    shutil.copytree(kernel_headers, folder)
    environment = {headers.VARIABLE: str(folder)}
    assert str(folder) in headers.find_headers(environment).about
    (folder / "include/uapi/linux/ptrace.h").chmod(0o666)
    with pytest.raises(BpfUnavailable, match="users other than root can change"):
        headers.find_headers(environment)


def test_no_environment_reaches_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = "CPATH C_INCLUDE_PATH TMPDIR HOME LD_LIBRARY_PATH PYTHONPATH BCC_SYMFS CCC_OVERRIDE_OPTIONS"
    for name in names.split():
        monkeypatch.setenv(name, "/dev/shm/planted")
    monkeypatch.delenv(headers.VARIABLE, raising=False)
    # given that a shell is started in place of Python, which answers with its environment; $3 is the private folder
    shell = tmp_path / "shell"
    shell.write_text("""printf '{"error": "%s"}' "$(tr '\\0' ' ' </proc/$$/environ)" >"$3/answer"\n""")
    compiling = Compilation(source(), interpreter=("/bin/sh", str(shell)))
    folder = compiling._folder
    assert folder is not None
    status = folder.stat()
    assert (status.st_uid, status.st_mode & 0o777) == (0, 0o700)
    assert only_root_can_change(folder)
    # when
    with pytest.raises(BpfUnavailable) as told:
        compiling.wait()
    # then
    ours = {f"{name}={value}" for name, value in ONE_THREAD.items()}
    private = {"PATH=/usr/sbin:/usr/bin:/sbin:/bin", f"HOME={folder}", f"TMPDIR={folder}"}
    assert set(str(told.value).split()) == private | ours


def test_no_private_folder_where_others_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(compilation, "PARENTS", (tmp_path,))
    with pytest.raises(BpfUnavailable, match="cannot be started"):
        Compilation(source())
    assert list(tmp_path.iterdir()) == []


# ---- the cache ----


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that was written before."""
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "iaprof" / "bpf")
    kept.write("name", TEXT)
    return tmp_path / "iaprof" / "bpf" / "name"


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def replace_by_a_link(file: Path) -> None:
    file.rename(file.with_name("other"))
    file.symlink_to("other")


def replace_by_a_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def test_what_was_compiled_is_read_again(cache: Path) -> None:
    assert kept.read("name") == TEXT
    assert cache.stat().st_mode & 0o777 == 0o600
    assert cache.parent.stat().st_mode & 0o777 == 0o700
    assert kept.read("another") is None


@pytest.mark.parametrize(
    "spoil",
    [
        flip_a_bit,
        replace_by_a_link,
        replace_by_a_fifo,
        lambda file: os.truncate(file, 1000),
        lambda file: os.truncate(file, 0),
        lambda file: os.chown(file, NOBODY, NOBODY),
        lambda file: file.chmod(0o622),
        lambda file: os.chown(file.parent, NOBODY, NOBODY),
        lambda file: file.parent.chmod(0o777),
        lambda file: os.chown(file.parents[1], NOBODY, NOBODY),
        lambda file: file.parents[1].chmod(0o777),
    ],
)
def test_what_is_damaged_or_may_be_a_strangers_is_not_read(cache: Path, spoil: Callable[[Path], None]) -> None:
    spoil(cache)
    assert kept.read("name") is None


def test_the_cache_stays_small(cache: Path) -> None:
    for number in range(40):
        kept.write(f"{number}", TEXT)
    assert len(list(cache.parent.iterdir())) <= 16
    assert kept.read("39") is not None


def test_another_kernel_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {kept.name_of("a", "b"), kept.name_of("a", "c")}
    monkeypatch.setattr(platform, "release", lambda: "6.99")
    names.add(kept.name_of("a", "b"))
    monkeypatch.setattr(platform, "version", lambda: "#99")
    names.add(kept.name_of("a", "b"))
    assert len(names) == 4


# ---- whose a path is ----


def test_a_path_is_roots_only_if_all_that_leads_there_is(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").touch(0o644)
    (tmp_path / "link").symlink_to("a/../a/b/file")
    assert only_root_can_change(inner / "file")
    assert only_root_can_change(tmp_path / "link")
    # a folder like /tmp on the way is no harm, but nothing in it is to be believed by itself
    (tmp_path / "a").chmod(0o1777)
    assert only_root_can_change(inner / "file")
    assert not only_root_can_change(tmp_path / "a")
    (tmp_path / "a").chmod(0o777)
    assert not only_root_can_change(inner / "file")
    assert not only_root_can_change(tmp_path / "link")
    (tmp_path / "a").chmod(0o755)
    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
    assert not only_root_can_change(tmp_path / "link")
    assert not only_root_can_change(tmp_path / "nothing")
    (tmp_path / "circle").symlink_to("circle")
    assert not only_root_can_change(tmp_path / "circle")
