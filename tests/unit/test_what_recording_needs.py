"""What a machine lacks for recording is told in one sentence: root, bcc, kernel headers, a program that compiles."""

import os
import sys
from pathlib import Path

import pytest

from iaprof.bpf import compiler
from iaprof.bpf.compiler import BpfUnavailable, compile_program, import_bcc, kernel_headers
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
    monkeypatch.setattr(compiler, "BCC_FOLDERS", (str(tmp_path),))
    with pytest.raises(BpfUnavailable, match="apt install python3-bpfcc"):
        import_bcc()


def test_a_bcc_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "bcc", raising=False)
    monkeypatch.setattr(compiler, "BCC_FOLDERS", (str(tmp_path),))
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc" / "libbcc.py").touch()
    (tmp_path / "bcc" / "__init__.py").write_text("raise OSError('libbcc.so.0: cannot open shared object file')")
    with pytest.raises(BpfUnavailable, match=r"does not load .*; reinstall python3-bpfcc"):
        import_bcc()
    assert "bcc" not in sys.modules


def test_no_kernel_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    monkeypatch.setattr(compiler, "_has_own_headers", lambda: False)
    monkeypatch.setattr(compiler, "_split_headers", lambda: None)
    with pytest.raises(BpfUnavailable, match=r"no kernel headers .* apt install linux-headers"), kernel_headers():
        pass


def test_split_headers_are_joined_and_put_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # given two folders as Debian splits them
    for path in (
        "flavour/include/generated/a.h",
        "flavour/arch/x86/b.h",
        "common/include/linux/c.h",
        "common/arch/x86/d.h",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.delenv("BCC_KERNEL_SOURCE", raising=False)
    monkeypatch.setattr(compiler, "_has_own_headers", lambda: False)
    monkeypatch.setattr(compiler, "_split_headers", lambda: (tmp_path / "flavour", tmp_path / "common"))
    # when
    with kernel_headers():
        joined = Path(os.environ["BCC_KERNEL_SOURCE"])
        # then all four are there
        for path in ("include/generated/a.h", "include/linux/c.h", "arch/x86/b.h", "arch/x86/d.h"):
            assert (joined / path).is_file()
    # and afterwards nothing is
    assert not joined.exists()
    assert "BCC_KERNEL_SOURCE" not in os.environ


@pytest.mark.bpf
def test_a_program_that_does_not_compile(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(BpfUnavailable, match=r"error: .*nonsense"):
        compile_program(("launches.c",), {"MAX_PROBES": "nonsense"}, ("on_launch",))  # type: ignore[dict-item]
    assert capfd.readouterr().err == ""
