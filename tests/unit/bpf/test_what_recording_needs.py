"""What a machine lacks for recording is reported in one sentence: root, bcc, kernel headers."""

import ctypes
import errno
import os
import struct
import sys
from pathlib import Path

import pytest

from iaprof.bpf import loader, uprobe
from iaprof.bpf.bytecode import BpfUnavailable
from iaprof.bpf.compile import headers
from iaprof.bpf.compile.compiler import import_bcc
from iaprof.cli.main import main


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    """The command's exit code and what it wrote to stderr."""
    monkeypatch.setattr(sys, "argv", ["iaprof", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


def test_not_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, message = run(monkeypatch, capsys, "record", "-o", str(tmp_path / "c"))
    assert (code, message) == (1, "iaprof: recording needs root: run it with sudo\n")


def test_no_bcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "bcc", raising=False)
    with pytest.raises(BpfUnavailable, match="apt install python3-bpfcc"):
        import_bcc((str(tmp_path),))


def test_a_bcc_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "bcc", raising=False)
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc" / "libbcc.py").touch()
    (tmp_path / "bcc" / "__init__.py").write_text("raise OSError('libbcc.so.0: cannot open shared object file')")
    with pytest.raises(BpfUnavailable, match=r"does not load .*; reinstall python3-bpfcc"):
        import_bcc((str(tmp_path),))
    assert "bcc" not in sys.modules


def without_own_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "_own_headers", list)
    monkeypatch.setattr(headers, "_has_archive", lambda: False)


def test_no_kernel_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    without_own_headers(monkeypatch)
    monkeypatch.setattr(headers, "_split_headers", lambda: None)
    with pytest.raises(BpfUnavailable, match=r"no kernel headers .* apt install linux-headers"):
        headers.find_headers({})


def test_split_headers_are_joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # given two folders as Debian splits them
    for path in (
        "flavour/include/generated/a.h",
        "flavour/arch/x86/b.h",
        "common/include/linux/c.h",
        "common/arch/x86/d.h",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    without_own_headers(monkeypatch)
    monkeypatch.setattr(headers, "_split_headers", lambda: (tmp_path / "flavour", tmp_path / "common"))
    monkeypatch.setattr(headers, "_belongs_to_root", lambda folder: True)
    monkeypatch.setenv("BCC_KERNEL_SOURCE", "/somewhere/else")
    private = tmp_path / "private"
    private.mkdir()
    # when
    headers.find_headers({}).prepare(private)
    # then all four are found
    joined = Path(os.environ["BCC_KERNEL_SOURCE"])
    assert joined.is_relative_to(private)
    for path in ("include/generated/a.h", "include/linux/c.h", "arch/x86/b.h", "arch/x86/d.h"):
        assert (joined / path).is_file()


@pytest.mark.parametrize(
    ("of_a_folder", "told"), [(errno.EINVAL, "came with Linux 5.15"), (errno.EBADF, "another tool")]
)
def test_a_kernel_without_uprobe_links_is_told_from_another_tool_s_probe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, of_a_folder: int, told: str
) -> None:
    # given a kernel that refuses to attach, its error if the library is a folder, and that it makes perf events
    def refuses(command: int, attributes: bytes) -> int:
        if struct.unpack_from("<I", attributes, 8)[0] == 41:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        path = ctypes.string_at(struct.unpack_from("<Q", attributes, 16)[0]).decode()
        refusal = of_a_folder if Path(path).is_dir() else errno.EINVAL
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(uprobe, "bpf", refuses)
    events = [os.open(tmp_path, os.O_RDONLY)]
    monkeypatch.setattr(uprobe, "open_event", lambda *_: events[0])
    library = tmp_path / "library.so"
    library.write_bytes(bytes(64))
    # then
    with library.open("rb") as file, pytest.raises(OSError, match=told):
        uprobe.attach(file.fileno(), 0, [uprobe.Location(8, 0, 0)])
    # and the event is closed again
    if of_a_folder == errno.EINVAL:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.close(events[0])
    else:
        os.close(events[0])


@pytest.mark.parametrize(("release", "is_told"), [("5.10.0-32-amd64", True), ("5.15.0-91-generic", False)])
def test_a_kernel_that_permits_no_bpf_may_be_too_old(
    monkeypatch: pytest.MonkeyPatch, release: str, is_told: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "", release, "", "x86_64")))
    text = loader._explain(OSError(errno.EPERM, os.strerror(errno.EPERM)))
    assert text.startswith("the kernel does not permit BPF here")
    assert ("too old: this kernel has no cookies for uprobes, which came with Linux 5.15" in text) is is_told
